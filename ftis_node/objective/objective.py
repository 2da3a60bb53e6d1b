"""An objective is a choice of parts (arXiv 2605.22537, section 3); `PRESETS` has those with a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftis_node.methods import METHODS, choices
from ftis_node.objective.advantages import group_advantages
from ftis_node.objective.aggregation import AGGREGATIONS
from ftis_node.objective.divergence import ESTIMATORS, REDUCTIONS
from ftis_node.objective.filter import kept_by_filter
from ftis_node.objective.foreign import trust
from ftis_node.objective.gate import kept_by_gate, next_level
from ftis_node.objective.importance import IMPORTANCES, clamped_log_ratio
from ftis_node.objective.loss import Clip, Terms, clip_active, values
from ftis_node.objective.packed import segment_sum
from ftis_node.objective.samples import Samples


@dataclass(frozen=True)
class Objective:
    """The objective of a step: 1/N Σ_groups 1/G Σ_i 1/|a_i| Σ_t term (arXiv 2605.22537, section 3.3).

    advantage      `mean_std`, `mean` or `maxrl`                      see `advantages`
    divergence     `k1`, `k2`, `k3`, `is_k1`, `is_k3`, `k3_reverse`   see `divergence`
    reduction      `mean`, `sum` or `max` of the divergence over a sample's tokens
    importance     `none`, `vanilla` or `truncated`                   see `importance`
    truncation     C, in force with `truncated` only
    threshold      g: drop a sample when Â ≤ 0 and D ≥ g; None is no filter
    gate           quantile of the own successes' mean log-prob, 0 the minimum, that a foreign sample must reach; None
                   is no gate, see `gate`
    epsilon        ε of the clip; 0.2 is second-hand, the paper gives none; None is no clip below 1
    epsilon_high   ε above 1; None: the same as `epsilon`
    ratio          `token`, `sequence` or `detached`                  see `loss.values`
    trust          `none`, `graft` or `hacpo`: how foreign samples weigh  see `foreign`
    floor          δ of `trust`
    imitation      λ of SGT: of a foreign group one right sample counts, with Â = λ not divided by G; None: all do, by Â
    aggregation    `sample`, `token` or `fixed`                       see `aggregation`
    divisor        tokens, for `fixed` only; the learner puts the run's completion cap where it is None
    count_dropped  dropped samples stay in the denominator, as we read the paper
    count_end      a sampled EOS is a token like any other; if not it is in neither loss, divergence nor |a_i|
    inner_steps    optimiser steps a batch; the learner heeds it
    own_only       train on the node's own samples only; the learner heeds it

    Settings are checked in `config.consistency`. There is no KL-to-reference term (section 2).
    """

    name: str
    advantage: choices.Advantage = "mean_std"
    divergence: choices.Divergence = "k3_reverse"
    reduction: choices.Reduction = "mean"
    importance: choices.ImportanceName = "truncated"
    truncation: float = 2.0
    threshold: float | None = 50.0
    gate: float | None = None
    epsilon: float | None = 0.2
    epsilon_high: float | None = None
    ratio: choices.Ratio = "token"
    trust: choices.Trust = "none"
    floor: float = 0.8
    imitation: float | None = None
    aggregation: choices.Aggregation = "sample"
    divisor: float | None = None
    count_dropped: bool = True
    count_end: bool = True
    inner_steps: int = 1
    own_only: bool = False

    def replace(self, **changes: Any) -> Objective:
        """The same objective with other parts."""
        return dataclasses.replace(self, **changes)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages of one whole group: rewards float64 `[G]` → `[G]`, exactly 0 when all rewards are equal."""
        return group_advantages(rewards, self.advantage)

    def terms(self, samples: Samples, gate: float | None) -> Terms:
        """The loss terms of packed samples; the caller's loss is −Σ_i sample_scale · value_i / batch_divisor.

        Args:
            gate: m of `next_gate` before this step; None: no foreign sample passes a gate.
        """
        clip = self._clip
        sizes = AGGREGATIONS[self.aggregation](samples.lengths, self.divisor)
        importance = IMPORTANCES[self.importance]
        owner = samples.of_chunks(samples.owner)
        with torch.no_grad():
            start_logprobs = samples.by_chunk(samples.start_logprobs)
            log_ratio = clamped_log_ratio(start_logprobs, samples.sampler_logprobs)
            ratio = log_ratio.exp()
            divergence = self._divergence(samples, log_ratio)
            likelihood = samples.sum_counted(samples.start_logprobs) / samples.lengths.clamp(min=1)
            kept = self._kept(samples, divergence, likelihood, gate)
            trusted = trust(samples, likelihood, self.trust, self.floor)[owner]
            token_weights = samples.by_token(importance.weigh(ratio, self.truncation) * trusted)
            gain = samples.advantages.abs() * samples.weights
            mass = gain * samples.sum_counted(token_weights)
        return Terms(
            value=values(
                samples,
                kept,
                token_weights,
                trusted,
                sizes,
                importance,
                clip,
                self.ratio,
            ),
            kept=kept,
            divergence=divergence,
            likelihood=likelihood,
            loss_mask=samples.loss_mask,
            log_ratio=samples.by_token(log_ratio),
            sample_log_ratio=segment_sum(log_ratio, owner, samples.count),
            importance=token_weights,
            loss_weight=torch.where(kept & (gain != 0), mass, 0.0),
            clipped=clip_active(samples, importance, clip, self.ratio),
            truncated=samples.by_token(ratio > self.truncation) & importance.truncates,
        )

    @property
    def _clip(self) -> Clip:
        """The bounds of the ratio; above 1 the same as below, unless they say another."""
        high = self.epsilon_high
        if high is None:
            high = self.epsilon
        return Clip(self.epsilon, high)

    def _divergence(self, samples: Samples, log_ratio: Tensor) -> Tensor:
        """D of each sample, `[N]`, from log ρ of its counted chunks; log_ratio `[C]` is of all chunks."""
        counted = samples.of_chunks(samples.loss_mask)
        owner = samples.of_chunks(samples.owner)[counted]
        estimates = ESTIMATORS[self.divergence](log_ratio[counted])
        chunks = torch.bincount(owner, minlength=samples.count)
        return REDUCTIONS[self.reduction](estimates, owner, chunks)

    def _kept(
        self,
        samples: Samples,
        divergence: Tensor,
        likelihood: Tensor,
        gate: float | None,
    ) -> Tensor:
        """Which samples neither the filter nor the gate drops: bool `[N]`."""
        kept = kept_by_filter(samples.advantages, divergence, self.threshold)
        kept = kept | (samples.lengths == 0)  # only an uncounted EOS cannot be judged, not even at g = 0
        if self.gate is not None:
            kept = kept & kept_by_gate(samples.advantages, likelihood, samples.own, gate)
        return kept

    @property
    def judges_all(self) -> bool:
        """Whether filter and gate decide also about samples with Â = 0: what they drop leaves the denominator."""
        return not self.count_dropped and (self.threshold is not None or self.gate is not None)

    def sample_scale(self, group_size: int) -> float:
        """c_i of the loss −Σ_i c_i · value_i / D, for a sample of a whole group of `group_size`; see `aggregation`."""
        if self.aggregation == "token" or not self.count_dropped:
            return 1.0
        return 1.0 / group_size

    def batch_divisor(
        self,
        *,
        groups: int,
        samples: int,
        tokens: int,
        dropped_samples: int,
        dropped_tokens: int,
    ) -> float:
        """D of the loss −Σ_i c_i · value_i / D: what all terms of a step are divided by; see `aggregation`.

        All five are of the whole step, groups of equal rewards included, whose samples never reach `terms` and count
        as kept. Dropped are those that `Terms.kept` denies, by the filter or the gate. Tokens are counted ones: without
        `count_end` the caller leaves out the sampled EOS of each sample that ended. At least 1.
        """
        if self.aggregation == "token":
            divisor = tokens
            if not self.count_dropped:
                divisor -= dropped_tokens
        elif self.count_dropped:
            divisor = groups
        else:
            divisor = samples - dropped_samples
        return float(max(divisor, 1))  # every value is 0 where all samples were dropped

    def next_gate(self, level: float | None, likelihoods: Tensor) -> float | None:
        """m after a step, from m before it and `Terms.likelihood` of the step's own samples with Â > 0, `[n]`.

        0.8 · m + 0.2 · their quantile `gate`, nearest rank; that quantile alone at first. It stays the same if there
        are none or the objective has no gate. A step is gated by the m from before it: so neither packing nor order can
        matter.
        """
        if self.gate is None:
            return level
        return next_level(level, likelihoods, self.gate)


PRESETS: Mapping[str, Objective] = {name: Objective(name, **parts()) for name, parts in METHODS.items()}
"""The objectives that have a name; `ftis_node.methods` says of each what it is and where it is from."""
