"""The weight of an author by what its groups brought this node (setting `author_weight=gain`; see `learner.gains`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# MEMORY: half-life of the mean, in groups. FEWEST: groups before a verdict. LEAST:
# the smallest weight; at 0 nothing would be learned of an author any more, and so nothing about it.
MEMORY_GROUPS = 64.0
FEWEST_GROUPS = 24.0
LEAST_WEIGHT = 0.1


@dataclass(slots=True)
class Gained:
    """The mean gain of some source's groups, of the latest ones above all."""

    groups: float = 0.0
    total: float = 0.0

    def add(self, gain: float, groups: int) -> None:
        """Add a step's mean gain of so many groups."""
        kept = 0.5 ** (groups / MEMORY_GROUPS)
        self.groups = kept * self.groups + groups
        self.total = kept * self.total + groups * gain

    @property
    def mean(self) -> float:
        return self.total / self.groups if self.groups else 0.0

    @property
    def known(self) -> bool:
        """Whether there are enough groups for a verdict."""
        return self.groups >= FEWEST_GROUPS

    def weight(self, usual: float) -> float:
        """What an author counts that brought this: its part of what is usual, 1 at most, and 1 while too little is
        known of it or what is usual is no gain."""
        return min(1.0, max(LEAST_WEIGHT, self.mean / usual)) if self.known and usual > 0 else 1.0


def usual_gain(sources: Iterable[Gained]) -> float:
    """The upper median of the known means of all sources, of which one is the node itself; 0 if none is known.

    One's own alone would be a measure with too much noise: it comes of two halves of a quarter of the batch.
    """
    known = sorted(source.mean for source in sources if source.known)
    return known[len(known) // 2] if known else 0.0
