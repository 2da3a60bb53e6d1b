"""The benchmark of a training step measures the same work on both sides, and does without TRL where it is missing."""

from dataclasses import replace

import pytest

from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.lab.bench.fit import bench_fit
from ftis_node.lab.bench.model import Size, own_work
from ftis_node.lab.bench.train import bench_train, caught_gradient, check_same_work, our_gradient
from ftis_node.lab.bench.trl import Trl
from ftis_node.lab.bench.whole import engine_of
from tests.support.small_models import tiny_config

SMALL = Size(groups=2, group=4, prompt_tokens=6, completion_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize("way", [{}, {"lora": "true", "dtype": "bfloat16"}])
def test_both_sides_are_timed_on_one_batch(way):
    figures = bench_train("tiny-a" if way else None, None, way, SMALL, repeats=2)
    assert figures["dtype"] == way.get("dtype", "float32")
    assert figures["ours_spread"][0] <= figures["ours_cpu_s"] <= figures["ours_spread"][1]
    assert figures["trl_spread"][0] <= figures["trl_cpu_s"] <= figures["trl_spread"][1]
    assert figures["ratio"] == pytest.approx(figures["ours_cpu_s"] / figures["trl_cpu_s"])
    assert SMALL.completions % figures["trl_micro_batch"] == 0
    if not way:
        assert figures["parameters"] == pytest.approx(1.05e6, rel=0.01)
        assert figures["vocabulary"] == 2048
        peak = min(figures["peak_memory_mb"], figures["trl_peak_memory_mb"])
        assert peak > 12 * figures["parameters"] / 1e6  # weights and AdamW's moments alone


@pytest.mark.slow
def test_other_advantages_are_seen_to_be_other_work(tmp_path):
    with engine_of(None, None, {}, SMALL) as (engine, _):
        policy, settings = engine.policy, engine.settings
        work = own_work(policy, SMALL, SMALL.completions)
        ours = our_gradient(policy, work, settings)
        broken = replace(work, rewards=[[*group[1:], group[0]] for group in work.rewards])
        trl = Trl(policy, settings, broken, SMALL, micro_batch=4, folder=tmp_path)
        with caught_gradient(trl.model) as theirs:
            trl.step()
        with pytest.raises(RuntimeError, match="not the same work"):
            check_same_work(ours, theirs)


def test_a_model_that_does_not_fit_is_refused_before_it_is_made():
    settings = Settings(model="qwen2.5-7b", device="cpu", vram_gb=1.0)
    with pytest.raises(UserError, match=r"qwen2.5-7b does not fit: .* takes \d.* GB of 1.00 GB"):
        bench_fit(settings, SMALL, repeats=2, tell=lambda line: None)


@pytest.mark.parametrize("lora", [False, True])
def test_a_folder_with_a_configuration_alone_is_measured_against_its_plan(tmp_path, lora):
    tiny_config().save_pretrained(tmp_path)
    settings = Settings(
        model=str(tmp_path),
        device="cpu",
        lora=lora,
        lora_rank=4,
        vram_gb=4.0,
    )
    figures = bench_fit(settings, SMALL, repeats=2, tell=lambda line: None)
    assert figures["device"].startswith("cpu")
    assert figures["kind"] == ("lora" if lora else "full")
    assert figures["fits"]
    assert figures["train_tokens_per_s"] == pytest.approx(SMALL.tokens / figures["step_s"])
    assert 0 < figures["peak_generating_mb"] <= figures["peak_memory_mb"]
    assert figures["peak_training_mb"] > 0
    assert figures["memory_ratio"] == pytest.approx(figures["peak_memory_mb"] / figures["predicted_memory_mb"])
    assert figures["budget_mb"] == pytest.approx(4 * 1024**3 / 1e6)
