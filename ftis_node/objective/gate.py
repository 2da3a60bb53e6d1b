"""Which foreign samples are near enough to learn from, judged by the learner's own successes.

This objective is our own, not the paper's. A foreign sample is kept if its advantage is positive and its mean log-prob
s_i is at least the level m. Here s_i = 1/|a_i| Σ_t log π_θ(a_t), under the policy at the start of the step. In words:
learn from a peer's right answer if it is no stranger than one's own strangest right answer. No claimed log-prob is
used, so no peer can lie its way in.
"""

from torch import Tensor

from ftis_node.objective.quantiles import nearest_rank

OLD_SHARE = 0.8  # of the level from step to step; the rest is the step's own quantile


def kept_by_gate(advantages: Tensor, likelihood: Tensor, own: Tensor, level: float | None) -> Tensor:
    """Own samples, and foreign ones with Â > 0 and s_i ≥ m: advantages, likelihood, own bool `[N]` → bool `[N]`.

    No foreign one while there is no level.
    """
    if level is None:
        return own
    # A NaN compares false and is kept, so that it shows in the value.
    return own | ((advantages > 0) & ~(likelihood < level))


def next_level(level: float | None, likelihoods: Tensor, quantile: float) -> float | None:
    """m after a step: 0.8 · m + 0.2 · the quantile, nearest rank, of the own successes' s_i `[n]`.

    The quantile alone where there was no m; m unchanged without a success. One that is not finite is left out: it
    would stay in the average for ever.
    """
    finite = likelihoods.detach()[likelihoods.isfinite()].double()
    if not finite.numel():
        return level
    (lowest,) = nearest_rank(finite, quantile)
    if level is None:
        return lowest
    return OLD_SHARE * level + (1 - OLD_SHARE) * lowest
