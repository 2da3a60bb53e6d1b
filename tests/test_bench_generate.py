"""The benchmark of generation has all do the same work, and says how they compare."""

import pytest

from ftis_node.lab.bench import generate
from ftis_node.lab.bench.generate import bench_generate, small_policy
from ftis_node.lab.bench.model import Size
from tests.support.cli import answer

FLAGS = ["--groups", "2", "--group", "3", "--prompt-tokens", "6", "--completion-tokens", "5", "--repeats"]


def test_all_ways_are_timed_in_turns() -> None:
    figures = answer("bench", "generate", *FLAGS, 2)
    for name in ("native", "plain", "nf4", "mixed", "mixed_plain"):
        for unit in ("cpu_s", "s"):
            low, high = figures[f"{name}_tokens_per_{unit}_spread"]
            assert 0 < low <= figures[f"{name}_tokens_per_{unit}"] <= high
    for rival in ("plain", "nf4"):
        ours, theirs = figures["native_tokens_per_cpu_s"], figures[f"{rival}_tokens_per_cpu_s"]
        assert figures[f"ratio_{rival}"] == pytest.approx(ours / theirs)
    mixed, plain = figures["mixed_tokens_per_cpu_s"], figures["mixed_plain_tokens_per_cpu_s"]
    assert figures["ratio_mixed"] == pytest.approx(mixed / plain)
    assert figures["lean"] and figures["floor_tokens_per_s"] is None and figures["over_floor"] is None
    assert figures["batch"]["completion_tokens"] == 5 and figures["generation_batch"] == 6


def test_the_floor_is_what_reading_everything_once_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, size = small_policy(), Size(groups=4, group=3, prompt_tokens=10, completion_tokens=8)
    monkeypatch.setattr(generate, "bandwidth", lambda device: 1e9)
    token = 2 * 4 * 2 * 32 * 4
    step = 2 * 4 * 1_050_752 + token * (4 * 10 + 12 * 4)  # in two batches the weights are read twice
    assert generate._floor(policy, size, batch=6) == pytest.approx(12 / (step / 1e9))


def test_tokens_that_are_missing_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_plain", lambda *_: 7)
    with pytest.raises(RuntimeError, match="7 tokens were generated in place of 8"):
        bench_generate(small_policy(), Size(1, 2, 3, 4), batch=2, repeats=1, tell=lambda line: None)
