"""The objectives that have a name (arXiv 2605.22537, section 3, and what it is compared with)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ftis_node.objective.objective import Objective
from ftis_node.objective_parts import OWN_ONLY, ObjectiveName


def _named(name: ObjectiveName, **parts: Any) -> Objective:
    return Objective(name, own_only=name in OWN_ONLY, **parts)


# grpo         trains alone, section 2: the term of vis without foreign data
# nois … ftis  section 3, C = 2 and g = 50; f-nois and f-vis have the filter of ftis (sections 3.2 and 4.6)
# opsm         the off-policy sequence mask of DeepSeek-V3.2: a mean k1 of half a nat. It drops at Â < 0 and D > δ;
#              ours at Â ≤ 0 and D ≥ δ, the same but at equality, since Â = 0 has no gradient
# gated        our own, see `gate`: everything one makes oneself, of others what is no stranger than that
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
        )
    }
)
