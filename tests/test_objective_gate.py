"""The gate: which samples pass, how its level moves, and which tokens count."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.objective import PRESETS, Terms
from tests.support.objective_batches import graded, packed, termed

GATED = PRESETS["gated"]


def terms_of(name, samples, advantages, **more):
    """Terms of samples given by their log-probs under the learner; the generator claims the same less one nat."""
    objective = PRESETS[name].replace(**more.pop("changes", {}))
    claimed = [[x - 1 for x in sample] for sample in samples]
    return termed(objective, **packed(samples, advantages, generator=claimed, **more))


def test_a_gate_keeps_own_samples_and_foreign_right_ones_that_are_near_enough():
    samples = [
        [-1.0, -3.0],
        [-9.0],
        [-9.0],
        [-2.0, -2.0, -2.0],
        [-2.5],
        [-0.1],
    ]
    advantages = [1.0, 1.0, -1.0, 1.0, 1.0, -1.0]
    own = [True] * 3 + [False] * 3

    terms = terms_of("gated", samples, advantages, own=own, gate=-2.0)

    assert terms.likelihood.tolist() == [-2.0, -9.0, -9.0, -2.0, -2.5, -0.1]
    assert terms.kept.tolist() == [True, True, True, True, False, False]
    assert terms.value.tolist() == [1.0, 1.0, -1.0, 1.0, 0.0, 0.0]
    assert terms.loss_weight.tolist() == [2.0, 1.0, 1.0, 3.0, 0.0, 0.0]


def test_the_level_moves_a_fifth_of_the_way_to_the_strangest_own_success():
    successes = torch.tensor([-1.0, -3.0, -2.0])
    none = torch.zeros(0)
    assert GATED.next_gate(None, successes) == -3.0
    assert GATED.next_gate(-1.0, successes) == pytest.approx(0.8 * -1.0 + 0.2 * -3.0)
    assert GATED.next_gate(-1.0, none) == -1.0
    assert GATED.next_gate(None, none) is None
    assert GATED.next_gate(-1.0, torch.tensor([math.nan, -math.inf, -6.0])) == pytest.approx(-2.0)
    assert PRESETS["ftis"].next_gate(None, successes) is None


@settings(derandomize=True)
@given(st.lists(st.floats(-50, 0), min_size=1, max_size=60), st.floats(0, 0.99))
def test_the_level_is_the_nearest_rank(values, quantile):
    successes = torch.tensor(values, dtype=torch.float64)

    level = GATED.replace(gate=quantile).next_gate(None, successes)

    assert level in values
    rank = quantile * len(values)
    assert sum(value <= level for value in values) >= rank - 1e-9
    assert sum(value < level for value in values) <= rank + 1e-9


@pytest.mark.parametrize("reduction", ["mean", "sum", "max"])
def test_what_was_only_an_end_has_no_divergence(reduction):
    changes = {"reduction": reduction, "divergence": "k1"}
    terms = terms_of("ftis-author", [[-1.0]], [1.0], ended=[True], changes=changes)
    assert terms.divergence.tolist() == terms.value.tolist() == [0.0]


def test_an_end_that_does_not_count_has_no_gradient_even_when_it_is_not_finite():
    batch = packed([[-1.0, math.nan]], [1.0], generator=[[-1.0, -1.0]], ended=[True])
    terms, gradient = graded(PRESETS["ftis-author"], batch)
    assert gradient.tolist() == [1.0, 0.0]
    assert terms.value.tolist() == [1.0]


def test_a_step_of_which_all_was_dropped_is_divided_by_one():
    counts = {
        "groups": 1,
        "samples": 4,
        "tokens": 9,
        "dropped_samples": 4,
        "dropped_tokens": 9,
    }
    for aggregation in ("sample", "token"):
        objective = PRESETS["ftis-author"].replace(aggregation=aggregation)
        assert objective.batch_divisor(**counts) == 1


@pytest.mark.parametrize("name", PRESETS)
def test_without_a_gradient_the_figures_are_the_same(name):
    objective = PRESETS[name]
    batch = packed([[-1.0, -2.0]], [0.7], new=[[-1.1, -1.9]], generator=[[-3.0, -2.5]])
    trained, _ = graded(objective, batch)
    assert trained.value.requires_grad

    plain = termed(objective, **batch)
    batch["trainer_logprobs"].requires_grad_()
    with torch.no_grad():
        evaluated = termed(objective, **batch)

    for other in (plain, evaluated):
        assert not other.value.requires_grad
        for field in Terms.__dataclass_fields__:
            assert torch.equal(getattr(other, field), getattr(trained, field))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", PRESETS)
def test_a_gpu_says_the_same(name):
    start = [[-3.0, -0.5], [-2.0], [-1.0, -2.5, -3.5]]
    batch = packed(
        start,
        [1.0, -1.0, 0.5],
        new=[[x + 0.1 for x in sample] for sample in start],
        generator=[[-2.0, -2.5], [-0.5], [-1.0, -4.0, -2.0]],
        ended=[True, True, False],
        own=[True, False, False],
        gate=-2.0,
    )
    objective = PRESETS[name].replace(aggregation="fixed", divisor=8.0)
    moved = {name: one.cuda() for name, one in batch.items() if name != "gate"}

    here = termed(objective, **batch)
    there = termed(objective, **batch | moved)

    for field in Terms.__dataclass_fields__:
        found = getattr(there, field)
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), getattr(here, field))
