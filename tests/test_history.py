"""The page's curves: read from the metrics log as it grows, few points however long it is, whatever is in it."""

import gzip
import itertools
import json
import math
from pathlib import Path

import pytest

from ftis_node.observe import history as history_module
from ftis_node.observe.history import POINTS, TEACHERS, History
from ftis_node.observe.metrics import MetricsLog, read_events
from tests.support.steps import step


@pytest.fixture
def path(tmp_path) -> Path:
    """A log; there is none yet."""
    return tmp_path / "metrics.jsonl"


def written(path, steps):
    with path.open("a") as file:
        for number in steps:
            file.write(json.dumps({"time": 1e9 + number, "event": "step", **step(number)}) + "\n")


def curves(history):
    """Of what it has read now."""
    history.follow()
    return history.facts()["steps"]


def test_a_step_becomes_a_point_of_every_curve(path):
    history = History(path)
    assert not history.follow(), "there is no log yet"
    written(path, range(1, 3))
    assert history.follow()
    assert not history.follow()
    expected = {
        "step": [1, 2],
        "foreign_reward": [0.001, 0.002],
        "generate": [3.0, 3.0],
        "wait": [1.0, 1.0],
        "train": [2.0, 2.0],
        "importance": [0.95, 0.95],
        "filtered": [0.5, 0.5],
        "in_rate": [None, 1000.0],  # bytes a second, from the second step on
    }
    steps = history.facts()["steps"]
    assert {name: steps[name] for name in expected} == expected
    figures = {
        "samples": 20.0,
        "loss_weight": 6.0,
        "negatives": 8.0,
        "filtered": 2.0,
    }
    assert history.facts()["teachers"]["peer"] == figures


def test_however_many_steps_the_points_stay_few_and_their_means_right(path):
    history = History(path)
    for begin in range(0, 3000, 700):
        written(path, range(begin + 1, begin + 701))
        steps = curves(history)
        assert POINTS / 2 <= len(steps["step"]) <= POINTS
        assert steps["step"][-1] == begin + 700, "the latest step is always there"
        assert set(steps["own_reward"]) == {0.5}
    assert history.facts()["joined"] == 8
    assert steps["foreign_reward"][0] == pytest.approx(sum(range(1, 9)) / 8000)


def test_only_what_is_new_is_read(path):
    history = History(path)
    written(path, range(1, 4))
    history.follow()
    line = path.read_bytes().index(b"\n") + 1
    with path.open("r+b") as file:
        file.write(b"x" * (line - 1))  # were it read again, a point would be missing
    written(path, range(4, 5))
    assert curves(history)["step"] == [1, 2, 3, 4]


@pytest.mark.parametrize("parts", [1, 3])
def test_another_log_in_its_place_is_read_from_its_beginning(path, tmp_path, parts):
    history = History(path)
    for number in range(1, parts):
        written(tmp_path / f"metrics-{number:08d}.jsonl", range(number, number + 1))
    written(path, range(parts, 6))
    history.follow()
    for file in tmp_path.iterdir():
        file.rename(tmp_path / f"old-{file.name}")  # or the next might have its inode
    written(path, range(1, 3))
    assert history.follow()
    assert history.facts()["steps"]["step"] == [1, 2]


def test_of_many_authors_those_with_least_of_the_loss_are_counted_together(path):
    figures = {name: 1.0 for name in ("samples", "negatives", "filtered")}
    sources = {f"peer {number}": figures | {"loss_weight": float(number)} for number in range(TEACHERS + 10)}
    with (path).open("w") as file:
        for name, facts in {"own": figures | {"loss_weight": 0.0}, **sources}.items():
            line = step(1) | {"diagnostics": {"sources": {name: facts}}}
            file.write(json.dumps({"time": 1e9, "event": "step", **line}) + "\n")
    history = History(path)
    history.follow()
    told = history.facts()["teachers"]
    assert len(told) <= TEACHERS + 1
    assert {"own", f"peer {TEACHERS + 9}"} <= told.keys()
    assert "peer 0" not in told
    assert sum(one["samples"] for one in told.values()) == TEACHERS + 11, "nobody's are lost"


