"""FGRPO (arXiv 2606.03094), as we read its abstract: clients train by GRPO on rows of their own, and adapters travel.

After every so many steps each client's trainable weights become the weighted mean of all clients'. The abstract says
that a client counts by its improvement over its own past, whatever the scale of its rewards, and no more. Our reading,
for client k with mean reward R_k since the last averaging and a moving baseline b_k of its own:

    g_k = (R_k − b_k) / max(|b_k|, ε),   w_k = exp(g_k / τ) / Σ_j exp(g_j / τ),   then b_k ← b_k + μ (R_k − b_k)

The first baseline is the first R_k, so the first averaging counts all alike. Moments of the optimiser stay at home.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ftis_node.lab.experiment import Averaging
from ftis_node.learner import Learner

TEMPERATURE = 0.25  # τ: a client that gained a quarter of its baseline more than another counts e times as much
MEMORY = 0.5  # μ
_LEAST = 1e-6  # ε


@dataclass
class Federation:
    """The rewards of a trial's clients since the last averaging, and their baselines, by name."""

    averaging: Averaging
    baselines: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, list[float]] = field(default_factory=dict)

    def add(self, client: str, reward: float) -> None:
        """Note the mean reward of a client's step."""
        self.rewards.setdefault(client, []).append(reward)

    def due(self, done: int) -> bool:
        """Whether weights are averaged after so many steps."""
        return self.averaging.weights != "none" and done % self.averaging.every == 0

    def weights(self) -> dict[str, float]:
        """What each client counts now, together 1; the rewards that it follows from become part of the baselines."""
        means = {name: sum(values) / len(values) for name, values in self.rewards.items()}
        before = {name: self.baselines.get(name, mean) for name, mean in means.items()}
        self.baselines = {name: before[name] + MEMORY * (mean - before[name]) for name, mean in means.items()}
        self.rewards = {}
        if self.averaging.weights == "reward":
            return _normed(means)
        gains = {name: (means[name] - before[name]) / max(abs(before[name]), _LEAST) for name in means}
        if self.averaging.weights == "equal":
            gains = dict.fromkeys(gains, 0.0)
        most = max(gains.values())
        return _normed({name: math.exp((gain - most) / TEMPERATURE) for name, gain in gains.items()})


def _normed(values: Mapping[str, float]) -> dict[str, float]:
    total = sum(values.values())
    return {name: value / total if total > 0 else 1 / len(values) for name, value in values.items()}


def average(learners: Sequence[Learner], weights: Sequence[float]) -> None:
    """Give each learner the weighted mean of all their trainable weights; its optimiser's state stays its own."""
    states = [learner.state() for learner in learners]
    mean = {name: _mean([own[name] for own, _ in states], weights) for name in states[0][0]}
    for learner, (_, state) in zip(learners, states, strict=True):
        learner.restore(mean, state, learner.steps)


def _mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([weight * tensor for weight, tensor in zip(weights, tensors, strict=True)]).sum(0)
