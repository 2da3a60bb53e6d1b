"""Counts of named peers that answered a greeting: peers that do not exist never answer."""

from __future__ import annotations

from ftis_node.swarm.bounded import Bounded

REFERRERS_MAX = 1024
# A doubted referrer named at least so many that did not answer, as number and as part.
MISSED_MIN, MISSED_PART = 8, 0.75


class Referrers:
    """Counts by referrer, a 38-byte peer id. A doubted referrer's answers are still used, but never suffice alone."""

    def __init__(self) -> None:
        self._counts: Bounded[bytes, list[int]] = Bounded(REFERRERS_MAX)  # missed, met

    def note(self, referrer: bytes | None, *, met: bool) -> None:
        """Count a named peer that shook hands, or did not answer its first greeting."""
        if referrer is not None:
            self._counts.setdefault(referrer, [0, 0])[met] += 1

    def doubted(self, referrer: bytes) -> bool:
        """Whether at least eight of the named peers, and three in four, did not answer."""
        missed, met = self._counts.get(referrer, (0, 0))
        return missed >= MISSED_MIN and missed >= MISSED_PART * (met + missed)
