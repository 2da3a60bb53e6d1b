"""FGRPO (arXiv 2606.03094), as we read its abstract: owners train by GRPO on rows of their own, and adapters travel.

After every so many steps the trainable weights of each owner become the weighted mean of all owners'. The abstract says
that an owner counts by its improvement over its own past, whatever the scale of its rewards, and no more. Our reading,
for an owner k with mean reward R_k since the last averaging and a moving baseline b_k of its own:

    g_k = (R_k − b_k) / |b_k|, from −1 to 1,   w_k = exp(g_k / τ) / Σ_j exp(g_j / τ),   then b_k ← b_k + μ (R_k − b_k)

The first baseline is the first R_k, so the first averaging counts all alike. Whoever rises from nothing, or doubles,
has a gain of 1. Moments of the optimiser stay at home.
"""

from __future__ import annotations

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
    """The owners' rewards since the last averaging, and their baselines, by name."""

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
        """Whether weights are averaged after so many steps."""
        return self._averaging.weights != "none" and step % self._averaging.every == 0

    def weights(self) -> dict[str, float]:
        """What each owner counts now, together 1; the rewards that it follows from become part of the baselines."""
        means = {name: sum(values) / len(values) for name, values in self.rewards.items()}
        before = {name: self.baselines.get(name, mean) for name, mean in means.items()}
        self.baselines = {name: before[name] + MEMORY * (mean - before[name]) for name, mean in means.items()}
        self.rewards = {}
        if self._averaging.weights == "equal":
            return _normed(dict.fromkeys(means, 1.0))
        if self._averaging.weights == "reward":
            return _normed({name: max(0.0, mean) for name, mean in means.items()})
        return _normed({name: math.exp(_gain(means[name], before[name]) / TEMPERATURE) for name in means})


def _gain(reward: float, baseline: float) -> float:
    """The relative gain, from −1 to 1."""
    more = reward - baseline
    if abs(more) >= abs(baseline):
        return float(more > 0) - float(more < 0)
    return more / abs(baseline)


def _normed(values: Mapping[str, float]) -> dict[str, float]:
    """In shares of their sum; all alike where that is 0."""
    total = sum(values.values())
    if not total:
        return _normed(dict.fromkeys(values, 1.0))
    return {name: value / total for name, value in values.items()}


def check_alike(learners: Mapping[str, Learner]) -> None:
    """Raise UsageError unless all of these, by their owners' names, train weights of the same names and shapes."""
    first, *others = learners
    shapes = {
        owner: {name: list(weight.shape) for name, weight in learner.trainable.items()}
        for owner, learner in learners.items()
    }
    for other in others:
        if shapes[other] != shapes[first]:
            what = f"The weights of {first} and {other} have no mean: they are of other names or shapes."
            raise UsageError(what, "Give all nodes the same model, `lora`, `lora_rank` and `lora_targets`.")


def average(learners: Mapping[str, Learner], shares: Mapping[str, float]) -> None:
    """Give each learner the mean of all their trainable weights, by shares; an optimiser's state stays its own."""
    states = {owner: learner.state() for owner, learner in learners.items()}
    mean: dict[str, Tensor] = {}
    for owner, (weights, _) in states.items():
        for name, weight in weights.items():
            part = shares[owner] * weight
            mean[name] = mean[name] + part if name in mean else part
    for owner, learner in learners.items():
        learner.restore(mean, states[owner][1], learner.steps)
