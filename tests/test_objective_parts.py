"""Advantages, divergences and the choices of an objective."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.objective import PRESETS
from ftis_node.objective.divergence import ESTIMATORS, REDUCTIONS
from ftis_node.objective.packed import owners
from tests.support.objective_batches import FORMULAS, packed, termed


def advantages_of(rewards, kind="mean_std"):
    objective = PRESETS["ftis"].replace(advantage=kind)
    return objective.advantages(torch.tensor(rewards, dtype=torch.float64)).tolist()


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e-300, 1e300])
@pytest.mark.parametrize("kind", ["mean_std", "mean", "maxrl"])
def test_equal_rewards_have_advantages_of_exactly_zero(value, kind):
    assert advantages_of([value] * 12, kind) == [0.0] * 12


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("mean_std", 0.75 / (math.sqrt(3) / 4), -0.25 / (math.sqrt(3) / 4)),
        ("mean", 0.75, -0.25),
        ("maxrl", 3.0, -1.0),
    ],
)
def test_advantages_of_a_group_worked_on_paper(kind, right, wrong):
    """Three right of twelve: mean 1/4, population std √3/4."""
    found = advantages_of([1.0] * 3 + [0.0] * 9, kind)
    assert found == pytest.approx([right] * 3 + [wrong] * 9, rel=1e-14)


@settings(derandomize=True)
@given(
    st.floats(-1e3, 1e3),
    st.floats(1e-6, 1e3),
    st.lists(st.integers(1, 9), min_size=1, max_size=80),
    st.sampled_from(["mean_std", "mean"]),
)
def test_a_reward_at_the_mean_has_an_advantage_of_exactly_zero(middle, step, places, kind):
    # Rewards in pairs around the middle, and the middle itself: whatever their sum rounds to, it is their mean.
    pairs = [middle + sign * place * step for place in places for sign in (-1, 1)]
    if max(map(abs, pairs)) * math.ulp(1.0) * 64 > step / 2:
        return  # the steps are lost in rounding themselves
    at_the_mean, *others = advantages_of([middle, *pairs], kind)
    assert at_the_mean == 0
    assert max(others[::2]) < 0
    assert min(others[1::2]) > 0


def test_rewards_that_differ_by_rounding_alone_are_equal():
    assert advantages_of([0.1 + 0.2, 0.3, 0.3]) == [0.0] * 3


@settings(derandomize=True)
@given(
    st.floats(-300, 300),
    st.lists(st.booleans(), min_size=2, max_size=12).filter(lambda x: len(set(x)) > 1),
)
def test_the_scale_of_rewards_does_not_matter(exponent, right):
    unit = advantages_of([float(x) for x in right])
    scaled = advantages_of([x * 10.0**exponent for x in right])
    assert scaled == pytest.approx(unit, rel=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
@settings(derandomize=True)
@given(d=st.lists(st.floats(-20, 20), min_size=3, max_size=10))
def test_divergences_are_those_of_the_formulas(name, d):
    assert set(FORMULAS) == set(ESTIMATORS)
    tokens = [FORMULAS[name](x) for x in d]
    parts = [tokens[:-2], tokens[-2:]]
    expected = {
        "mean": [sum(part) / len(part) for part in parts],
        "sum": [sum(part) for part in parts],
        "max": [max(part) for part in parts],
    }
    # e^20 has an ulp of 1e-7, which the plain formulas lose beside the small terms.
    rounding = 1e-12 * max(map(abs, tokens)) + 1e-12
    lengths = torch.tensor([len(d) - 2, 2])

    estimates = ESTIMATORS[name](torch.tensor(d, dtype=torch.float64))

    for reduction in REDUCTIONS:
        got = REDUCTIONS[reduction](estimates, owners(lengths), lengths)
        assert got.tolist() == pytest.approx(expected[reduction], rel=1e-9, abs=rounding)


@pytest.mark.parametrize(("nats", "kept"), [(9.0, True), (9.4, False)])
def test_one_token_next_to_impossible_vetoes_two_hundred_good_ones(nats, kept):
    """The reading of g = 50: the mean of k3_reverse passes it by one token of about 9.3 nats among 200."""
    batch = packed([[-nats, *[0.0] * 199]], [-1.0], generator=[[0.0] * 200])
    assert termed(PRESETS["ftis"], **batch).kept.tolist() == [kept]
