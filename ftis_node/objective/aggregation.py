"""Denominators of a step's terms: loss = −Σ_i c_i · value_i / D.

The paper (arXiv 2605.22537, sections 2 and 3.3) prints 1/G Σ_i 1/|a_i| Σ_t for one prompt; over a batch we read the
mean of its N groups. A filtered sample has Â = 0 and, as we read it, stays in the 1/G. Groups whose rewards are all
equal have no terms and stay too. With N groups of G, S samples and T counted tokens, K the samples kept and T_K their
tokens (groups of equal rewards count as kept):

    aggregation   count_dropped                        not
    sample        1/N Σ_groups 1/G Σ_i 1/|a_i| Σ_t     1/K Σ_i 1/|a_i| Σ_t
    token         1/T Σ_i Σ_t                          1/T_K Σ_i Σ_t
    fixed         1/N Σ_groups 1/G Σ_i 1/divisor Σ_t   1/K Σ_i 1/divisor Σ_t

`sample` is the paper's, `token` DAPO's (arXiv 2503.14476), `fixed` Dr. GRPO's (arXiv 2503.20783).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ftis_node.methods.choices import Aggregation

# Name → (counted tokens int64 [N], divisor) → ℓ [N], or [] for all: what a sample's sum over tokens is divided by.
AGGREGATIONS: Mapping[Aggregation, Callable[[Tensor, float | None], Tensor]] = {
    # A sample without a counted token has a sum of 0, whatever it is divided by.
    "sample": lambda lengths, divisor: lengths.clamp(min=1),
    "token": lambda lengths, divisor: torch.ones_like(lengths),
    "fixed": lambda lengths, divisor: torch.as_tensor(divisor, device=lengths.device),
}
