"""How far a sample lies from the learner's policy: an estimate per token, reduced over the sample's tokens.

A packet holds only the log-probs of the sampled tokens, sampled from π_gen. So every estimate is a function of d = log
π_θ − log π_gen. As we read it, π_θ is the policy at the start of the step. The paper (arXiv
2605.22537, section 3.2) writes D_KL(π_θ ‖ π_gen) and names no estimator. We read `k3_reverse`, mean over tokens, which
estimates χ² − KL and so has no unit. Its g = 5, 10, 50 and 100 (section 4.5) differ for a sample that the learner finds
unlikely. There `k1`, `k3` and `is_k3` end at 20, 19 and 1, with |d| ≤ 20. The others stay selectable.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ftis_node.methods.choices import Divergence, Reduction
from ftis_node.objective.packed import segment_max, segment_sum

# Name → estimate per token of clamped d, any shape. expm1 keeps the small differences of near-equal policies.
ESTIMATORS: Mapping[Divergence, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,  # KL(gen‖θ)
    "k2": lambda d: d.square() / 2,  # neither direction, ≥ 0
    "k3": lambda d: torch.expm1(d) - d,  # KL(gen‖θ), ≥ 0: e^d − 1 − d
    "is_k1": lambda d: d.exp() * d,  # KL(θ‖gen) by importance sampling
    "is_k3": lambda d: d.exp() * d - torch.expm1(d),  # KL(θ‖gen), ≥ 0: e^d·d − e^d + 1
    "k3_reverse": lambda d: torch.expm1(-d) + d,  # χ²(gen‖θ) − KL(gen‖θ), ≥ 0: e^(−d) − 1 + d
}

# Name → (values [T], owner int64 [T], lengths int64 [N]) → [N]; 0 for a sample of no tokens.
REDUCTIONS: Mapping[Reduction, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda values, owner, lengths: segment_sum(values, owner, lengths.numel()) / lengths.clamp(min=1),
    "sum": lambda values, owner, lengths: segment_sum(values, owner, lengths.numel()),
    "max": lambda values, owner, lengths: segment_max(values, owner, lengths.numel()).where(lengths > 0, 0.0),
}
