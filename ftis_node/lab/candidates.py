"""Methods of 2025 and 2026 that are compared before any becomes a preset: `objective = "topr"` in a lab file.

    topr      TOPR (arXiv 2503.14286): a success counts 1, a failure min(Πₜ ρₜ, 1), terms not divided by |a|
    mu-grpo   μ-GRPO (2605.17570): ρₜ inside a wide clip; a failure from its first token outside the clip on: nothing
    asymre    AsymRE (2506.20520): Â = r − (mean(r) + δ), each sample counts 1, terms not divided by |a|
    maxrl     MaxRL (2602.02710): Â = (r − mean(r)) / mean(r); the rest is F-TIS
    focal     F-GRPO (2602.06717): Â times (1 − mean(r))^γ; the rest is F-TIS
    hacpo-published, xgrpo   for horizontal cells in lock step, see `lab.pooling`

Here are the settings that each stands on, `lab.corrections` has what the product lacks. The two that change nothing but
the advantage say nothing of others' samples, so these keep F-TIS's correction; on own samples, where ρ is 1, they are
their papers'. TOPR's reward is Â. δ, γ and the width of the clip are ours: −0.1, 1 and 0.8.
"""

from collections.abc import Mapping
from typing import Any

CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "topr": {"objective": "nois", "aggregation": "fixed"},
    "mu-grpo": {"objective": "vis", "epsilon": 0.8},
    "asymre": {"objective": "nois", "aggregation": "fixed"},
    "maxrl": {"objective": "ftis"},
    "focal": {"objective": "ftis"},
    "hacpo-published": {"objective": "hacpo"},
    "xgrpo": {"objective": "vis"},
}


def standing_on(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with those that their objective stands on, where it is a candidate."""
    return {**settings, **CANDIDATES.get(settings.get("objective", ""), {})}
