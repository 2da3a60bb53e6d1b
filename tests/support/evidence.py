"""What trained steps say of an author."""

import numpy as np

from ftis_node.objective.diagnostics import HONEST_CAP, TOLERANCE
from ftis_node.step_report import BETS
from ftis_node.swarm.books import NEWCOMER_GROUPS
from ftis_node.swarm.reputation import Reputation


def figures(samples: int = 8, excess: float = 0.0, squares: float = 0.0, paid: float = 0.0) -> dict[str, float]:
    """Of a step's samples, as the learner tells them; `paid`: of each bet, in nats."""
    return {
        "samples": float(samples),
        "tokens": 10.0 * samples,
        "excess": excess,
        "excess_squares": squares,
        "judged": float(samples),
        "judged_tokens": 10.0 * samples,
        "surprising": 0.0,
        "likelihood": -1.0,
        "loss_share": 0.5,
        **{f"bet_{bet}": paid for bet in BETS},
    }


def of_ratios(log_ratio: np.ndarray) -> dict[str, float]:
    """Of judged samples whose tokens have these log ρ, `[samples, tokens]`."""
    x = (np.minimum(np.exp(log_ratio), HONEST_CAP) - 1.0).sum(1)
    told = figures(len(log_ratio), float(x.sum()), float((x**2).sum()))
    told["tokens"] = told["judged_tokens"] = float(log_ratio.size)
    for bet in BETS:
        told[f"bet_{bet}"] = float(np.log1p(bet * np.expm1(log_ratio - TOLERANCE)).sum())
    return told


def established(reputation: Reputation, author: bytes):
    for _ in range(NEWCOMER_GROUPS):
        reputation.trained(author, 1, figures())
    assert reputation.established(author)
