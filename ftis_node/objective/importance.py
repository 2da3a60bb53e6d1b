"""Importance weights: what a token sampled by another policy counts (arXiv 2605.22537, section 3.1).

Let ρ = π_θ / π_gen. `none` ignores ρ (NoIS); `vanilla` puts it, with its gradient, into the clipped surrogate (VIS);
`truncated` multiplies the surrogate by min(ρ, C) without gradient (TIS). The paper does not say at which policy min(ρ,
C) is taken. We take the one at the start of the step; with one inner step it is the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ftis_node.methods.choices import ImportanceName

# Differences of log-probs are clamped to this before `exp`, so no claim of a peer can make an infinity. A sane C or ε
# lets no weight near e^20 through.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Importance:
    """One way to weigh tokens.

    `weigh`: (ρ at the start of the step `[T]`, C) → weights `[T]`, reported and never differentiated.
    `through_ratio`: the surrogate is of ρ itself, so the weight is inside it and carries the gradient.
    `truncates`: C is in force; ρ > C counts as truncated.
    """

    weigh: Callable[[Tensor, float], Tensor]
    through_ratio: bool = False
    truncates: bool = False


IMPORTANCES: Mapping[ImportanceName, Importance] = {
    "none": Importance(lambda ratio, cap: torch.ones_like(ratio)),
    "vanilla": Importance(lambda ratio, cap: ratio, through_ratio=True),
    "truncated": Importance(lambda ratio, cap: ratio.clamp(max=cap), truncates=True),
}


def clamped_log_ratio(of: Tensor, over: Tensor) -> Tensor:
    """log(π_of / π_over), clamped to ± `MAX_LOG_RATIO`: two log-prob tensors of one shape → the same shape.

    Beyond the clamp there is no gradient.
    """
    return (of - over).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
