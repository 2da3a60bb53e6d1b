"""An objective is a choice of parts; a preset is a choice with a name (arXiv 2605.22537, section 3)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ftis_node.objective.advantages import ADVANTAGES, group_advantages
from ftis_node.objective.divergence import ESTIMATORS, REDUCTIONS, sample_divergence
from ftis_node.objective.filter import keep
from ftis_node.objective.importance import IMPORTANCES, clamped_log_ratio
from ftis_node.objective.loss import Samples, Terms, clip_active, values
from ftis_node.objective.packed import check, owners, segment_sum


@dataclass(frozen=True)
class Objective:
    """What a step maximises: 1/G Σ_i 1/|a_i| Σ_t term over the samples of a group (arXiv 2605.22537, section 3.3).

    advantage    `mean_std` or `mean`                               see `advantages`
    divergence   `k1`, `k2`, `k3`, `is_k1`, `is_k3`, `k3_reverse`   see `divergence`
    reduction    `mean`, `sum` or `max` of the divergence over a sample's tokens
    importance   `none`, `vanilla` or `truncated`                   see `importance`
    truncation   C, in force with `truncated` only
    threshold    g: drop a sample when Â ≤ 0 and D ≥ g; None is no filter
    epsilon      ε of the clip; 0.2 is second-hand, the paper gives none
    own_only     train on the node's own samples only; the learner heeds it, nothing here knows whose a sample is

    ValueError names the allowed values of a field that has another. There is no KL-to-reference term.
    """

    name: str
    advantage: str = "mean_std"
    divergence: str = "k3_reverse"
    reduction: str = "mean"
    importance: str = "truncated"
    truncation: float = 2.0
    threshold: float | None = 50.0
    epsilon: float = 0.2
    own_only: bool = False

    def __post_init__(self) -> None:
        _one_of("advantage", self.advantage, ADVANTAGES)
        _one_of("divergence", self.divergence, ESTIMATORS)
        _one_of("reduction", self.reduction, REDUCTIONS)
        _one_of("importance", self.importance, IMPORTANCES)
        _number("truncation", self.truncation, "above 0", lambda cap: cap > 0)
        _number("epsilon", self.epsilon, "between 0 and 1", lambda epsilon: 0 < epsilon < 1)
        if self.threshold is not None:
            _number("threshold", self.threshold, "at least 0, or None for no filter", lambda g: g >= 0)

    def replace(self, **changes: Any) -> Objective:
        """The same objective with other parts; checked like a new one."""
        return dataclasses.replace(self, **changes)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages of one whole group: rewards `[G]` → `[G]`, exactly 0 when all rewards are equal."""
        return group_advantages(rewards, self.advantage)

    def terms(
        self,
        *,
        new: Tensor,
        start: Tensor,
        generator: Tensor,
        lengths: Tensor,
        advantages: Tensor,
        weights: Tensor | None = None,
    ) -> Terms:
        """The loss terms of N packed samples, T = Σ lengths tokens in all; ValueError if the shapes do not fit.

        new         `[T]`  log π_θ of the sampled tokens, with gradient
        start       `[T]`  the same at the start of the step (`new.detach()` at its first inner step)
        generator   `[T]`  the log-probs that the generator claims
        lengths     int64 `[N]`
        advantages  `[N]`  over each sample's whole group
        weights     `[N]`  per-source weight, 1 if None

        Computed in float32 at least. `value` has no 1/G: the learner divides by all the samples of its step.
        """
        samples = _prepare(new, start, generator, lengths, advantages, weights)
        importance = IMPORTANCES[self.importance]
        with torch.no_grad():
            log_ratio = clamped_log_ratio(samples.start, samples.generator)
            divergence = sample_divergence(
                log_ratio, samples.owner, samples.lengths, estimator=self.divergence, reduction=self.reduction
            )
            kept = keep(samples.advantages, divergence, self.threshold)
            ratio = log_ratio.exp()
            token_weights = importance.weigh(ratio, self.truncation)
            gain = samples.advantages.abs() * samples.weights
            mass = gain * segment_sum(token_weights, samples.owner, samples.lengths.numel())
        return Terms(
            value=values(samples, kept, token_weights, importance, self.epsilon),
            kept=kept,
            divergence=divergence,
            log_ratio=log_ratio,
            importance=token_weights,
            loss_weight=torch.where(kept & (gain != 0), mass, torch.zeros_like(mass)),
            clipped=clip_active(samples, importance, self.epsilon),
            truncated=(ratio > self.truncation) & importance.truncates,
        )


def _prepare(
    new: Tensor, start: Tensor, generator: Tensor, lengths: Tensor, advantages: Tensor, weights: Tensor | None
) -> Samples:
    if weights is None:
        weights = torch.ones_like(advantages)
    check(
        lengths,
        {"new": new, "start": start, "generator": generator},
        {"advantages": advantages, "weights": weights},
    )
    # Half precision has three digits: a ratio of two log-probs rounded to it would be noise.
    dtype = torch.promote_types(new.dtype, torch.float32)
    lengths = lengths.to(new.device)

    def constant(tensor: Tensor) -> Tensor:
        return tensor.detach().to(new.device, dtype)

    return Samples(
        new=new.to(dtype),
        start=constant(start),
        generator=constant(generator),
        lengths=lengths,
        owner=owners(lengths),
        advantages=constant(advantages),
        weights=constant(weights),
    )


def _one_of(field: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(allowed)}, not {value!r}")


def _number(field: str, value: object, allowed: str, holds: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not holds(value):
        raise ValueError(f"{field} must be a number {allowed}, not {value!r}")


# The paper's own (C = 2, g = 50), the baseline that trains alone, and the one that takes every sample for its own.
PRESETS: Mapping[str, Objective] = MappingProxyType(
    {
        objective.name: objective
        for objective in (
            Objective("ftis"),
            Objective("grpo", importance="vanilla", threshold=None, own_only=True),
            Objective("nois", importance="none", threshold=None),
        )
    }
)
