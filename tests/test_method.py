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


@settings(derandomize=True)
@given(st.integers(0, 1000), st.floats(0.1, 2))
def test_each_estimator_has_the_mean_that_is_said_of_it(seed, width):
    """Over seven tokens of the generator."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 7, generator=draw, dtype=torch.float64) * width
    learner, generator = logits.softmax(1)
    d = learner.log() - generator.log()
    forward = kl(generator, learner)
    backward = kl(learner, generator)
    means = {
        "k1": forward,
        "k2": float((generator * d.square() / 2).sum()),
        "k3": forward,
        "is_k1": backward,
        "is_k3": backward,
        "k3_reverse": float((generator.square() / learner).sum()) - 1 - forward,
    }
    assert means.keys() == ESTIMATORS.keys()
    for name, estimate in ESTIMATORS.items():
        mean = float((generator * estimate(d)).sum())
        assert mean == pytest.approx(means[name], rel=1e-9, abs=1e-12), name


def test_of_a_sample_that_the_learner_finds_unlikely_only_two_estimators_reach_the_papers_larger_thresholds():
    unlikeliest = torch.tensor([-MAX_LOG_RATIO])
    worst = {name: float(estimate(unlikeliest)) for name, estimate in ESTIMATORS.items()}
    assert worst.pop("k3_reverse") > 4e8
    assert worst == pytest.approx(
        {
            "k1": 20.0,
            "k2": 200.0,
            "k3": 19.0,
            "is_k1": 0.0,
            "is_k3": 1.0,
        },
        abs=1e-6,
    )

    beyond, within = ESTIMATORS["k3_reverse"](torch.tensor([-4.01, -3.99]))
    assert beyond > 50 > within


@pytest.mark.parametrize("name", ["vis", "ftis"])
@pytest.mark.parametrize(("advantage", "log_ratio"), [(-1.0, 21.0), (1.0, -21.0)])
def test_a_token_whose_ratio_is_beyond_the_clamp_has_no_gradient(name, advantage, log_ratio):
    """Neither is stopped by the clip at ε: at 19 nats both have one."""

    def slope(ratio):
        before = [[-1.0 - ratio]]
        start = [[-1.0]]
        if name == "ftis":
            start = before
        batch = packed(start, [advantage], [[-1.0]], before)
        _, gradient = graded(PRESETS[name], batch)
        return gradient.item()

    assert slope(log_ratio) == 0.0
    near = math.copysign(19.0, log_ratio)
    assert slope(near) == pytest.approx(advantage * math.exp(near))


def test_where_a_tenth_of_groups_have_a_signal_nine_tenths_of_the_weight_are_others():
    """Foreign groups without one never come into a batch, one's own do, and count."""
    own = [OWN[0], *[OWN[2]] * 9]
    foreign = changed(OWN[0], source="peer")

    def step(*groups):
        return learner(objective="nois").step(groups)

    def share(one):
        return step(*own, *[one] * 10).diagnostics.foreign["loss_share"]

    assert share(foreign) == pytest.approx(10 / 11, rel=1e-6) == pytest.approx(12 / (12 + 1.2))
    assert share(changed(foreign, weight=0.5)) == pytest.approx(5 / 6, rel=1e-6)

    alone = step(own[0]).gradient_norm
    assert alone == pytest.approx(step(*own).gradient_norm * 10, rel=1e-4), "one's own without a signal count, too"
