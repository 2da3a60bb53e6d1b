"""Counts of named peers that answered a greeting: peers that do not exist never answer."""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.swarm.bounded import Bounded

TELLERS_MAX = 1024
MISSED_MIN, MISSED_PART = 8, 0.75  # a doubted teller named at least so many that did not answer, as number and as part


@dataclass
class _Count:
    met: int = 0
    missed: int = 0


class Tellers:
    """Counts by teller, a 38-byte peer id. A doubted teller's answers are still used, but never suffice alone."""

    def __init__(self) -> None:
        self._counts: Bounded[bytes, _Count] = Bounded(TELLERS_MAX)

    def met(self, teller: bytes | None) -> None:
        """Count a named peer that shook hands."""
        if teller is not None:
            self._counts.setdefault(teller, _Count()).met += 1

    def missed(self, teller: bytes | None) -> None:
        """Count a named peer that did not answer its first greeting."""
        if teller is not None:
            self._counts.setdefault(teller, _Count()).missed += 1

    def doubted(self, teller: bytes) -> bool:
        """Whether at least eight of the named peers, and three in four, did not answer."""
        count = self._counts.get(teller)
        return (
            count is not None
            and count.missed >= MISSED_MIN
            and count.missed >= MISSED_PART * (count.met + count.missed)
        )
