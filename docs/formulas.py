"""F-TIS and `gated` as they read in a paper: the whole formula on padded tensors.

Training computes the same from parts, on packed samples (`objective.Objective`); a property test holds both equal.

    trainer_logprobs  `[N, T]`       log π_θ of the sampled tokens, with gradient
    start_logprobs    `[N, T]`       the same at the start of the step, without
    sampler_logprobs  `[N, T]`       log π_gen, as the packet claims
    advantages        `[N]`          Â over each sample's whole group
    loss_mask         bool `[N, T]`  the tokens of each sample; padding is False

Each returns `[N]`: what a sample adds to its group's mean, to be maximised. The loss is −1/N Σ_groups 1/G Σ_i of it.
"""

import torch
from torch import Tensor

from ftis_node.objective.importance import clamped_log_ratio


def ftis(
    trainer_logprobs: Tensor,
    start_logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    threshold: float = 50.0,
    truncation: float = 2.0,
    epsilon: float = 0.2,
) -> Tensor:
    """1/|a| Σ_t min(ρ_t, C) · min(R_t Â, clip(R_t, 1−ε, 1+ε) Â), and 0 where Â ≤ 0 and D ≥ g (arXiv 2605.22537).

    ρ = π_start / π_gen, R = π_θ / π_start, and D = 1/|a| Σ_t (1/ρ_t − 1 + log ρ_t).

    Args:
        threshold: g. truncation: C. epsilon: ε.
    """
    log_importance = clamped_log_ratio(start_logprobs, sampler_logprobs)
    divergence = _mean(torch.expm1(-log_importance) + log_importance, loss_mask)
    keep = (advantages > 0) | (divergence < threshold)
    importance_weights = log_importance.exp().clamp(max=truncation)
    term = importance_weights * _clipped(trainer_logprobs, start_logprobs, advantages, epsilon)
    return torch.where(keep, _mean(term, loss_mask), 0.0)


def gated(
    trainer_logprobs: Tensor,
    start_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    own: Tensor,
    gate: float,
    *,
    epsilon: float = 0.2,
) -> Tensor:
    """1/|a| Σ_t min(R_t Â, clip(R_t, 1−ε, 1+ε) Â), and 0 of a foreign sample unless Â > 0 and s ≥ m.

    s = 1/|a| Σ_t log π_start. No claimed log-prob is used.

    Args:
        own: bool `[N]`, the node's own samples. gate: m, see `ftis_node.objective.gate.next_level`.
    """
    likelihood = _mean(start_logprobs, loss_mask)
    keep = own | ((advantages > 0) & (likelihood >= gate))
    term = _clipped(trainer_logprobs, start_logprobs, advantages, epsilon)
    return torch.where(keep, _mean(term, loss_mask), 0.0)


def _clipped(trainer_logprobs: Tensor, start_logprobs: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """PPO's clipped surrogate of each token, `[N, T]`."""
    ratio = clamped_log_ratio(trainer_logprobs, start_logprobs).exp()
    gain = advantages[:, None]
    return torch.minimum(ratio * gain, ratio.clamp(1 - epsilon, 1 + epsilon) * gain)


def _mean(values: Tensor, loss_mask: Tensor) -> Tensor:
    """The mean over each sample's tokens: `[N, T]` → `[N]`."""
    return torch.where(loss_mask, values, 0.0).sum(1) / loss_mask.sum(1)
