"""Foreign samples that a node does not learn from, whatever their rewards say.

A right answer earns its reward whatever else the text holds: a payload, false reasoning, padding
("Hail to the Thief", arXiv 2511.09780). Its claims may be honest, and importance weights let the rest of such a sample
through. Both rules here judge the sample alone, so they need no record of its author. Both cost some of what a peer of
another style could teach.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from ftis_node.objective.packed import owners, segment_max

LIKELIHOOD = "likelihood"
LENGTH = "length"
NEAR_IMPOSSIBLE = math.log(1e-4)
"""A token that this node finds rarer was forced on it, or is of a style that it would never write itself."""
LONGER = 2.0
"""How many times as long as its own successes are on average a foreign success may be."""
MEMORY = 0.8  # of the average, at each step


def distrusted(
    start: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    own: Tensor,
    *,
    defences: Collection[str],
    usual_length: float | None,
) -> Tensor:
    """Which samples are left out.

    Args:
        start: log-probs under the policy at the start of the step, `[Σ lengths]`.
        lengths: int64 `[N]`.
        advantages: `[N]`; what is not to be imitated is never left out here.
        own: bool `[N]`, the node's own.
        defences: `likelihood` leaves out what holds a near-impossible token, `length` what is longer than `LONGER`
            times the usual.
        usual_length: of one's own successes, see `next_length`; None while there was none.

    Returns:
        bool `[N]`.
    """
    suspect = torch.zeros_like(own)
    if LIKELIHOOD in defences:
        rarest = -segment_max(-start, owners(lengths), lengths.numel())
        suspect |= rarest < NEAR_IMPOSSIBLE
    if LENGTH in defences and usual_length is not None:
        suspect |= lengths > LONGER * usual_length
    return suspect & ~own & (advantages > 0)


def next_length(usual: float | None, lengths: list[int]) -> float | None:
    """The average length of one's own successes after a step whose had these lengths; unchanged without any."""
    if not lengths:
        return usual
    mean = sum(lengths) / len(lengths)
    if usual is None:
        return mean
    return MEMORY * usual + (1 - MEMORY) * mean
