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
    return plan(
        SHAPE,
        24 * 10**9,
        Workload(512, 256, 12, 24),
        Wishes(lora=True, **wished),
        "cuda",
        True,
    )


def test_a_step_of_3b_takes_what_was_worked_out_kernel_by_kernel():
    """An RTX 4090 with LoRA: 27 ms a token of 288 rows, 10.5 s to train on 43 k tokens."""
    longest = Work(24, 12, 150, 256, 256)
    a_token = generating(SHAPE, planned(), longest, CARD) / 256
    assert a_token == pytest.approx(0.027, rel=0.2)
    assert training(SHAPE, planned(), WORK, CARD) == pytest.approx(10.5, rel=0.2)


def test_fewer_places_and_slower_cards_take_longer_to_generate():
    few = planned(generation_batch=24)
    plans = (planned(), planned(generation_batch=96), few)

    seconds = [generating(SHAPE, one, WORK, CARD) for one in plans]

    assert seconds == sorted(seconds)
    slower = CARDS["RTX 3060 12 GB"]
    assert generating(SHAPE, few, WORK, slower) > 1.5 * seconds[-1], "the bandwidth"
    nothing = WORK._replace(groups=0)
    assert generating(SHAPE, few, nothing, CARD) == 0


def test_checkpointing_and_padding_cost_what_they_compute():
    once = training(SHAPE, planned(gradient_checkpointing=False), WORK, CARD)
    twice = training(SHAPE, planned(gradient_checkpointing=True), WORK, CARD)
    assert twice == pytest.approx(1.5 * once), "a second forward pass"

    packed = training(SHAPE, planned(), WORK, CARD)
    padded = training(replace(SHAPE, padded="a window"), planned(), WORK, CARD)
    assert padded == pytest.approx(packed * (12 * 300) / (150 + 12 * 150))


def test_dequantising_costs_what_it_reads():
    four_bits = planned(quantisation="nf4", generation_batch=96)
    seconds = []
    for rows in (96, 95):
        card = replace(CARD, tflops=1e4, fused=rows)
        seconds.append(generating(SHAPE, four_bits, WORK, card))
    fused, apart = seconds
    tokens = 288 * 150 / 96 + 106
    assert apart - fused == pytest.approx(tokens * 4 * 2.77e9 / (1008e9 * 0.8), rel=0.02)
