"""The benchmark of generation has all do the same work, and says how they compare."""

import pytest

from ftis_node.lab.bench import generate
from ftis_node.lab.bench.generate import bench_generate
from ftis_node.lab.bench.model import Size
from tests.support.cli import answer

FLAGS = ["--groups", "2", "--group", "3", "--prompt-tokens", "6", "--completion-tokens", "5", "--repeats"]


@pytest.mark.parametrize("named", [[], ["--model", "tiny-a"]])
def test_all_ways_are_timed_in_turns(named):
    figures = answer("bench", "generate", *FLAGS, 2, *named)
    for name in ("native", "plain", "nf4"):
        for unit in ("cpu_s", "s"):
            low, high = figures[f"{name}_tokens_per_{unit}_spread"]
            assert 0 < low <= figures[f"{name}_tokens_per_{unit}"] <= high
    for rival in ("plain", "nf4"):
        ours, theirs = figures["native_tokens_per_cpu_s"], figures[f"{rival}_tokens_per_cpu_s"]
        assert figures[f"ratio_{rival}"] == pytest.approx(ours / theirs)
    assert figures["native"]
    assert figures["generation_batch"] == 6
    assert figures["vocabulary"] == (26 if named else 2048)
    assert figures["batch"]["prompt_tokens"] == 6
    assert figures["native_peak_memory_mb"] > 4e-6 * figures["parameters"] < figures["plain_peak_memory_mb"]


def test_tokens_that_are_missing_are_noticed(monkeypatch):
    monkeypatch.setattr(generate, "_plain", lambda *_: 7)
    with pytest.raises(RuntimeError, match="7 tokens were generated in place of 8"):
        bench_generate(None, None, {}, Size(1, 2, 3, 4), repeats=1)