def test_a_log_in_parts_is_followed_across_them(path):
    log = MetricsLog(path, 1 << 20, part_bytes=1000)
    histories = [History(path)]
    for number in range(1, 41):
        log.write("step", **step(number))
        if number % 9 == 0:  # some of which are several parts behind
            histories.append(History(path))
        for history in histories[:: 1 + number % 3]:
            history.follow()
    log.close()
    for history in [*histories, History(path)]:
        assert curves(history)["step"] == list(range(1, 41))
        assert not history.follow()


@pytest.mark.parametrize("part_bytes", [100_000, 1 << 30])
def test_a_long_log_is_read_in_part(path, part_bytes, monkeypatch):
    monkeypatch.setattr(history_module, "WHOLE", 1 << 17)
    log = MetricsLog(path, 1 << 30, part_bytes=part_bytes)
    for number in range(1, 2001):
        log.write("step", padding="x" * 500, **step(number))
    log.close()
    history = History(path)
    steps = curves(history)["step"]
    assert history.version < 1000, "a part of it"
    assert steps[0] == 1
    assert steps[-1] == 2000
    assert 100 < len(steps) < 1000
    for one, after in itertools.pairwise(steps):
        assert one < after < one + 250


def test_half_a_line_waits_for_its_other_half_and_rubbish_is_left_out(path):
    line = json.dumps({"time": 1.0, "event": "evaluation", "step": 0, "pass_at_1": 0.5}).encode() + b"\n"
    history = History(path)
    path.write_bytes(b'rubbish\n[1]\n{"event": "step"}\n\xff\n' + line[:30])
    assert not history.follow()
    with path.open("ab") as file:
        file.write(line[30:])
    assert history.follow()
    assert history.facts()["evaluations"]["pass_at_1"] == [0.5]


def test_a_step_without_finite_numbers_leaves_a_gap_and_no_wreck(path):
    log = MetricsLog(path)
    log.write(
        "step",
        **step(
            1,
            own_reward=math.nan,
            foreign_reward=None,
            diagnostics={},
            skipped="no finite loss",
        ),
    )
    log.close()
    steps = curves(History(path))
    assert steps["own_reward"] == steps["foreign_reward"] == steps["importance"] == [None]


def test_a_restart_from_an_older_checkpoint_takes_back_what_became_void(path):
    log = MetricsLog(path)
    for number in range(1, 6):
        log.write("step", **step(number))
    log.write("started", step=3)
    log.write("step", **step(4, own_reward=1.0, bytes_in=7_000_000))
    log.close()
    steps = curves(History(path))
    assert steps["step"] == [1, 2, 3, 4]
    assert steps["own_reward"][-1] == 1.0
    assert steps["in_rate"][-1] is None


def test_what_is_left_of_a_part_cut_short_is_shown(path, tmp_path, caplog):
    """The log's only older part was compressed before."""
    written(path, range(1, 2001))
    whole = gzip.compress(path.read_bytes())
    part = tmp_path / "metrics-00000001.jsonl.gz"
    part.write_bytes(whole[: len(whole) * 9 // 10])
    path.unlink()
    written(path, range(2001, 2004))
    steps = curves(History(path))["step"]
    assert steps[0] < 10, "from the part"
    assert steps[-1] == 2003, "from the present file"
    known = [event["step"] for event in read_events(path, "step")]
    assert 1700 < len(known) < 2003
    assert known[-3:] == [2001, 2002, 2003]
    lately = read_events(path, "step", last_bytes=100_000)
    assert len(lately) > 50, "the end of the part too, where the present file is shorter"
    (told,) = (record.message for record in caplog.records)
    assert told.startswith(f"{part} is damaged")
