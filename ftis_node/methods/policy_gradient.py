"""Objectives of other trainers for one policy's samples; here others' samples go through the same term.

    dapo, gspo, cispo   min(Rₜ ρₜ Âᵢ, clip(Rₜ ρₜ, 1−ε, 1+ε_high) Âᵢ) with other clips, ratios and denominators

Trained on: own samples and others' alike. No signal: a group of equal rewards; a token outside the clip.
`dapo` draws groups of equal rewards again: here own ones count in the denominator.
"""

from ftis_node.methods.choices import Parts


def dapo() -> Parts:
    """ρₜ inside the clip, ε_high 0.28, terms over the batch's tokens.

    Of others: all as its own. Source: 2503.14476.
    """
    return {"importance": "vanilla", "threshold": None, "epsilon_high": 0.28, "aggregation": "token"}


def gspo() -> Parts:
    """One ratio, (Πₜ ρₜ)^(1/|a|), of own samples (Πₜ Rₜ)^(1/|a|), clipped at 3e-4 and 4e-4 (`ratio=sequence`).

    Of others: all as its own. Source: 2507.18071.
    """
    return {"importance": "vanilla", "threshold": None, "ratio": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}


def cispo() -> Parts:
    """sg(min(ρₜ, 5)) Â log π, terms over the batch's tokens (`ratio=detached`).

    Of others: all as its own. Source: 2506.13585.
    """
    return {
        "importance": "vanilla",
        "threshold": None,
        "ratio": "detached",
        "aggregation": "token",
        "epsilon": None,
        "epsilon_high": 4.0,
    }
