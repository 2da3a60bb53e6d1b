"""Which samples are updated on (arXiv 2605.22537, section 3.3).

A right answer shows a direction even from far away. A wrong one that the learner would never have produced only makes
other unlikely text likelier. A dropped sample still counts in its group's mean and standard deviation.
"""

import torch
from torch import Tensor


def kept_by_filter(advantages: Tensor, divergence: Tensor, threshold: float | None) -> Tensor:
    """Keep a sample if Â > 0 or D < g: advantages `[N]`, divergence `[N]` → bool `[N]`. All, when g is None.

    Section 3.2 says in words "Â < 0 and D > g". We follow the formula of section 3.3, which drops at Â ≤ 0 and D ≥ g.
    """
    if threshold is None:
        return torch.ones_like(advantages, dtype=torch.bool)
    # A NaN compares false and is kept, so that it shows in the value instead of passing for a filtered sample.
    return ~((advantages <= 0) & (divergence >= threshold))
