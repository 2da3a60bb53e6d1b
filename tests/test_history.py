"""The page's curves: read from the metrics log as it grows, few points however long it is, whatever is in it."""

import gzip
import itertools
import json
import math

import pytest

from ftis_node.observe import history as history_module
from ftis_node.observe.history import POINTS, TEACHERS, History
from ftis_node.observe.metrics import MetricsLog, read_events
from tests.support.steps import step


def written(path, steps):
    with path.open("a") as file:
        for number in steps:
            file.write(json.dumps({"time": 1e9 + number, "event": "step", **step(number)}) + "\n")


def facts_of(path):
    """What a log has come to."""
    history = History(path)
    history.follow()
    return history.facts()


def test_a_step_becomes_a_point_of_every_curve(tmp_path):
    history = History(tmp_path / "metrics.jsonl")
    assert not history.follow(), "there is no log yet"
    written(tmp_path / "metrics.jsonl", range(1, 3))
    assert history.follow() and not history.follow()
    steps = history.facts()["steps"]
    assert steps["step"] == [1, 2] and steps["foreign_reward"] == [0.001, 0.002]
    assert (steps["generate"], steps["wait"], steps["train"]) == ([3.0, 3.0], [1.0, 1.0], [2.0, 2.0])
    assert steps["importance"] == [0.95, 0.95] and steps["filtered"] == [0.5, 0.5]
    assert steps["in_rate"] == [None, 1000.0], "bytes a second, from the second step on"
    figures = {"samples": 20.0, "loss_weight": 6.0, "negatives": 8.0, "filtered": 2.0}
    assert history.facts()["teachers"]["peer"] == figures


def test_however_many_steps_the_points_stay_few_and_their_means_right(tmp_path):
    history = History(tmp_path / "metrics.jsonl")
    for begin in range(0, 3000, 700):
        written(tmp_path / "metrics.jsonl", range(begin + 1, begin + 701))
        history.follow()
        facts = history.facts()
        assert POINTS / 2 <= len(facts["steps"]["step"]) <= POINTS
        assert facts["steps"]["step"][-1] == begin + 700, "the latest step is always there"
        assert set(facts["steps"]["own_reward"]) == {0.5}
    assert facts["joined"] == 8 and facts["steps"]["foreign_reward"][0] == pytest.approx(sum(range(1, 9)) / 8000)


def test_only_what_is_new_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    history = History(path)
    written(path, range(1, 4))
    history.follow()
    line = path.read_bytes().index(b"\n") + 1
    with path.open("r+b") as file:
        file.write(b"x" * (line - 1))  # were it read again, a point would be missing
    written(path, range(4, 5))
    history.follow()
    assert history.facts()["steps"]["step"] == [1, 2, 3, 4]


@pytest.mark.parametrize("parts", [1, 3])
def test_another_log_in_its_place_is_read_from_its_beginning(tmp_path, parts):
    path = tmp_path / "metrics.jsonl"
    history = History(path)
    for number in range(1, parts):
        written(tmp_path / f"metrics-{number:08d}.jsonl", range(number, number + 1))
    written(path, range(parts, 6))
    history.follow()
    for file in tmp_path.iterdir():
        file.rename(tmp_path / f"old-{file.name}")  # or the next might have its inode
    written(path, range(1, 3))
    assert history.follow() and history.facts()["steps"]["step"] == [1, 2]


def test_of_many_authors_those_with_least_of_the_loss_are_counted_together(tmp_path):
    figures = {name: 1.0 for name in ("samples", "negatives", "filtered")}
    sources = {f"peer {number}": figures | {"loss_weight": float(number)} for number in range(TEACHERS + 10)}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for name, facts in {"own": figures | {"loss_weight": 0.0}, **sources}.items():
            line = step(1) | {"diagnostics": {"sources": {name: facts}}}
            file.write(json.dumps({"time": 1e9, "event": "step", **line}) + "\n")
    history = History(tmp_path / "metrics.jsonl")
    history.follow()
    told = history.facts()["teachers"]
    assert len(told) <= TEACHERS + 1 and "own" in told and f"peer {TEACHERS + 9}" in told and "peer 0" not in told
    assert sum(one["samples"] for one in told.values()) == TEACHERS + 11, "nobody's are lost"


