"""What docs/method.md says in numbers, computed: estimators, clamps, the share of foreign weight, a task's filter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.objective import PRESETS
from ftis_node.objective.divergence import ESTIMATORS
from ftis_node.objective.importance import MAX_LOG_RATIO
from tests.support.learners import OWN, changed, learner
from tests.support.objective_batches import graded, packed


def kl(p, q):
    """KL(p‖q) in nats, of two distributions `[V]`."""
    return float((p * (p.log() - q.log())).sum())


def distributions(seed, width):
    """Of the learner and of the generator, over seven tokens, float64."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 7, generator=draw, dtype=torch.float64) * width
    learner, generator = logits.softmax(1)
    return learner, generator


# What each estimator has as its mean over tokens of the generator, as `divergence` says.
MEANS = {
    "k1": lambda learner, generator: kl(generator, learner),
    "k2": lambda learner, generator: float((generator * (learner / generator).log().square() / 2).sum()),
    "k3": lambda learner, generator: kl(generator, learner),
    "is_k1": lambda learner, generator: kl(learner, generator),
    "is_k3": lambda learner, generator: kl(learner, generator),
    "k3_reverse": lambda learner, generator: float((generator.square() / learner).sum()) - 1 - kl(generator, learner),
}


@settings(derandomize=True)
@given(st.sampled_from(sorted(ESTIMATORS)), st.integers(0, 1000), st.floats(0.1, 2))
def test_each_estimator_has_the_mean_that_is_said_of_it(name, seed, width):
    learner, generator = distributions(seed, width)
    mean = float((generator * ESTIMATORS[name](learner.log() - generator.log())).sum())
    assert mean == pytest.approx(MEANS[name](learner, generator), rel=1e-9, abs=1e-12)


def test_of_a_sample_that_the_learner_finds_unlikely_only_two_estimators_reach_the_papers_larger_thresholds():
    worst = {name: float(estimate(torch.tensor([-MAX_LOG_RATIO]))) for name, estimate in ESTIMATORS.items()}
    largest = {name: round(value, 6) for name, value in worst.items() if name not in ("k2", "k3_reverse")}
    assert largest == {"k1": 20.0, "k3": 19.0, "is_k1": 0.0, "is_k3": 1.0}
    assert worst["k2"] == 200.0
    assert worst["k3_reverse"] > 4e8
    assert ESTIMATORS["k3_reverse"](torch.tensor([-4.01])) > 50 > ESTIMATORS["k3_reverse"](torch.tensor([-3.99]))


@pytest.mark.parametrize("name", ["vis", "ftis"])
@pytest.mark.parametrize(("advantage", "log_ratio"), [(-1.0, 21.0), (1.0, -21.0)])
def test_a_token_whose_ratio_is_beyond_the_clamp_has_no_gradient(name, advantage, log_ratio):
    """Neither is stopped by the clip at ε: at 19 nats both have one."""

    def slope(ratio):
        before = [[-1.0 - ratio]]
        start = before if name == "ftis" else [[-1.0]]
        return float(graded(PRESETS[name], packed(start, [advantage], [[-1.0]], before))[1])

    assert slope(log_ratio) == 0.0
    assert slope(math.copysign(19.0, log_ratio)) == pytest.approx(advantage * math.exp(math.copysign(19.0, log_ratio)))


def test_where_a_tenth_of_groups_have_a_signal_nine_tenths_of_the_weight_are_others():
    """Foreign groups without one never come into a batch, one's own do, and count."""
    own = [OWN[0], *[OWN[2]] * 9]
    foreign = [changed(OWN[0], source="peer")] * 10
    share = learner(objective="nois").step([*own, *foreign]).diagnostics.foreign["loss_share"]
    assert share == pytest.approx(10 / 11, rel=1e-6) == pytest.approx(12 / (12 + 1.2))
    halved = learner(objective="nois").step([*own, *[changed(group, weight=0.5) for group in foreign]])
    assert halved.diagnostics.foreign["loss_share"] == pytest.approx(5 / 6, rel=1e-6)
    assert learner(objective="nois").step([own[0]]).gradient_norm == pytest.approx(
        learner(objective="nois").step(own).gradient_norm * 10, rel=1e-4
    ), "and one's own without a signal count in the denominator"
