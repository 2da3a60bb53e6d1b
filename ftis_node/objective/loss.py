"""The clipped surrogate of packed samples, and what it tells about them (arXiv 2605.22537, sections 3.1 and 3.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ftis_node.methods.choices import Ratio
from ftis_node.objective.importance import MAX_LOG_RATIO, Importance, clamped_log_ratio
from ftis_node.objective.packed import segment_sum
from ftis_node.objective.samples import Samples


@dataclass(frozen=True, eq=False)
class Terms:
    """An objective's terms for N packed samples with T tokens in all. Only `value` carries a gradient.

    value         `[N]`      weight · 1/ℓ_i Σ_t term, to be maximised; exactly 0 for a dropped sample. ℓ_i is |a_i|, 1
                             or the divisor, see `aggregation`
    kept          bool `[N]` dropped neither by the filter nor by the gate
    divergence    `[N]`      D of the policy at the start of the step from the generator; 0 without a counted token
    likelihood    `[N]`      s_i = 1/|a_i| Σ_t log π_start, mean log-prob; 0 without a counted token
    loss_mask     bool `[T]` in the loss: all but a sampled EOS under an objective that leaves it out
    log_ratio     `[T]`      d = log π_start − log π_gen, clamped; its chunk's, where chunks are given
    sample_log_ratio `[N]`   Σ d over all of a sample's tokens, or chunks, a sampled EOS included
    importance    `[T]`      weights at the start of the step, after truncation; 1 where the objective uses none
    loss_weight   `[N]`      |Â_i| · weight · Σ_t importance_t, 0 for a dropped sample
    clipped       bool `[T]` ε is active: the ratio is past the clip on the side where it stops the gradient
    truncated     bool `[T]` ρ > C, where C is in force

    The other figures by token describe every token, those of dropped samples and uncounted ones too. The figures by
    sample and every sum Σ_t are of the counted tokens, but for `sample_log_ratio`.
    """

    value: Tensor
    kept: Tensor
    divergence: Tensor
    likelihood: Tensor
    loss_mask: Tensor
    log_ratio: Tensor
    sample_log_ratio: Tensor
    importance: Tensor
    loss_weight: Tensor
    clipped: Tensor
    truncated: Tensor


@dataclass(frozen=True)
class Clip:
    """ε below and above 1; None: no clip on that side."""

    low: float | None
    high: float | None

    def of(self, ratio: Tensor) -> Tensor:
        """clip(R, 1−ε, 1+ε_high)."""
        if self.low is not None:
            ratio = ratio.clamp(min=1 - self.low)
        if self.high is not None:
            ratio = ratio.clamp(max=1 + self.high)
        return ratio


def surrogate(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """min(R Â, clip(R, 1−ε, 1+ε) Â) with R = e^log_ratio: log_ratio `[T]`, advantages `[T]` (per token) → `[T]`.

    The paper prints the clip around the product, clip(R Â, 1−ε, 1+ε). Taken literally, no Â > 1+ε would have a
    gradient, so we read PPO's usual clip of the ratio.
    """
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, clip.of(ratio) * advantages)


def values(
    samples: Samples,
    kept: Tensor,
    token_weights: Tensor,
    trusted: Tensor,
    sizes: Tensor,
    importance: Importance,
    clip: Clip,
    ratio: Ratio,
) -> Tensor:
    """weight · 1/ℓ_i Σ_t w_t · min(R Â, clip(R) Â): kept bool `[N]`, token_weights `[T]`, sizes ℓ `[N]` → `[N]`.

    trusted `[C]` is the weight of a chunk's sample by `foreign.trust`; token_weights has it already.

    R is π_new / π_start and w_t the detached weight. Where the gradient goes through the ratio (`vanilla`), R is ρ =
    π_new / π_gen and w_t is 1. The paper's R (section 3.1) is π_θ / stop_grad(π_θ). With several inner steps we read
    the denominator as the policy at the start of the step; otherwise the clip would never act. With chunks, ρ is a
    chunk's, and Σ_t is then over chunks.

    ratio: `sequence` has one R for all tokens of a sample, (Π_t R_t)^{1/|a_i|} (GSPO, arXiv 2507.18071). Of own samples
    it is π_new / π_start with any importance: sampler and trainer round differently, by more than GSPO's clip, which
    would cut most samples before anything moved. `detached` multiplies sg(clip(R)) Â with log π_new (CISPO, arXiv
    2506.13585).
    """
    gain = samples.weights * samples.advantages
    # Cut out samples that cannot teach before anything is computed with them. A NaN times 0 is still a NaN, forward or
    # backward, and one alien sample would spoil the gradient of all.
    owner = samples.owner
    teaches = kept & (gain != 0)
    live = teaches[owner] & samples.loss_mask
    if ratio != "token":
        outer = token_weights
        if importance.through_ratio:
            outer = samples.by_token(trusted)
        total = _by_sample(samples, live, outer, importance, clip, ratio)
        return samples.weights * total / sizes
    new = samples.trainer_logprobs
    base = samples.start_logprobs
    outer = token_weights
    if importance.through_ratio:
        new = samples.by_chunk(_only(live, new))
        live = samples.of_chunks(live)
        owner = samples.of_chunks(owner)
        base = samples.sampler_logprobs
        outer = trusted
    log_ratio = clamped_log_ratio(_only(live, new), _only(live, base))
    term = _only(live, outer) * surrogate(log_ratio, samples.advantages[owner], clip)
    total = segment_sum(term, owner, samples.count)
    return samples.weights * total / sizes


def _only(live: Tensor, values: Tensor) -> Tensor:
    """The values where `live` is, else 0, without a gradient."""
    return torch.where(live, values, 0.0)


def _by_sample(
    samples: Samples,
    live: Tensor,
    outer: Tensor,
    importance: Importance,
    clip: Clip,
    ratio: Ratio,
) -> Tensor:
    """Σ_t of the terms whose ratio is of a sample, or detached: outer `[T]` → `[N]`.

    live: bool `[T]`, the tokens that count. outer: what multiplies a token's term.
    """
    new = _only(live, samples.trainer_logprobs)
    advantages = samples.advantages[samples.owner]
    if ratio == "detached":
        log_ratio = _log_ratio(samples, new.detach(), live, importance, ratio)
        term = clip.of(log_ratio.exp()) * advantages * new
    else:
        log_ratio = _log_ratio(samples, new, live, importance, ratio)
        term = surrogate(log_ratio, advantages, clip)
    return segment_sum(_only(live, outer * term), samples.owner, samples.count)


def _log_ratio(samples: Samples, new: Tensor, live: Tensor, importance: Importance, of: Ratio) -> Tensor:
    """log R of each token, `[T]`: its own, its chunk's, or its sample's over what is `live`.

    new: log π_new of each token, `[T]`. live: bool `[T]`. of: whose ratio, see `values`.
    """
    if of == "token" and not importance.through_ratio:
        return clamped_log_ratio(new, samples.start_logprobs)
    start = samples.by_chunk(samples.start_logprobs)
    base = start
    if importance.through_ratio:
        base = samples.sampler_logprobs
    if of != "sequence":
        return samples.by_token(clamped_log_ratio(samples.by_chunk(new), base))
    own = samples.of_chunks(samples.own[samples.owner])
    base = torch.where(own, start, base)
    log_ratio = torch.where(samples.of_chunks(live), samples.by_chunk(new) - base, 0.0)
    total = segment_sum(log_ratio, samples.of_chunks(samples.owner), samples.count)
    mean = total / samples.lengths.clamp(min=1)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[samples.owner]


def clip_active(samples: Samples, importance: Importance, clip: Clip, of: Ratio) -> Tensor:
    """Where the clip stops the gradient, bool `[T]`: R > 1+ε with Â > 0, or R < 1−ε with Â < 0."""
    ratio = _log_ratio(samples, samples.trainer_logprobs.detach(), samples.loss_mask, importance, of).exp()
    clipped = clip.of(ratio)
    advantages = samples.advantages[samples.owner]
    above = (advantages > 0) & (ratio > clipped)
    below = (advantages < 0) & (ratio < clipped)
    return above | below
