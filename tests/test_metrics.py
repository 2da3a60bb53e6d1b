"""One event a line; a kill costs the line that it cut and no other."""

import errno
import gzip
import resource
import time
from pathlib import Path

import pytest

from ftis_node.observe import metrics
from ftis_node.observe.metrics import MetricsLog, end_of_parts, older_parts, read_events


def write(path, *steps):
    log = MetricsLog(path)
    for step in steps:
        log.write("step", step=step, loss=float("nan"), name="\u2028é")
    log.write("evaluation", step=0)
    log.close()


def steps(path):
    return [entry["step"] for entry in read_events(path, "step")]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_events_come_back_by_kind_and_across_restarts(path):
    before = time.time()
    write(path, 1, 2)
    write(path, 3)
    assert steps(path) == [1, 2, 3]
    assert len(read_events(path, "evaluation")) == 2
    [first, *_] = read_events(path, "step")
    assert before <= first["time"] <= time.time()
    assert first["name"] == "\u2028é"


def test_a_line_is_in_the_file_as_soon_as_it_is_written(path):
    assert steps(path) == [], "there is no file yet"
    log = MetricsLog(path)
    log.write("step", step=1)
    assert steps(path) == [1]
    log.close()


@pytest.mark.parametrize("cut", [1, 2, 5, 20, 60])
def test_a_last_line_that_a_kill_cut_short_is_left_out_and_spoils_nothing_after_it(path, cut):
    log = MetricsLog(path)
    for step in (1, 2):
        log.write("step", step=step, padding="x" * 60)
    log.close()
    path.write_bytes(path.read_bytes()[:-cut])
    whole = [1, 2] if cut == 1 else [1]  # without its newline a line is still whole
    assert steps(path) == whole
    write(path, 3)
    assert steps(path) == [*whole, 3]


# --- in parts ---------------------------------------------------------------------------------------------------------


def rotating(path, older_bytes=1 << 20):
    """A part for every three steps or so."""
    return MetricsLog(path, older_bytes, part_bytes=200)


def write_parts(path, steps, older_bytes=1 << 20):
    log = rotating(path, older_bytes)
    for step in steps:
        log.write("step", step=step, padding="x" * 30)
    log.close()


def numbers(path):
    return [part.number for part in older_parts(path)]


def test_a_long_log_becomes_compressed_parts_and_no_line_is_lost(path, tmp_path):
    write_parts(path, range(20))
    write_parts(path, range(20, 40))
    assert steps(path) == list(range(40))
    assert len(numbers(path)) > 5
    assert numbers(path)[0] == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {
        path.name,
        *(f"metrics-{number:08d}.jsonl.gz" for number in numbers(path)),
    }
    assert path.stat().st_size < 300


def test_the_end_of_a_log_is_found_in_older_parts_too(path):
    write_parts(path, range(20))
    for size in (1, 100, 400, 1500):
        found = [entry["step"] for entry in read_events(path, "step", last_bytes=size)]
        assert found == list(range(20))[20 - len(found) :]
        assert size // 100 - 2 <= len(found) <= size // 60 + 1


def test_an_older_line_does_not_come_in_the_place_of_one_that_is_too_long(path):
    log = rotating(path)
    for step, length in enumerate((100, 1, 300)):  # a part, which ends in a short line, and the present file
        log.write("step", step=step, padding="x" * length)
    log.close()
    assert numbers(path) == [1]
    assert [entry["step"] for entry in read_events(path, "step", last_bytes=200)] == []
    assert [entry["step"] for entry in read_events(path, "step", last_bytes=500)] == [1, 2]


@pytest.mark.parametrize("stage", ["renamed", "half compressed", "compressed"])
def test_a_kill_while_a_part_is_made_loses_and_doubles_nothing(path, tmp_path, stage):
    write(path, 1, 2)
    plain = tmp_path / "metrics-00000001.jsonl"
    path.rename(plain)
    if stage == "half compressed":
        (tmp_path / "metrics-00000001.jsonl.gz.partial").write_bytes(gzip.compress(plain.read_bytes())[:-20])
    if stage == "compressed":
        (tmp_path / "metrics-00000001.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert steps(path) == [1, 2], "a reader before the next start"
    log = rotating(path)
    log.write("step", step=3)
    log.close()
    assert steps(path) == [1, 2, 3]
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, "metrics-00000001.jsonl.gz"}


def test_what_a_person_keeps_beside_a_log_is_left_alone(tmp_path):
    mine = {
        tmp_path / "metrics-mine.jsonl": b"copied",
        tmp_path / "metrics-mine.jsonl.gz": b"copied before",
        tmp_path / "metrics-mine.jsonl.gz.partial": b"cut short",
    }
    for file, content in mine.items():
        file.write_bytes(content)
    write_parts(tmp_path / "metrics.jsonl", range(10))
    assert {file: file.read_bytes() for file in mine} == mine


def test_the_oldest_parts_make_room_and_the_latest_stays(path):
    write_parts(path, range(30))
    many = len(numbers(path))
    size = sum(part.path.stat().st_size for part in older_parts(path))
    write_parts(path, range(30, 31), older_bytes=size // 2)
    kept = numbers(path)
    assert kept == list(range(kept[0], kept[-1] + 1))
    assert kept[-1] >= many
    assert 1 < len(kept) < many
    assert sum(part.path.stat().st_size for part in older_parts(path)) <= size // 2
    found = steps(path)
    assert found == list(range(found[0], 31))
    write_parts(path, range(31, 40), older_bytes=0)
    assert len(numbers(path)) == 1
    assert numbers(path)[0] > kept[-1], "it tells how many there were"


def part_in(folder):
    path = folder / "metrics.jsonl"
    write_parts(path, range(20))
    return path, older_parts(path)[1].path


def test_a_damaged_part_costs_its_own_lines_alone(tmp_path, caplog):
    path, part = part_in(tmp_path)
    part.write_bytes(part.read_bytes()[:20])
    found = steps(path)
    assert found[:2] == [0, 1]
    assert found[-1] == 19
    assert len(found) < 20
    assert part.name in caplog.text


def test_row_63_a_part_that_unpacks_to_too_much_is_damaged(tmp_path, caplog):
    path, part = part_in(tmp_path)
    part.write_bytes(gzip.compress(bytes(1 << 28), 9))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert steps(path)[-1] == 19
    assert len(end_of_parts(path, 1 << 20)) < 1 << 20
    assert f"{part.name} is damaged (it unpacks to too much)" in caplog.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "in KiB"


def test_a_disk_that_is_full_leaves_the_parts_as_they_are(path, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as full:
        full.setattr(metrics.shutil, "copyfileobj", raising(OSError(errno.ENOSPC, "No space left on device")))
        write_parts(path, range(10))
    assert steps(path) == list(range(10))
    assert "tried again" in caplog.text
    assert not list(tmp_path.glob("*.partial"))
    write_parts(path, range(10, 11))
    assert steps(path) == list(range(11))
    assert all(part.path.suffix == ".gz" for part in older_parts(path))


def test_a_part_that_cannot_begin_is_begun_with_the_next_line(path, monkeypatch):
    log = rotating(path)
    for step in range(2):
        log.write("step", step=step, padding="x" * 60)
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr(MetricsLog, "_open", raising(OSError(errno.ENOSPC, "No space left on device")))
        log.write("step", step=2)
    log.write("step", step=3)
    log.close()
    assert steps(path) == [0, 1, 3]
    assert numbers(path) == [1]


def raising(error):
    def fail(*_):
        raise error

    return fail
