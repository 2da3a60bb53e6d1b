"""What a foreign sample counts, by how far its author is from the learner.

Let s = exp(mean log π_start − mean log π_gen), each mean over the tokens of its own tokenizer. The weight w of a
foreign sample is a factor without gradient beside the importance weight (`importance`), and combines with any of them.
A sample of one's own has weight 1:

* `graft`      w = 1[s > δ] · min(s, 1)
* `hacpo`      w = 1[δ ≤ s ≤ 1] · s²: HACPO's sg(c)^α · c with c = clip(s, δ, 1), α = 1 (arXiv 2603.02604, equation 59),
               has this gradient at π_new = π_start. Its bounds that close in from minibatch to minibatch do nothing
               with one step a batch. Its pooled advantages need equal rows: they are in horizontal runs only. Its
               capability ratios are 1
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ftis_node.methods.choices import Trust
from ftis_node.objective.importance import MAX_LOG_RATIO
from ftis_node.objective.samples import Samples


def _graft(ratio: Tensor, floor: float) -> Tensor:
    return torch.where(ratio > floor, ratio.clamp(max=1.0), 0.0)


def _hacpo(ratio: Tensor, floor: float) -> Tensor:
    return torch.where((ratio >= floor) & (ratio <= 1), ratio.square(), 0.0)


# Name → (s [N], δ) → w [N].
TRUSTS: Mapping[Trust, Callable[[Tensor, float], Tensor]] = {
    "none": lambda ratio, floor: torch.ones_like(ratio),
    "graft": _graft,
    "hacpo": _hacpo,
}


def trust(samples: Samples, likelihood: Tensor, name: Trust, floor: float) -> Tensor:
    """w of each sample, 1 of one's own: likelihood `[N]`, the mean log π_start of its tokens → `[N]`."""
    claimed = samples.sum_counted_chunks(samples.sampler_logprobs)
    mean = claimed / samples.written.clamp(min=1)
    apart = (likelihood - mean).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = TRUSTS[name](apart.exp(), floor)
    return torch.where(samples.own, 1.0, weight)
