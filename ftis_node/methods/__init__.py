"""The objectives that have a name, as the parts in which each differs from F-TIS. Data only, so that settings are
checked without torch.

F-TIS and its ablations (arXiv 2605.22537, sections 2, 3 and 4.6), with ρₜ = π_θ(aₜ) / π_gen(aₜ):

    1/N Σ_groups 1/G Σᵢ 1/|aᵢ| Σₜ  wₜ · min(Rₜ Âᵢ, clip(Rₜ, 1−ε, 1+ε) Âᵢ)

Own samples and others' are trained on alike; with the filter none with Âᵢ ≤ 0 and D(aᵢ) ≥ g. `grpo` is the term of
`vis` on own samples only. A group of equal rewards, and a sample that filter, mask, clip or gate drops, has no signal.

`gated`: a foreign sample counts, with weight 1, if Âᵢ > 0 and sᵢ = 1/|aᵢ| Σₜ log π_θ(aₜ) ≥ m, a moving average of each
step's lowest sᵢ among own successes (`ftis_node.objective.gate`). It uses no claimed log-prob, so no peer can lie its
way in.

Made for learning from other models' answers, `graft`, `hacpo` and `sgt` train on own samples, and of others on answers
to needed rows (`foreign=answers`), `hacpo` on all. `graft` has all peers' samples in the one update, so "peers last" is
without meaning. `hacpo` weighs foreign ones by sg(c)^α · c of c = clip(s, 0.8, 1), α = 1; rows of a swarm differ, so no
groups are pooled and every capability ratio is 1.

`icepop`, `mis` and `geo-rs` correct for samplers that are not quite the learner. `dapo`, `gspo`, `cispo` and `dppo` are
of other trainers for one policy's samples; here others' samples go through the same term, min(Rₜ ρₜ Âᵢ, clip(Rₜ ρₜ,
1−ε, 1+ε_high) Âᵢ). `dapo` draws dead groups again: here `by_need` replaces them, and `dead_groups=drop` leaves them
out. DeepSeek's mask, `opsm`, drops at Â < 0 and D > δ: the same but at equality, since Â = 0 has no gradient.

How a sample counts (docs/method.md has this list as a table):

* `ftis`: wₜ = min(ρₜ, C); nothing where D ≥ g at Â ≤ 0. Of others: what the filter keeps. Source: 2605.22537.
* `grpo`: wₜ = ρₜ, inside the clip, with its gradient. Of others: nothing: trains alone. Source: 2402.03300.
* `nois`: wₜ = 1. Of others: all as its own. Source: 2605.22537.
* `vis`: wₜ = ρₜ, inside the clip, with its gradient. Of others: all as its own. Source: 2605.22537.
* `tis`: wₜ = min(ρₜ, C). Of others: all as its own. Source: 2605.22537.
* `f-nois`: As `nois`, with the filter of `ftis`. Of others: what the filter keeps. Source: 2605.22537.
* `f-vis`: As `vis`, with the filter of `ftis`. Of others: what the filter keeps. Source: 2605.22537.
* `opsm`: As `vis`; nothing where the mean `k1` ≥ 0.5 at Â ≤ 0. Of others: what the filter keeps. Source:
  DeepSeek-V3.2's off-policy sequence mask.
* `ftis-author`: As `ftis`; Â centred only, EOS in neither loss nor D, dropped samples out of the denominator. Of
  others: what the filter keeps. Source: an earlier public code base of the paper's first author.
* `gated`: wₜ = 1; of others only if Â > 0 and s ≥ m: [below](#gated). Of others: successes no stranger than its own.
  Source: our own.
* `graft`: Of others 1[s > 0.8] · min(s, 1), s = e^(mean log π_θ − mean log π_gen), each mean over that side's own
  tokens; ε_high 0.28; terms over the batch's tokens (`trust=graft`). Of others: answers only. Source: GRAFT (KAIST,
  2026).
* `sgt`: Beside GRPO λ = 0.1 times log π of one right sample of each answer. Of others: answers only. Source:
  2605.07244.
* `hacpo`: Own as `gspo`; of others s² if 0.8 ≤ s ≤ 1, else nothing, s as in `graft` (`trust=hacpo`). Of others: what is
  near enough. Source: 2603.02604.
* `icepop`: ρₜ where 0.5 ≤ ρₜ ≤ 5, else no gradient (`mask=token`). Of others: what the mask leaves. Source: Ling.
* `mis`: Πₜ ρₜ of the sample; nothing beyond 3 (`importance=sequence`, `mask=sequence`). Of others: what the mask
  leaves. Source: TRL's `sequence_mask`.
* `geo-rs`: `tis`; a sample counts if its geometric mean of ρ lies in [0.5, 2] (`mask=geometric`). Of others: what the
  mask leaves. Source: verl.
* `dppo`: ρₜ with gradient, without clip; not a token that π raised, or lowered, by over 0.2 in Â's direction
  (`mask=binary_tv`). Of others: all as its own. Source: 2602.04879.
* `gspo`: One ratio, (Πₜ ρₜ)^(1/|a|), clipped at 3e-4 and 4e-4 (`ratio=sequence`). Of others: all as its own. Source:
  2507.18071.
* `cispo`: sg(min(ρₜ, 5)) Â log π, terms over the batch's tokens (`ratio=detached`). Of others: all as its own. Source:
  2506.13585.
* `dapo`: ρₜ inside the clip, ε_high 0.28, terms over the batch's tokens. Of others: all as its own. Source: 2503.14476.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftis_node.methods.choices import PART_NAMES, Parts

__all__ = ["METHODS", "NAMES", "answers_only"]

_UNFILTERED: Parts = {"threshold": None}
_UNWEIGHTED: Parts = {**_UNFILTERED, "importance": "none"}
_SURROGATE: Parts = {**_UNFILTERED, "importance": "vanilla"}
_BY_TOKENS: Parts = {"aggregation": "token"}
_BY_SEQUENCE: Parts = {"ratio": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}

METHODS: Mapping[str, Parts] = {
    "ftis": {},
    "grpo": {**_SURROGATE, "own_only": True},
    "nois": _UNWEIGHTED,
    "vis": _SURROGATE,
    "tis": _UNFILTERED,
    "f-nois": {"importance": "none"},
    "f-vis": {"importance": "vanilla"},
    "opsm": {"importance": "vanilla", "divergence": "k1", "threshold": 0.5},
    "ftis-author": {"advantage": "mean", "count_end": False, "count_dropped": False},
    "gated": {**_UNWEIGHTED, "gate": 0.0},
    "graft": {**_UNWEIGHTED, **_BY_TOKENS, "trust": "graft", "epsilon_high": 0.28},
    "sgt": {**_UNWEIGHTED, "imitation": 0.1},
    "hacpo": {**_UNWEIGHTED, **_BY_SEQUENCE, "trust": "hacpo"},
    "icepop": {**_UNFILTERED, "truncation": 5.0, "mask": "token", "mask_low": 0.5, "mask_high": 5.0},
    "mis": {**_UNFILTERED, "importance": "sequence", "mask": "sequence"},
    "geo-rs": {**_UNFILTERED, "mask": "geometric", "mask_low": 0.5, "mask_high": 2.0},
    "dppo": {**_SURROGATE, "epsilon": None, "mask": "binary_tv", "mask_high": 0.2},
    "gspo": {**_SURROGATE, **_BY_SEQUENCE},
    "cispo": {**_SURROGATE, **_BY_TOKENS, "ratio": "detached", "epsilon": None, "epsilon_high": 4.0},
    "dapo": {**_SURROGATE, **_BY_TOKENS, "epsilon_high": 0.28},
}
NAMES: Mapping[str, tuple[str, ...]] = {"objective": tuple(METHODS), **PART_NAMES}
"""Setting → the names that it can have."""


def answers_only(objective: str, foreign: str | None) -> bool:
    """Whether a step takes nothing but answers to needed rows from others, as graft and sgt were published."""
    return foreign == "answers" or (foreign is None and objective in ("graft", "sgt"))
