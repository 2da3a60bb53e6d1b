"""The benchmarks of a whole step run the daemon's own, on both sides with their generation, and tell where it goes."""

import json

import pytest

from ftis_node.errors import UsageError
from ftis_node.lab.bench.model import Size
from ftis_node.lab.bench.step import PARTS, bench_step
from tests.support.cli import refused

SMALL = Size(groups=4, group=4, prompt_tokens=6, completion_tokens=8)


@pytest.mark.parametrize("model", [None, "tiny-a"])
def test_a_whole_step_is_timed_in_parts_beside_trls_and_traced(model, tmp_path):
    trace = tmp_path / "trace.json"
    figures = bench_step(model, None, {}, SMALL, repeats=2, trace=trace)
    assert figures["ratio"] == pytest.approx(figures["ours_cpu_s"] / figures["trl_cpu_s"])
    assert figures["ours_spread"][0] <= figures["ours_cpu_s"] <= figures["ours_spread"][1]
    parts = [figures[f"{part}_cpu_s"] for part in (*PARTS, "rest")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(figures["ours_cpu_s"])
    assert 0 < figures["idle_share"] < 1
    assert min(figures["peak_memory_mb"], figures["trl_peak_memory_mb"]) > 0
    assert SMALL.completions % figures["trl_micro_batch"] == 0
    spans = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    assert set(PARTS) <= set(spans)
    assert any(name.startswith("aten::") for name in spans)


def test_a_trace_that_cannot_be_written_is_told_before_the_steps(tmp_path):
    error = refused("bench", "step", "--trace", tmp_path / "no" / "trace.json")
    assert isinstance(error, UsageError)
    assert "cannot be written" in error.what
