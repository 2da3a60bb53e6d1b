"""What the candidates need and no preset has: other advantages, and factors of samples and tokens."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from ftis_node.objective import Objective
from ftis_node.objective.advantages import group_advantages
from ftis_node.objective.correction import sample_log_ratio
from ftis_node.objective.samples import Samples

SHIFT, GAMMA = -0.1, 1.0


class Topr(Objective):
    """Tapered off-policy REINFORCE (arXiv 2503.14286): Σ_{R≥0} R ∇ log π + Σ_{R<0} [Π ρ]₀¹ R ∇ log π."""

    def factor(self, samples: Samples, log_ratio: Tensor) -> Tensor:
        """1, of a failure min(Πₜ ρₜ, 1): log ρ `[C]` → `[C]`."""
        tapered = sample_log_ratio(samples, log_ratio).clamp(max=0).exp()
        weights = torch.where(samples.advantages < 0, tapered, torch.ones_like(tapered))
        return weights[samples.of_chunks(samples.owner)]


class SuffixVeto(Objective):
    """μ-GRPO's veto (arXiv 2605.17570): the prefix of a failure keeps its update, up to the first token whose ρ is
    outside 1 ± ε; that token and all after it have none."""

    def factor(self, samples: Samples, log_ratio: Tensor) -> Tensor:
        """Whether a chunk counts: log ρ `[C]` → bool `[C]`."""
        assert self.epsilon is not None
        owner, outside = samples.of_chunks(samples.owner), (log_ratio.exp() - 1).abs() > self.epsilon
        triggers = (outside & (samples.advantages[owner] < 0)).long()
        so_far = triggers.cumsum(0)
        before = so_far - triggers
        first = torch.ones_like(owner, dtype=torch.bool)
        first[1:] = owner[1:] != owner[:-1]
        return so_far == before[first][torch.unique_consecutive(owner, return_inverse=True)[1]]


class Asymmetric(Objective):
    """AsymRE (arXiv 2506.20520): the baseline is `SHIFT` above the group's mean reward, so below it."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """Â = r − (mean(r) + δ), also of a group of equal rewards: `[G]` → `[G]`."""
        return group_advantages(rewards, "mean") - SHIFT


class MaxLikelihood(Objective):
    """MaxRL (arXiv 2602.02710): the gradient of log of the rate of success, to the order that G samples allow."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """Â = (r − mean(r)) / mean(r), 0 where the mean is: `[G]` → `[G]`."""
        return group_advantages(rewards, "mean") / torch.where(rewards.any(), rewards.double().mean(), 1.0)


class Focal(Objective):
    """F-GRPO (arXiv 2602.06717): what a group mostly does already counts less."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """Â (1 − mean(r))^γ, rewards 0 to 1: `[G]` → `[G]`."""
        return super().advantages(rewards) * (1 - rewards.double().mean()).clamp(min=0) ** GAMMA


class Given(Objective):
    """The advantages that `lab.pooling` has put in the place of rewards."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """As they are: `[G]` → `[G]`."""
        return rewards


KINDS: Mapping[str, type[Objective]] = {
    "topr": Topr,
    "mu-grpo": SuffixVeto,
    "asymre": Asymmetric,
    "maxrl": MaxLikelihood,
    "focal": Focal,
    "hacpo-published": Given,
    "xgrpo": Given,
}


def corrected(name: str, base: Objective) -> Objective:
    """The candidate of that name with all parts of the objective that it stands on."""
    parts = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return KINDS[name](**{**parts, "name": name})