def test_a_log_in_parts_is_followed_across_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
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
        history.follow()
        assert history.facts()["steps"]["step"] == list(range(1, 41))
        assert not history.follow()


@pytest.mark.parametrize("part_bytes", [100_000, 1 << 30])
def test_a_long_log_is_read_in_part(part_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(history_module, "WHOLE", 1 << 17)
    monkeypatch.setattr(history_module, "WINDOWS", 16)
    log = MetricsLog(tmp_path / "metrics.jsonl", 1 << 30, part_bytes=part_bytes)
    for number in range(1, 2001):
        log.write("step", padding="x" * 500, **step(number))
    log.close()
    history = History(tmp_path / "metrics.jsonl")
    history.follow()
    assert history.version < 1000, "a part of it"
    steps = history.facts()["steps"]["step"]
    assert steps[0] == 1 and steps[-1] == 2000 and 100 < len(steps) < 1000
    assert steps == sorted(set(steps)) and max(b - a for a, b in itertools.pairwise(steps)) < 250


def test_half_a_line_waits_for_its_other_half_and_rubbish_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"time": 1.0, "event": "evaluation", "step": 0, "pass_at_1": 0.5}).encode() + b"\n"
    history = History(path)
    path.write_bytes(b'rubbish\n[1]\n{"event": "step"}\n\xff\n' + line[:30])
    assert not history.follow()
    with path.open("ab") as file:
        file.write(line[30:])
    assert history.follow()
    assert history.facts()["evaluations"]["pass_at_1"] == [0.5]


def test_a_step_without_finite_numbers_leaves_a_gap_and_no_wreck(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write("step", **step(1, own_reward=math.nan, foreign_reward=None, diagnostics={}, skipped="no finite loss"))
    log.close()
    steps = facts_of(tmp_path / "metrics.jsonl")["steps"]
    assert (steps["own_reward"], steps["foreign_reward"], steps["importance"]) == ([None], [None], [None])


def test_a_restart_from_an_older_checkpoint_takes_back_what_became_void(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for number in range(1, 6):
        log.write("step", **step(number))
    log.write("started", step=3)
    log.write("step", **step(4, own_reward=1.0, bytes_in=7_000_000))
    log.close()
    steps = facts_of(tmp_path / "metrics.jsonl")["steps"]
    assert (steps["step"], steps["own_reward"][-1], steps["in_rate"][-1]) == ([1, 2, 3, 4], 1.0, None)


def cut_part(home):
    """A log whose only older part was compressed and then cut short."""
    log = home / "metrics.jsonl"
    written(log, range(1, 2001))
    part = home / "metrics-00000001.jsonl.gz"
    whole = gzip.compress(log.read_bytes())
    part.write_bytes(whole[: len(whole) * 9 // 10])
    log.unlink()
    written(log, range(2001, 2004))
    return log


def test_what_is_left_of_a_part_cut_short_is_shown(tmp_path, caplog):
    history = History(cut_part(tmp_path))
    assert history.follow()
    steps = history.facts()["steps"]["step"]
    assert steps[0] < 10 and steps[-1] == 2003, "from the part, and from the present file"
    known = [event["step"] for event in read_events(tmp_path / "metrics.jsonl", "step")]
    assert 1700 < len(known) < 2003 and known[-3:] == [2001, 2002, 2003]
    lately = read_events(tmp_path / "metrics.jsonl", "step", last_bytes=100_000)
    assert len(lately) > 50, "the end of the part too, where the present file is shorter"
    (told,) = (record.message for record in caplog.records)
    assert told.startswith(f"{tmp_path / 'metrics-00000001.jsonl.gz'} is damaged")
