"""Methods made for learning from other models' answers.

    graft   foreign samples weigh 1[s > 0.8] · min(s, 1), s = e^(mean log π_θ − mean log π_gen), each mean over that
            side's own tokens. All peers' samples are in the one update, so "peers last" is without meaning
    hacpo   own samples as `gspo`; foreign ones weigh sg(c)^α · c of c = clip(s, 0.8, 1), α = 1. Groups are
            pooled where rows are common, in a horizontal run; every capability ratio is 1
    sgt     GRPO on own samples, and λ · log π of one right sample of each foreign group

Trained on: own samples, and others' groups. GRAFT and SGT were published with others' answers to failed questions only.
No signal: a group of equal rewards; with `sgt` a foreign group without a right sample.
"""

from ftis_node.methods.choices import Parts
from ftis_node.methods.policy_gradient import gspo


def graft() -> Parts:
    """Of others 1[s > 0.8] · min(s, 1), s = e^(mean log π_θ − mean log π_gen), each mean over that side's own
    tokens; ε_high 0.28; terms over the batch's tokens.

    Of others: what is near enough. Source: GRAFT (KAIST, 2026).
    """
    return {"importance": "none", "threshold": None, "trust": "graft", "epsilon_high": 0.28, "aggregation": "token"}


def hacpo() -> Parts:
    """Own as `gspo`; of others s² if 0.8 ≤ s ≤ 1, else nothing, s as in `graft`.

    Of others: what is near enough. Source: 2603.02604.
    """
    return {**gspo(), "importance": "none", "trust": "hacpo"}


def sgt() -> Parts:
    """Beside GRPO λ = 0.1 times log π of one right sample of each foreign group.

    Of others: one right sample a group. Source: 2605.07244.
    """
    return {"importance": "none", "threshold": None, "imitation": 0.1}
