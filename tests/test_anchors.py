"""Three results of others that anyone can check in a minute, through the code that trains where it has a part in them.

* AsymRE (arXiv 2506.20520): ascent of E_μ[(r − V) log π] over a table of 100 arms, samples always from μ. With a =
  μ (r − V) and b = E_μ[r] − V > 0 it ends at π = (a − τ)⁺/b, τ such that this sums to 1: arms drop out as V rises, and
  at V = E_μ[r] one is left. So off policy a baseline is no mere reduction of variance.
* F-GRPO (arXiv 2602.06717): a group of N misses a rare kind of right answer and yet has a signal with probability
  (1−r)^N − (p−r)^N − (1−p)^N, where answers are right at rate p and of that kind at rate r.
* Sparse updates (PULSE, arXiv 2602.03839): a bf16 weight is seen to move only by half of its spacing, 2^−8 of the power
  of two below it. AdamW's first step is η wherever there is a gradient: at η = 1e-6 weights from 2^−11 on stand still.
  Of normal weights that is 98.0 % at a deviation of 0.02, the usual initialisation, and 98.9 % at 0.035.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

from ftis_node.config.settings import Settings
from ftis_node.learner.optimiser import Optimiser
from ftis_node.objective import PRESETS

ARMS = 100
DRAW = np.random.default_rng(0)
REWARDS = DRAW.uniform(0, 1, ARMS)
GENERATOR = DRAW.dirichlet(np.full(ARMS, 4.0))
MEAN = float(GENERATOR @ REWARDS)


def ascent(baseline: float, logits: np.ndarray) -> np.ndarray:
    return np.asarray(GENERATOR * (REWARDS - baseline) - (MEAN - baseline) * softmax(logits))


def limit(baseline: float) -> np.ndarray:
    """(a − τ)⁺/b."""
    pull, left = GENERATOR * (REWARDS - baseline), MEAN - baseline
    falling = np.sort(pull)[::-1]
    levels = (np.cumsum(falling) - left) / np.arange(1, ARMS + 1)
    return np.asarray(np.maximum(pull - levels[falling > levels][-1], 0) / left)


def test_the_ascent_is_that_of_samples_that_all_count_alike() -> None:
    logits = torch.tensor(np.log(GENERATOR) + 0.3 * DRAW.normal(size=ARMS), requires_grad=True)
    claims, weights, advantages = map(torch.tensor, (np.log(GENERATOR), GENERATOR, REWARDS - 0.3))
    told: dict[str, Any] = {"generator": claims, "weights": weights, "advantages": advantages}
    new = torch.log_softmax(logits, 0)
    terms = PRESETS["nois"].terms(new=new, start=new.detach(), lengths=torch.ones(ARMS, dtype=torch.int64), **told)
    (gradient,) = torch.autograd.grad(terms.value.sum(), logits)
    np.testing.assert_allclose(gradient.numpy(), ascent(0.3, logits.detach().numpy()), atol=1e-12)


def test_the_support_collapses_as_the_baseline_reaches_the_generators_mean_reward() -> None:
    kept = []
    for below in (0.3, 0.1, 0.02, 0.005, 0.0, -0.02):
        logits = np.log(GENERATOR)
        for _ in range(20_000):
            logits = logits + 20 * ascent(MEAN - below, logits)
        policy = softmax(logits)
        if below > 0:
            np.testing.assert_allclose(policy, limit(MEAN - below), atol=1e-4)
        assert policy @ REWARDS > MEAN
        kept.append(int((policy > 1e-3).sum()))
    assert kept[0] > 60 and 30 < kept[1] < 60 and 8 < kept[2] < 20 and 1 < kept[3] < 8 and kept[4:] == [1, 1]


@pytest.mark.parametrize("size", [2, 8, 12, 36, 96])
def test_a_group_misses_a_rare_right_answer_as_often_as_the_formula_says(size: int) -> None:
    rare, common, wrong = np.random.default_rng(size).multinomial(size, (0.02, 0.28, 0.7), 200_000).T
    assert np.mean((rare == 0) & (common > 0) & (wrong > 0)) == pytest.approx(tail_miss(size), abs=0.0045)


def tail_miss(size: int, right: float = 0.3, rare: float = 0.02) -> float:
    return float((1 - rare) ** size - (right - rare) ** size - (1 - right) ** size)


def test_a_group_of_twelve_is_near_the_worst_and_k_nodes_with_common_rows_are_better() -> None:
    assert tail_miss(12) > 0.95 * max(map(tail_miss, range(2, 200)))
    assert [round(tail_miss(12 * nodes), 2) for nodes in (1, 3, 8)] == [0.77, 0.48, 0.14]


@pytest.mark.parametrize(("deviation", "still"), [(0.02, 0.9805), (0.035, 0.989)])
def test_one_step_at_1e_6_leaves_98_to_99_percent_of_bf16_weights_as_they_were(deviation: float, still: float) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter((deviation * torch.randn(1_000_000, generator=random)).bfloat16())
    before = weight.detach().clone()
    optimiser = Optimiser({"w": weight}, Settings(warmup_steps=0, weight_decay=0.0), 1e-6)
    weight.grad = torch.randn(len(weight), generator=random).bfloat16()
    optimiser.step(norm=optimiser.gradient_norm(), scale=1.0)
    share = float((weight == before).float().mean())
    assert share == pytest.approx(1 - math.erf(2**-11 / deviation / math.sqrt(2)), abs=5e-4)
    assert share == pytest.approx(still, abs=1e-3)
