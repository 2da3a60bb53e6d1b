"""One event a line; a kill costs the line that it cut and no other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftis_node.observe.metrics import MetricsLog, read_events


def write(path: Path, *steps: int) -> None:
    log = MetricsLog(path)
    for step in steps:
        log.write("step", step=step, loss=float("nan"), name="\u2028é")
    log.write("evaluation", step=0)
    log.close()


def steps(path: Path) -> list[int]:
    return [entry["step"] for entry in read_events(path, "step")]


def test_events_come_back_by_kind_and_across_restarts(tmp_path: Path) -> None:
    before = time.time()
    write(tmp_path / "metrics.jsonl", 1, 2)
    write(tmp_path / "metrics.jsonl", 3)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert len(read_events(tmp_path / "metrics.jsonl", "evaluation")) == 2
    [first, *_] = read_events(tmp_path / "metrics.jsonl", "step")
    assert before <= first["time"] <= time.time()
    assert first["name"] == "\u2028é"


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write("step", step=1)
    assert steps(tmp_path / "metrics.jsonl") == [1]
    log.close()


def test_without_a_file_there_are_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none", "step") == []


@pytest.mark.parametrize("cut", [1, 2, 5, 20, 60])
def test_a_last_line_that_a_kill_cut_short_is_left_out_and_spoils_nothing_after_it(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2):
        log.write("step", step=step, padding="x" * 60)
    log.close()
    path.write_bytes(path.read_bytes()[:-cut])
    whole = [1, 2] if cut == 1 else [1]  # without its newline a line is still whole
    assert steps(path) == whole
    write(path, 3)
    assert steps(path) == [*whole, 3]
