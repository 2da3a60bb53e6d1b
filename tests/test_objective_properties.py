"""What must hold of any objective whatever the numbers are."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from docs import formulas
from ftis_node.objective import PRESETS, Terms
from tests.support.objective_batches import graded, packed, termed

EVERY = settings(max_examples=50, derandomize=True)
log_probs = st.floats(-15, 0)


@st.composite
def batches(draw):
    """The arguments of `terms`, in float64."""

    def several(values, count):
        return draw(st.lists(values, min_size=count, max_size=count))

    def floats(values, count):
        return torch.tensor(several(values, count), dtype=torch.float64)

    samples = draw(st.integers(1, 6))
    lengths = several(st.integers(1, 6), samples)
    tokens = sum(lengths)
    start = floats(log_probs, tokens)
    return {
        "trainer_logprobs": start + floats(st.floats(-0.5, 0.5), tokens),
        "start_logprobs": start,
        "sampler_logprobs": floats(log_probs, tokens),
        "lengths": torch.tensor(lengths),
        "advantages": floats(st.floats(-3, 3), samples),
        "ended": torch.tensor(several(st.booleans(), samples)),
        "own": torch.tensor(several(st.booleans(), samples)),
    }


def take(batch, order):
    """The samples `order` of a batch, in that order."""
    taken = {name: batch[name][order] for name in ("lengths", "advantages", "ended", "own")}
    for name in ("trainer_logprobs", "start_logprobs", "sampler_logprobs"):
        samples = torch.split(batch[name], batch["lengths"].tolist())
        taken[name] = torch.cat([samples[i] for i in order])
    return taken


@settings(max_examples=25, derandomize=True)  # each with all presets
@given(batches(), st.randoms(use_true_random=False), st.sampled_from(["sample", "token", "fixed"]))
def test_order_and_packing_never_matter(batch, rng, aggregation):
    samples = batch["lengths"].numel()
    order = rng.sample(range(samples), samples)
    for preset in PRESETS.values():
        objective = preset.replace(aggregation=aggregation, divisor=8.0)

        together, gradient = graded(objective, take(batch, order) | {"gate": -7.0})
        alone = [graded(objective, take(batch, [i]) | {"gate": -7.0}) for i in order]

        slopes = [slope for _, slope in alone]
        assert torch.equal(gradient, torch.cat(slopes))
        for field in Terms.__dataclass_fields__:
            one_by_one = [getattr(terms, field) for terms, _ in alone]
            assert torch.equal(getattr(together, field), torch.cat(one_by_one)), field


@EVERY
@given(batches(), st.integers(0, 5), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_filtered_sample_gives_nothing_even_if_nan(batch, which, alien):
    objective = PRESETS["ftis"].replace(threshold=1.0, divergence="k1", reduction="max")
    lengths = batch["lengths"]
    which %= lengths.numel()
    batch["advantages"][which] = -1.0
    samples = torch.arange(lengths.numel())
    spoilt = samples.repeat_interleave(lengths) == which
    batch["start_logprobs"][spoilt] = -15.0
    batch["sampler_logprobs"][spoilt] = -1.0

    clean, clean_gradient = graded(objective, batch)
    batch["trainer_logprobs"][spoilt] = alien
    terms, gradient = graded(objective, batch)

    for figure in (terms.kept, terms.value, terms.loss_weight):
        assert figure[which] == 0
    assert torch.equal(terms.value, clean.value)
    assert torch.equal(gradient, clean_gradient)
    assert not gradient[spoilt].any()


@pytest.mark.parametrize("objective", PRESETS.values(), ids=lambda objective: objective.name)
def test_no_gradient_leaks_from_a_source_of_weight_zero(objective):
    batch = packed(
        [[-1.0], [math.nan]],
        [1.0, -1.0],
        generator=[[-1.0], [-1.0]],
        weights=[1.0, 0.0],
    )

    terms, gradient = graded(objective, batch)

    value = 1.0  # a ratio
    if objective.ratio == "detached":  # then it is log π
        value = -1.0
    assert gradient.tolist() == terms.loss_weight.tolist() == [1.0, 0.0]
    assert terms.value.tolist() == [value, 0.0]


def test_an_unfiltered_nan_is_not_hidden_from_the_learner():
    batch = packed([[math.nan]], [-1.0], generator=[[-1.0]])
    terms = termed(PRESETS["ftis"], **batch)
    assert terms.kept.all()
    assert terms.value.isnan().all()


ALIEN = [0.0, -1e4, -1e30, 1e4]


ESTIMATORS = ("k1", "k2", "k3", "is_k1", "is_k3", "k3_reverse")
DIVERGENCES = list(itertools.product(ESTIMATORS, ("mean", "sum", "max")))


@EVERY
@given(
    batches(),
    st.sampled_from(ALIEN),
    st.sampled_from([*ALIEN, -math.inf, math.inf]),
    st.sampled_from(DIVERGENCES),
)
def test_extreme_log_probs_stay_finite(batch, start, claimed, measure):
    for name, tensor in batch.items():
        if tensor.is_floating_point():
            batch[name] = tensor.float()
    batch["start_logprobs"].fill_(start)
    batch["sampler_logprobs"].fill_(claimed)
    divergence, reduction = measure
    for preset in PRESETS.values():
        objective = preset.replace(divergence=divergence, reduction=reduction)
        terms, gradient = graded(objective, batch)
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
    nothing = packed([], []) | {"lengths": torch.zeros(0, dtype=torch.int64)}
    terms, _ = graded(PRESETS["ftis"], nothing)
    assert terms.value.shape == terms.kept.shape == (0,)
