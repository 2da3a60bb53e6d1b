"""How often a peer may call. An answer costs more than a question, so nobody may ask without end."""

from __future__ import annotations

from collections.abc import Callable

from ftis_node.swarm.bounded import make_room

CALLS_A_SECOND = 50.0
BURST = 200.0
CALLERS_MAX = 1024


class Calls:
    """A token bucket for each caller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: monotonic, in seconds.
        """
        self._clock = clock
        self._left: dict[bytes, tuple[float, float]] = {}  # calls left, and when that was so

    def allow(self, peer: bytes) -> bool:
        """Counts a call; False if there were too many lately."""
        now = self._clock()
        left, at = self._left.get(peer, (BURST, now))
        left = min(BURST, left + (now - at) * CALLS_A_SECOND)
        make_room(self._left, peer, CALLERS_MAX)
        self._left[peer] = (max(0.0, left - 1.0), now)
        return left >= 1.0
