"""The benchmarks of a whole step run the daemon's own, on both sides with their generation, and tell where it goes."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest

from ftis_node.errors import UsageError
from ftis_node.lab.bench import growth
from ftis_node.lab.bench.model import Size, small_config
from ftis_node.lab.bench.step import PARTS, bench_step
from ftis_node.lab.bench.whole import WholeNode
from tests.support.cli import refused

SMALL = Size(groups=4, group=4, prompt_tokens=6, completion_tokens=8)


def test_a_whole_step_is_timed_in_parts_beside_trls_and_traced(tmp_path: Path) -> None:
    trace, told = tmp_path / "trace.json", []
    figures = bench_step(SMALL, repeats=2, trace=trace, tell=told.append)
    assert told and figures["ratio"] == pytest.approx(figures["ours_cpu_s"] / figures["trl_cpu_s"])
    assert figures["ours_spread"][0] <= figures["ours_cpu_s"] <= figures["ours_spread"][1]
    parts = [figures[f"{part}_cpu_s"] for part in (*PARTS, "rest")]
    assert min(parts) > 0 and sum(parts) == pytest.approx(figures["ours_cpu_s"])
    assert 0 < figures["idle_share"] < 1
    assert SMALL.completions % figures["trl_micro_batch"] == 0
    spans = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    assert set(PARTS) <= set(spans) and any(name.startswith("aten::") for name in spans)


def test_a_trace_that_cannot_be_written_is_told_before_the_steps(tmp_path: Path) -> None:
    error = refused("bench", "step", "--trace", tmp_path / "no" / "trace.json")
    assert isinstance(error, UsageError) and "cannot be written" in error.what


@pytest.mark.parametrize("slept", [0.0, 24 * 3600.0])
def test_a_node_takes_three_quarters_from_peers(tmp_path: Path, slept: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that slept: ages are told by another clock than waits."""
    monkeypatch.setattr(time, "clock_gettime", lambda _: time.monotonic() + slept)

    async def steps(node: WholeNode) -> list[tuple[int, int]]:
        taken = []
        for _ in range(3):
            node.prepare()
            last = await node.step()
            taken.append((last["own_groups"], last["foreign_groups"]))
        return taken

    with contextlib.closing(WholeNode(small_config(), SMALL, tmp_path, peers=5)) as node:
        assert asyncio.run(steps(node))[-1] == (1, 3)


@pytest.mark.slow
def test_growth_is_told_by_what_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "BASE", SMALL)
    monkeypatch.setattr(growth, "GROWING", {"group": ("size", (2, 8)), "peers": ("peers", (1, 3))})
    plot = tmp_path / "growth.png"
    found = growth.bench_growth(repeats=1, plot=plot, tell=lambda _: None)
    assert plot.read_bytes().startswith(b"\x89PNG")
    few, many = found["group"]["points"]
    assert (few["value"], many["value"]) == (2, 8)
    assert many["peak_memory_mb"] > few["peak_memory_mb"] > 0 and 0 < found["group"]["exponent"]["peak_memory_mb"] < 1
    assert len(found["peers"]["points"]) == 2 and found["peers"]["points"][0]["rest"] > 0
    json.dumps(found)
