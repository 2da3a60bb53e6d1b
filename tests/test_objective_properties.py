"""What must hold of any objective whatever the numbers are."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from ftis_node.objective import PRESETS, Terms, formulas
from tests.support.objective_batches import graded, packed, termed

EVERY = settings(max_examples=50, derandomize=True)
log_probs = st.floats(-15, 0)


@st.composite
def batches(draw, own=False):
    """The arguments of `terms`, in float64; with `own` the generator is the policy at the start of the step."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    total = sum(lengths)
    start = torch.tensor(draw(st.lists(log_probs, min_size=total, max_size=total)), dtype=torch.float64)
    drift = draw(st.lists(st.floats(-0.5, 0.5), min_size=total, max_size=total))
    claimed = draw(st.lists(log_probs, min_size=total, max_size=total))
    advantages = draw(st.lists(st.floats(-3, 3), min_size=len(lengths), max_size=len(lengths)))
    flags = st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))
    return {
        "trainer_logprobs": start if own else start + torch.tensor(drift, dtype=torch.float64),
        "start_logprobs": start,
        "sampler_logprobs": start if own else torch.tensor(claimed, dtype=torch.float64),
        "lengths": torch.tensor(lengths),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "ended": torch.tensor(draw(flags)),
        "own": torch.tensor([True] * len(lengths) if own else draw(flags)),
    }


def take(batch, order):
    """The samples `order` of a batch, in that order."""
    pieces = {
        name: torch.split(tensor, batch["lengths"].tolist())
        for name, tensor in batch.items()
        if name in ("trainer_logprobs", "start_logprobs", "sampler_logprobs")
    }
    tokens = {name: torch.cat([piece[i] for i in order]) for name, piece in pieces.items()}
    return tokens | {name: batch[name][order] for name in ("lengths", "advantages", "ended", "own")}


@EVERY
@given(batches(), st.randoms(use_true_random=False), st.sampled_from(["sample", "token", "fixed"]))
def test_order_and_packing_never_matter(batch, rng, aggregation):
    samples = batch["lengths"].numel()
    order = rng.sample(range(samples), samples)
    for preset in PRESETS.values():
        objective = preset.replace(aggregation=aggregation, divisor=8.0)
        together, gradient = graded(objective, take(batch, order) | {"gate": -7.0})
        alone = [graded(objective, take(batch, [i]) | {"gate": -7.0}) for i in order]
        assert torch.equal(gradient, torch.cat([slope for _, slope in alone]))
        for field in Terms.__dataclass_fields__:
            assert torch.equal(getattr(together, field), torch.cat([getattr(one, field) for one, _ in alone])), field


@EVERY
@given(batches(), st.integers(0, 5), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_filtered_sample_gives_nothing_even_if_nan(batch, which, alien):
    objective = PRESETS["ftis"].replace(threshold=1.0, divergence="k1", reduction="max")
    which %= batch["lengths"].numel()
    batch["advantages"][which] = -1.0
    owner = torch.repeat_interleave(torch.arange(batch["lengths"].numel()), batch["lengths"])
    batch["start_logprobs"][owner == which] = -15.0
    batch["sampler_logprobs"][owner == which] = -1.0
    clean, clean_gradient = graded(objective, batch)
    batch["trainer_logprobs"] = torch.where(owner == which, alien, batch["trainer_logprobs"])
    spoiled, gradient = graded(objective, batch)
    assert not spoiled.kept[which] and spoiled.value[which] == 0 and spoiled.loss_weight[which] == 0
    assert torch.equal(gradient, clean_gradient) and torch.equal(spoiled.value, clean.value)
    assert (gradient[owner == which] == 0).all()


@pytest.mark.parametrize("objective", PRESETS.values(), ids=lambda objective: objective.name)
def test_no_gradient_leaks_from_a_source_of_weight_zero(objective):
    batch = packed([[-1.0], [math.nan]], [1.0, -1.0], generator=[[-1.0], [-1.0]], weights=[1.0, 0.0])
    terms, gradient = graded(objective, batch)
    value = -1.0 if objective.ratio == "detached" else 1.0  # then it is log π; else a ratio
    assert gradient.tolist() == terms.loss_weight.tolist() == [1.0, 0.0] and terms.value.tolist() == [value, 0.0]


def test_an_unfiltered_nan_is_not_hidden_from_the_learner():
    terms = termed(PRESETS["ftis"], **packed([[math.nan]], [-1.0], generator=[[-1.0]]))
    assert terms.kept.all() and terms.value.isnan().all()


ALIEN = [0.0, -1e4, -1e30, 1e4]


DIVERGENCES = list(itertools.product(("k1", "k2", "k3", "is_k1", "is_k3", "k3_reverse"), ("mean", "sum", "max")))


@EVERY
@given(batches(), st.sampled_from(ALIEN), st.sampled_from([*ALIEN, -math.inf, math.inf]), st.sampled_from(DIVERGENCES))
def test_extreme_log_probs_stay_finite(batch, start, claimed, measure):
    batch = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    batch["start_logprobs"] = torch.full_like(batch["start_logprobs"], start)
    batch["sampler_logprobs"] = torch.full_like(batch["sampler_logprobs"], claimed)
    for preset in PRESETS.values():
        terms, gradient = graded(preset.replace(divergence=measure[0], reduction=measure[1]), batch)
        assert gradient.isfinite().all()
        for field in ("value", "divergence", "likelihood", "importance", "loss_weight"):
            assert getattr(terms, field).isfinite().all(), (preset.name, measure, field)


@EVERY
@given(batches())
def test_the_parts_of_ftis_and_gated_are_their_formulas(batch):
    lengths = batch["lengths"]

    def table(name):
        return pad_sequence(torch.split(batch[name], lengths.tolist()), batch_first=True)

    trainer = table("trainer_logprobs").requires_grad_()
    start = table("start_logprobs")
    sampler = table("sampler_logprobs")
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    for name, values in (
        ("ftis", formulas.ftis(trainer, start, sampler, batch["advantages"], mask)),
        ("gated", formulas.gated(trainer, start, batch["advantages"], mask, batch["own"], -7.0)),
    ):
        terms, gradient = graded(PRESETS[name], batch | {"gate": -7.0})
        (slope,) = torch.autograd.grad(values.sum(), trainer)
        torch.testing.assert_close(values, terms.value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(slope[mask], gradient, rtol=1e-9, atol=1e-12)


def test_nothing_at_all_is_no_error():
    terms, _ = graded(PRESETS["ftis"], packed([], []) | {"lengths": torch.zeros(0, dtype=torch.int64)})
    assert terms.value.shape == terms.kept.shape == (0,)
