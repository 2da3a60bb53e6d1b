"""F-TIS and its ablations (arXiv 2605.22537, sections 2, 3 and 4.6).

    1/N Σ_groups 1/G Σᵢ 1/|aᵢ| Σₜ  wₜ · min(Rₜ Âᵢ, clip(Rₜ, 1−ε, 1+ε) Âᵢ),   ρₜ = π_θ(aₜ) / π_gen(aₜ)

Trained on: own samples and others' alike; with the filter none with Âᵢ ≤ 0 and D(aᵢ) ≥ g. `grpo` is the term of `vis`
on own samples only. No signal: a group of equal rewards, and a sample that the filter drops.
"""

from ftis_node.methods.choices import Parts


def ftis() -> Parts:
    """wₜ = min(ρₜ, C); nothing where D ≥ g at Â ≤ 0.

    Of others: what the filter keeps. Source: 2605.22537.
    """
    return {}


def grpo() -> Parts:
    """wₜ = ρₜ, inside the clip, with its gradient.

    Of others: nothing: trains alone. Source: 2402.03300.
    """
    return {"importance": "vanilla", "threshold": None, "own_only": True}


def nois() -> Parts:
    """wₜ = 1.

    Of others: all as its own. Source: 2605.22537.
    """
    return {"importance": "none", "threshold": None}


def vis() -> Parts:
    """wₜ = ρₜ, inside the clip, with its gradient.

    Of others: all as its own. Source: 2605.22537.
    """
    return {"importance": "vanilla", "threshold": None}


def tis() -> Parts:
    """wₜ = min(ρₜ, C).

    Of others: all as its own. Source: 2605.22537.
    """
    return {"threshold": None}


def f_nois() -> Parts:
    """As `nois`, with the filter of `ftis`.

    Of others: what the filter keeps. Source: 2605.22537.
    """
    return {"importance": "none"}


def f_vis() -> Parts:
    """As `vis`, with the filter of `ftis`.

    Of others: what the filter keeps. Source: 2605.22537.
    """
    return {"importance": "vanilla"}


def ftis_author() -> Parts:
    """As `ftis`; Â centred only, EOS in neither loss nor D, dropped samples out of the denominator.

    Of others: what the filter keeps. Source: an earlier public code base of the paper's first author.
    """
    return {"advantage": "mean", "count_end": False, "count_dropped": False}
