"""FGRPO (arXiv 2606.03094), as we read its abstract: owners train by GRPO on rows of their own, and adapters travel.

After every so many steps the trainable weights of each owner become the weighted mean of all owners'. The abstract says
that an owner counts by its improvement over its own past, whatever the scale of its rewards, and no more. Our reading,
for an owner k with mean reward R_k since the last averaging and a moving baseline b_k of its own:

    g_k = (R_k − b_k) / |b_k|, from −1 to 1,   w_k = exp(g_k / τ) / Σ_j exp(g_j / τ),   then b_k ← b_k + μ (R_k − b_k)

The first baseline is the first R_k, so the first averaging counts all alike. Whoever rises from nothing, or doubles,
has a gain of 1. Moments of the optimiser stay at home.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ftis_node.errors import UsageError
from ftis_node.lab.experiment import Averaging
from ftis_node.learner import Learner

TEMPERATURE = 0.25  # τ: who gained a quarter of its baseline more than another counts e times as much
MEMORY = 0.5  # μ


class Federation:
    """The owners' rewards since the last averaging, and their baselines, by name. One object lives as long as a trial;
    a checkpoint of the trial keeps its `facts`. The trial calls `add` for each owner after each step, then `due`, and
    `weights` once if it is."""

    def __init__(self, averaging: Averaging) -> None:
        self.baselines: dict[str, float] = {}
        self.rewards: dict[str, list[float]] = {}
        self._averaging = averaging

    def facts(self) -> dict[str, Any]:
        """What a trial that goes on needs to know, as JSON has it."""
        return {"baselines": self.baselines, "rewards": self.rewards}

    def take_up(self, facts: Mapping[str, Any]) -> None:
        """Go on from what `facts` gave."""
        self.baselines = dict(facts["baselines"])
        self.rewards = dict(facts["rewards"])

    def add(self, owner: str, reward: float) -> None:
        """Note the mean reward of an owner's step."""
        self.rewards.setdefault(owner, []).append(reward)

    def due(self, step: int) -> bool:
        """Whether weights are averaged after so many steps (from 1); never with the weights `none`."""
        averaging = self._averaging
        return averaging.weights != "none" and step % averaging.every == 0

    def weights(self) -> dict[str, float]:
        """What each owner counts now, together 1; the rewards that it follows from become part of the baselines."""
        counts = {}
        for owner, rewards in self.rewards.items():
            mean = sum(rewards) / len(rewards)
            before = self.baselines.get(owner, mean)
            self.baselines[owner] = before + MEMORY * (mean - before)
            counts[owner] = self._count(mean, before)
        self.rewards = {}
        return _normed(counts)

    def _count(self, reward: float, baseline: float) -> float:
        """What an owner counts beside the others, before shares are taken; 0 or more."""
        if self._averaging.weights == "equal":
            return 1.0
        if self._averaging.weights == "reward":
            return max(0.0, reward)
        return math.exp(_gain(reward, baseline) / TEMPERATURE)


def _gain(reward: float, baseline: float) -> float:
    """The relative gain, from −1 to 1; with a baseline of 0 it is −1, 0 or 1."""
    more = reward - baseline
    if abs(more) >= abs(baseline):
        return float(more > 0) - float(more < 0)
    return more / abs(baseline)


def _normed(values: Mapping[str, float]) -> dict[str, float]:
    """In shares of their sum; all alike where that is 0."""
    total = sum(values.values())
    if not total:
        return dict.fromkeys(values, 1 / len(values))
    return {name: value / total for name, value in values.items()}


def check_alike(learners: Mapping[str, Learner]) -> None:
    """Raise UsageError unless all of these, by their owners' names, train weights of the same names and shapes."""
    first, *others = learners
    shapes = {}
    for owner, learner in learners.items():
        trained = learner.trainable.items()
        shapes[owner] = {name: weight.shape for name, weight in trained}
    for other in others:
        if shapes[other] != shapes[first]:
            what = f"The weights of {first} and {other} have no mean: they are of other names or shapes."
            raise UsageError(what, "Give all nodes the same model, `lora`, `lora_rank` and `lora_targets`.")


def average(learners: Mapping[str, Learner], shares: Mapping[str, float]) -> None:
    """Give each learner the mean of all their trainable weights, by shares; an optimiser's state stays its own.

    Args:
        shares: of each owner, together 1. `check_alike` must have passed.
    """
    mean: dict[str, Tensor] = {}
    optimisers = {}
    for owner, learner in learners.items():
        weights, optimisers[owner] = learner.state()
        for name, weight in weights.items():
            part = shares[owner] * weight
            if name in mean:
                part = mean[name] + part
            mean[name] = part
    for owner, learner in learners.items():
        learner.restore(mean, optimisers[owner], learner.steps)
