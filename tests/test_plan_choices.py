"""The plan is the best of what fits, in one order of what is given up."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.fit.memory import CONTEXT_BYTES, FRAGMENTATION, Workload
from ftis_node.fit.plan import MICRO_BATCH_TOKENS
from ftis_node.policy.measure import geometry
from tests.support.geometries import GSM8K, HALF, MIDDLE, SHORT, THREE, planned, qwen

EIGHT_BIT = ("eight_bit",)
FOUR_BIT = ("four_bit",)


def test_every_step_of_the_order_is_taken_as_memory_shrinks():
    seen = []
    for gb in np.arange(40, 4, -0.02):
        p = planned(MIDDLE, gb, SHORT, may=EIGHT_BIT)
        smaller = (p.micro_batch_tokens < 1280, p.generation_batch < 48, p.fits)
        step = (p.lora, p.optimiser, p.gradient_checkpointing, *smaller)
        if step not in seen[-1:]:
            seen.append(step)
    assert seen == [
        (False, "adamw", False, False, False, True),
        (False, "adamw", True, False, False, True),
        (False, "adamw8bit", False, False, False, True),
        (False, "adamw8bit", True, False, False, True),
        (True, "adamw", False, False, False, True),
        (True, "adamw", True, False, False, True),
        (True, "adamw", True, False, True, True),
        (True, "adamw", True, True, True, True),
        (True, "adamw", True, True, True, False),
    ]


def test_four_bits_are_taken_where_two_bytes_would_crawl():
    """What 8 and 12 GB allow on GSM8K: 3B and 7B, with at least 48 completions at a time."""
    crawling = planned(THREE, 8)
    assert crawling.quantisation == "none"
    assert crawling.generation_batch < 48
    for shape, gb in ((THREE, 8), (qwen("7b"), 12)):
        chosen = planned(shape, gb, may=FOUR_BIT)
        assert chosen.fits is True
        assert chosen.lora is True
        assert chosen.quantisation == "nf4"
        assert chosen.generation_batch >= 48
        assert chosen.micro_batch_tokens >= 2048
        assert chosen.reasons[0].startswith("LoRA on weights of four bits (NF4), because")
    asked = planned(THREE, 24, quantisation="nf4")
    assert asked.lora is True
    assert asked.quantisation == "nf4"
    assert "as it was asked for" in asked.reasons[0]
    assert "1.6 times" in asked.reasons[1]
    for none in (
        planned(THREE, 16, may=FOUR_BIT),  # it fits
        planned(THREE, 8, may=FOUR_BIT, quantisation="none"),
        planned(THREE, 8, device="cpu", may=FOUR_BIT),  # slow there
    ):
        assert none.quantisation == "none"
    assert planned(THREE, 16, fastest="float16").dtype == "float16"


def rank(chosen):
    """Where it stands in the order of ways, the best least."""
    return chosen.lora, chosen.optimiser == "adamw8bit", chosen.gradient_checkpointing, -chosen.micro_batch_tokens


@pytest.mark.parametrize(
    ("gb", "tokens", "checkpointing"),
    [
        (90, 16_384, False),
        (24, 4_096, False),
        (16, 16_384, True),
    ],
)
def test_smaller_micro_batches_are_taken_before_checkpointing(gb, tokens, checkpointing):
    chosen = planned(THREE, gb, lora=True)
    assert chosen.micro_batch_tokens == tokens
    assert chosen.gradient_checkpointing == checkpointing
    assert chosen.fits is True
    text = " ".join(chosen.reasons)
    assert ("Micro-batches of 4,096 tokens, because 16,384 would keep 64.5 GB" in text) == (tokens == 4_096)
    assert ("Gradient checkpointing, because 2,048 tokens would keep 7.95 GB" in text) == checkpointing
    listed = text.count("; LoRA") + text.count(": LoRA")
    assert listed == (gb < 90) + checkpointing, "sizes of one way are not listed"


def test_a_cpu_takes_smaller_micro_batches_before_checkpointing_too():
    chosen = planned(HALF, 6, Workload(200, 96, 8, 4), "cpu", lora=True, dtype="float32")
    assert chosen.micro_batch_tokens == 1_024
    assert chosen.gradient_checkpointing is False
    assert chosen.fits is True


def test_they_are_no_smaller_where_prompts_would_be_read_too_often():
    long = Workload(prompt_tokens=1_500, completion_tokens=100, group=12, batch_groups=24)
    plans = [planned(MIDDLE, gb, long, lora=True) for gb in np.arange(10, 60, 0.5)]
    sizes = {p.micro_batch_tokens for p in plans if not p.gradient_checkpointing}
    assert sizes == {16_384, 12_288, 8_192, 6_144}, "4,096 hold one prompt for 7 rows"


@pytest.mark.parametrize(
    ("device", "wishes", "tokens"),
    [
        ("cpu", {}, 2_048),
        ("cuda", {"micro_batch_tokens": 8_192}, 8_192),
    ],
)
def test_they_are_no_smaller_on_a_cpu_nor_where_a_size_is_wished_for(device, wishes, tokens):
    for gb in np.arange(30, 60, 2):
        chosen = planned(THREE, gb, device=device, lora=True, **wishes)
        assert chosen.micro_batch_tokens == tokens


@given(
    shape=st.sampled_from([HALF, MIDDLE, THREE]),
    workload=st.builds(Workload, *(st.integers(1, 4096),) * 2, st.integers(2, 64), st.integers(1, 64)),
    low=st.floats(0.5, 160),
    more=st.floats(0, 80),
    eight_bit=st.booleans(),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_more_memory_is_never_worse(shape, workload, low, more, eight_bit, device):
    may = EIGHT_BIT if eight_bit else ()
    less, much = (planned(shape, gb, workload, device, may=may) for gb in (low, low + more))
    assert much.fits or not less.fits
    assert rank(much) <= rank(less)
    for p in (less, much):
        assert p.fits == (p.memory.total <= p.budget)
        assert p.generation_batch % workload.group == 0
        assert p.micro_batch_tokens >= 64


def test_wishes_are_kept_whether_they_fit_or_not():
    wishes = {
        "lora": False,
        "dtype": "float32",
        "optimiser": "adamw8bit",
        "gradient_checkpointing": False,
        "micro_batch_tokens": 1000,
        "generation_batch": 100,
    }
    for gb in (1, 24, 500):
        chosen = planned(HALF, gb, **wishes)
        assert {name: getattr(chosen, name) for name in wishes} == wishes
        assert chosen.reasons[0] == "Full training, as it was asked for or settled before."
        assert chosen.fits == (gb > 1)


@pytest.mark.parametrize("gb", [4, 8, 12, 24, 80])
def test_some_of_a_gpu_stays_free(gb):
    need = planned(replace(THREE, decoded=0), gb, lora=True).memory  # graphs keep nothing of it
    bare = CONTEXT_BYTES["cuda"] + round((1 + FRAGMENTATION) * replace(need, overhead=0).total)
    assert need.total - bare == max(300 << 20, round(0.02 * bare))


def test_where_nothing_fits_it_says_how_much_would_do():
    small = planned(THREE, 4)
    assert small.fits is False
    assert small.micro_batch_tokens == GSM8K.longest
    assert small.generation_batch == GSM8K.group
    enough = re.search("so (.*?) GB", small.reasons[-1])
    assert enough is not None
    assert planned(THREE, float(enough[1])).fits


def test_small_models_compute_in_fp32_and_a_cpu_in_what_it_multiplies_fastest():
    tiny = geometry("tiny-a")
    assert planned(tiny, 24).dtype == "float32"
    assert planned(HALF, 64, device="cpu").dtype == "bfloat16"
    on_cpu = planned(HALF, 64, device="cpu", fastest="float32")
    assert on_cpu.dtype == "float32"
    assert on_cpu.memory.master == 0
    assert on_cpu.lora is True
    assert on_cpu.reasons[0].startswith("LoRA, because without a GPU")
    assert not planned(tiny, 64, device="cpu").lora
    assert CONTEXT_BYTES["cpu"] <= on_cpu.memory.overhead


def test_a_micro_batch_is_no_larger_than_the_step():
    short = planned(HALF, 80, SHORT)
    assert short.micro_batch_tokens == 4 * (64 + 4 * 64)
    assert short.generation_batch == 48
    assert planned(HALF, 80).micro_batch_tokens == MICRO_BATCH_TOKENS["cuda"]


def test_on_a_cpu_8_bit_adamw_is_used_only_where_it_is_wished_for():
    for gb in range(5, 41):
        assert planned(MIDDLE, gb, SHORT, "cpu", may=EIGHT_BIT).optimiser == "adamw"
    assert planned(HALF, 1, device="cpu", optimiser="adamw8bit").optimiser == "adamw8bit"
