"""The benchmark of a training step measures the same work on both sides, and does without TRL where it is missing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.lab.bench.fit import bench_fit
from ftis_node.lab.bench.model import SETTINGS, Size, own_work, random_policy, small_config
from ftis_node.lab.bench.train import bench_train, caught_gradient, check_same_work, our_gradient
from ftis_node.lab.bench.trl import Trl
from tests.support.small_models import tiny_config

SMALL = Size(groups=2, group=4, prompt_tokens=6, completion_tokens=8)
KEYS = {
    "ours_cpu_s",
    "trl_cpu_s",
    "ratio",
    "ours_tokens_per_s",
    "trl_tokens_per_s",
    "peak_memory_mb",
    "parameters",
    "vocabulary",
    "repeats",
    "ours_spread",
    "trl_spread",
    "threads",
    "trl_micro_batch",
    "model",
    "batch",
    "device",
}
FIT_KEYS = {
    "train_tokens_per_s",
    "generate_tokens_per_s",
    "step_s",
    "generation_s",
    "memory_ratio",
    "budget_mb",
    "fits",
    "peak_memory_mb",
    "peak_training_mb",
    "peak_generating_mb",
    "predicted_memory_mb",
    "predicted_training_mb",
    "predicted_generating_mb",
    "predicted_overhead_mb",
    "kind",
    "dtype",
    "optimiser",
    "gradient_checkpointing",
    "micro_batch_tokens",
    "memory_retries",
    "generation_batch",
    "parameters",
    "vocabulary",
    "repeats",
    "threads",
    "model",
    "batch",
    "device",
    "way",
}


@pytest.mark.slow
def test_both_sides_are_timed_on_one_batch() -> None:
    told: list[str] = []
    figures = bench_train(SMALL, repeats=2, tell=told.append)
    assert set(figures) == KEYS and told
    assert figures["ours_spread"][0] <= figures["ours_cpu_s"] <= figures["ours_spread"][1]
    assert figures["trl_spread"][0] <= figures["trl_cpu_s"] <= figures["trl_spread"][1]
    assert figures["ratio"] == pytest.approx(figures["ours_cpu_s"] / figures["trl_cpu_s"])
    assert figures["ours_tokens_per_s"] == pytest.approx(SMALL.tokens / figures["ours_cpu_s"])
    assert figures["parameters"] == pytest.approx(1.05e6, rel=0.01) and figures["vocabulary"] == 2048
    assert figures["repeats"] == 2 and SMALL.completions % figures["trl_micro_batch"] == 0
    assert figures["peak_memory_mb"] > 12 * figures["parameters"] / 1e6  # weights and AdamW's moments alone
    json.dumps(figures)


@pytest.mark.slow
def test_other_advantages_are_seen_to_be_other_work(tmp_path: Path) -> None:
    config = small_config()
    policy = random_policy(config, SETTINGS)
    work = own_work(policy, SMALL, SMALL.completions)
    ours = our_gradient(policy, work)
    broken = replace(work, rewards=[[*group[1:], group[0]] for group in work.rewards])
    for given, same in ((work, True), (broken, False)):
        trl = Trl(config, given, SMALL, micro_batch=4, folder=tmp_path)
        with caught_gradient(trl.model) as theirs:
            trl.step()
        if same:
            check_same_work(ours, theirs)
        else:
            with pytest.raises(RuntimeError, match="not the same work"):
                check_same_work(ours, theirs)


def test_a_model_that_does_not_fit_is_refused_before_it_is_made() -> None:
    settings = Settings(model="qwen2.5-7b", device="cpu", vram_gb=1.0)
    with pytest.raises(UserError, match=r"qwen2.5-7b does not fit: .* takes \d.* GB of 1.00 GB"):
        bench_fit(settings, SMALL, repeats=2, tell=lambda line: None)


@pytest.mark.parametrize("lora", [False, True])
def test_a_folder_with_a_configuration_alone_is_measured_against_its_plan(tmp_path: Path, lora: bool) -> None:
    tiny_config().save_pretrained(tmp_path)
    settings = Settings(model=str(tmp_path), device="cpu", lora=lora, lora_rank=4, vram_gb=4.0)
    figures = bench_fit(settings, SMALL, repeats=2, tell=lambda line: None)
    assert set(figures) == FIT_KEYS
    assert figures["device"].startswith("cpu") and figures["kind"] == ("lora" if lora else "full") and figures["fits"]
    assert figures["train_tokens_per_s"] == pytest.approx(SMALL.tokens / figures["step_s"])
    assert figures["generate_tokens_per_s"] == pytest.approx(SMALL.tokens / figures["generation_s"])
    assert 0 < figures["peak_generating_mb"] <= figures["peak_memory_mb"] and figures["peak_training_mb"] > 0
    assert figures["memory_ratio"] == pytest.approx(figures["peak_memory_mb"] / figures["predicted_memory_mb"])
    assert figures["budget_mb"] == pytest.approx(4 * 1024**3 / 1e6) and figures["vocabulary"] == 26
    json.dumps(figures)
