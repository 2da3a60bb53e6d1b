"""The arithmetic of a step's seconds: where it was worked out by hand, and which way it goes."""

from dataclasses import replace

import pytest

from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Wishes, plan
from ftis_node.lab.step_seconds import CARDS, Work, generating, training
from ftis_node.policy.measure import geometry_of, known_config

WORK = Work(groups=24, group=12, prompt=150, completion=150, cap=256)
CARD = CARDS["RTX 4090 24 GB"]
SHAPE = geometry_of(known_config("qwen2.5-3b"), "qwen2.5-3b")


def planned(**wished):
    return plan(SHAPE, 24 * 10**9, Workload(512, 256, 12, 24), Wishes(lora=True, **wished), "cuda", True)


def test_a_step_of_3b_takes_what_was_worked_out_kernel_by_kernel():
    """An RTX 4090 with LoRA: 27 ms a token of 288 rows, 10.5 s to train on 43 k tokens."""
    assert generating(SHAPE, planned(), Work(24, 12, 150, 256, 256), CARD) / 256 == pytest.approx(0.027, rel=0.2)
    assert training(SHAPE, planned(), WORK, CARD) == pytest.approx(10.5, rel=0.2)


def test_more_work_and_slower_cards_take_longer():
    few = planned(generation_batch=24)
    seconds = [generating(SHAPE, one, WORK, CARD) for one in (planned(), planned(generation_batch=96), few)]
    assert seconds == sorted(seconds), "fewer places"
    assert generating(SHAPE, few, WORK, CARDS["RTX 3060 12 GB"]) > 1.5 * seconds[-1], "the bandwidth"
    twice, once = (training(SHAPE, planned(gradient_checkpointing=way), WORK, CARD) for way in (True, False))
    assert twice == pytest.approx(1.5 * once), "a second forward pass"
    assert generating(SHAPE, few, WORK._replace(groups=0), CARD) == 0


def test_padding_and_dequantising_cost_what_they_compute_and_read():
    padded = training(replace(SHAPE, padded="a window"), planned(), WORK, CARD)
    assert padded == pytest.approx(training(SHAPE, planned(), WORK, CARD) * (12 * 300) / (150 + 12 * 150))
    four_bits = planned(quantisation="nf4", generation_batch=96)
    fused, apart = (generating(SHAPE, four_bits, WORK, replace(CARD, tflops=1e4, fused=rows)) for rows in (96, 95))
    tokens = 288 * 150 / 96 + 106
    assert apart - fused == pytest.approx(tokens * 4 * 2.77e9 / (1008e9 * 0.8), rel=0.02)
