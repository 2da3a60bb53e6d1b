"""What trained steps say of an author."""

from __future__ import annotations

from ftis_node.swarm.books import NEWCOMER_GROUPS
from ftis_node.swarm.standing import Standing


def figures(samples: int = 8, excess: float = 0.0, squares: float = 0.0) -> dict[str, float]:
    """Of a step's samples, as the learner tells them."""
    told = {"samples": float(samples), "tokens": 10.0 * samples, "excess": excess, "excess_squares": squares}
    return {**told, "surprising": 0.0, "likelihood": -1.0, "loss_share": 0.5}


def established(standing: Standing, author: bytes) -> None:
    for _ in range(NEWCOMER_GROUPS):
        standing.trained(author, 1, figures())
    assert standing.established(author)
