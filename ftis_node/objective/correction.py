"""Corrections for samples of another policy: what a token or a sample counts, or whether it counts at all.

Each is a factor without gradient beside the importance weight (`importance`), and combines with any of them. ρ is that
of `Objective.terms`, at the start of the step, of a token or a chunk.

* `token`      1[low ≤ ρ_t ≤ high]: IcePop (Ling, arXiv 2510.18855), token-level MIS. A masked token has no gradient
* `sequence`   1[low ≤ Π_t ρ_t ≤ high]: sequence-level MIS, TRL's `sequence_mask`
* `geometric`  1[low ≤ exp(mean_t log ρ_t) ≤ high]: Geo-RS, verl's rejection by the geometric mean
* `binary_tv`  DPPO (arXiv 2602.04879): leaves out a token with Â > 0 and π(t) − π_gen(t) > high, or with Â < 0 and
               π(t) − π_gen(t) < −high, π the present policy; `low` has no meaning

Trust weighs a foreign sample by s = exp(mean log π_start − mean log π_gen), each mean over the tokens of its own
tokenizer; a sample of one's own has weight 1:

* `graft`      w = 1[s > δ] · min(s, 1)
* `hacpo`      w = 1[δ ≤ s ≤ 1] · s²: HACPO's sg(c)^α · c with c = clip(s, δ, 1), α = 1 (arXiv 2603.02604, equation 59),
               has this gradient at π_new = π_start. Its bounds that close in from minibatch to minibatch do nothing
               with one step a batch. Its pooled advantages need equal rows: they are in horizontal runs only. Its
               capability ratios are 1
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ftis_node.methods.choices import Mask, Trust
from ftis_node.objective.importance import MAX_LOG_RATIO
from ftis_node.objective.samples import Samples

MaskFactor = Callable[[Samples, Tensor, float, float], Tensor]
"""(samples, log ρ `[C]`, low, high) → bool `[C]`."""


def sample_log_ratio(samples: Samples, log_ratio: Tensor) -> Tensor:
    """Σ log ρ over a sample's counted chunks, clamped as one ratio is: log ρ `[C]` → `[N]`."""
    return samples.sum_counted_chunks(log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _token(samples: Samples, log_ratio: Tensor, low: float, high: float) -> Tensor:
    return _within(log_ratio, low, high)


def _sequence(samples: Samples, log_ratio: Tensor, low: float, high: float) -> Tensor:
    return _within(sample_log_ratio(samples, log_ratio), low, high)[samples.of_chunks(samples.owner)]


def _geometric(samples: Samples, log_ratio: Tensor, low: float, high: float) -> Tensor:
    total, chunks = (samples.sum_counted_chunks(one) for one in (log_ratio, torch.ones_like(log_ratio)))
    return _within(total / chunks.clamp(min=1), low, high)[samples.of_chunks(samples.owner)]


def _binary_tv(samples: Samples, log_ratio: Tensor, low: float, high: float) -> Tensor:
    further = samples.by_chunk(samples.new.detach()).exp() - samples.generator.exp()
    advantages = samples.advantages[samples.of_chunks(samples.owner)]
    return ~(((advantages > 0) & (further > high)) | ((advantages < 0) & (further < -high)))


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return (ratio >= low) & (ratio <= high)


MASKS: Mapping[Mask, MaskFactor] = {
    "none": lambda samples, log_ratio, low, high: torch.ones_like(log_ratio, dtype=torch.bool),
    "token": _token,
    "sequence": _sequence,
    "geometric": _geometric,
    "binary_tv": _binary_tv,
}


TrustWeight = Callable[[Tensor, float], Tensor]
"""(s `[N]`, δ) → w `[N]`."""


def _graft(ratio: Tensor, floor: float) -> Tensor:
    return torch.where(ratio > floor, ratio.clamp(max=1.0), torch.zeros_like(ratio))


def _hacpo(ratio: Tensor, floor: float) -> Tensor:
    return torch.where((ratio >= floor) & (ratio <= 1), ratio.square(), torch.zeros_like(ratio))


TRUSTS: Mapping[Trust, TrustWeight] = {
    "none": lambda ratio, floor: torch.ones_like(ratio),
    "graft": _graft,
    "hacpo": _hacpo,
}


def trust(samples: Samples, likelihood: Tensor, name: Trust, floor: float) -> Tensor:
    """w of each sample, 1 of one's own: likelihood `[N]`, the mean log π_start of its tokens → `[N]`."""
    mean = samples.sum_counted_chunks(samples.generator) / samples.written.clamp(min=1)
    weight = TRUSTS[name]((likelihood - mean).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), floor)
    return torch.where(samples.own, torch.ones_like(weight), weight)
