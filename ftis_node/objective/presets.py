"""The objectives that have a name (arXiv 2605.22537, section 3, and what it is compared with)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ftis_node.objective.objective import Objective
from ftis_node.objective_parts import OWN_ONLY, ObjectiveName


def _named(name: ObjectiveName, **parts: Any) -> Objective:
    return Objective(name, own_only=name in OWN_ONLY, **parts)


_GSPO_CLIP: Mapping[str, Any] = {"epsilon": 3e-4, "epsilon_high": 4e-4}
_CISPO: Mapping[str, Any] = {"epsilon": None, "epsilon_high": 4.0}  # sg(min(R, 5)): no clip below

# grpo         trains alone, section 2: the term of vis without foreign data
# nois … ftis  section 3, C = 2 and g = 50; f-nois and f-vis have the filter of ftis (sections 3.2 and 4.6)
# opsm         the off-policy sequence mask of DeepSeek-V3.2: a mean k1 of half a nat. It drops at Â < 0 and D > δ;
#              ours at Â ≤ 0 and D ≥ δ, the same but at equality, since Â = 0 has no gradient
# gated        our own, see `gate`: everything one makes oneself, of others what is no stranger than that
# graft        GRAFT: peers' groups weigh min(s, 1) if s > δ; ε_high > ε, tokens of the batch alike
# sgt          Mutual RL / SGT (arXiv 2605.07244): GRPO, and λ · NLL on one right sample of a peer's group
# hacpo        GSPO on one's own, HACPO's weight on foreign samples (arXiv 2603.02604), see `correction`
# icepop       ρ_t where 0.5 ≤ ρ_t ≤ 5, else nothing (Ling's IcePop)
# mis          Π ρ_t of the sample, nothing beyond 3 (masked importance sampling; TRL's default)
# geo-rs       ftis without its filter; a sample counts if its geometric mean of ρ is within [0.5, 2] (verl)
# dppo         ρ_t with its gradient, without a clip; Binary-TV leaves tokens out (arXiv 2602.04879)
# gspo         one ratio for the sample (arXiv 2507.18071, section 5.1: ε 3e-4 and 4e-4)
# cispo        sg(min(ρ_t, 5)) Â log π, tokens of the batch alike (arXiv 2506.13585)
# dapo         ε_high = 0.28, tokens of the batch alike (arXiv 2503.14476); dead groups are not drawn again: `by_need`
#              replaces them, `dead_groups` leaves them out
# ftis-author  as in an earlier public code base of the paper's first author: advantages centred only, the sampled EOS
#              neither in loss nor in divergence, dropped samples out of the denominator
PRESETS: Mapping[str, Objective] = MappingProxyType(
    {
        objective.name: objective
        for objective in (
            _named("ftis"),
            _named("grpo", importance="vanilla", threshold=None),
            _named("nois", importance="none", threshold=None),
            _named("vis", importance="vanilla", threshold=None),
            _named("tis", threshold=None),
            _named("f-nois", importance="none"),
            _named("f-vis", importance="vanilla"),
            _named("opsm", importance="vanilla", divergence="k1", threshold=0.5),
            _named("gated", importance="none", threshold=None, gate=0.0),
            _named("ftis-author", advantage="mean", count_end=False, count_dropped=False),
            _named("graft", importance="none", threshold=None, trust="graft", epsilon_high=0.28, aggregation="token"),
            _named("sgt", importance="none", threshold=None, imitation=0.1),
            _named("hacpo", importance="none", threshold=None, trust="hacpo", ratio="sequence", **_GSPO_CLIP),
            _named("icepop", truncation=5.0, threshold=None, mask="token", mask_low=0.5, mask_high=5.0),
            _named("mis", importance="sequence", threshold=None, mask="sequence"),
            _named("geo-rs", threshold=None, mask="geometric", mask_low=0.5, mask_high=2.0),
            _named("dppo", importance="vanilla", threshold=None, epsilon=None, mask="binary_tv", mask_high=0.2),
            _named("gspo", importance="vanilla", threshold=None, ratio="sequence", **_GSPO_CLIP),
            _named("cispo", importance="vanilla", threshold=None, ratio="detached", aggregation="token", **_CISPO),
            _named("dapo", importance="vanilla", threshold=None, epsilon_high=0.28, aggregation="token"),
        )
    }
)
