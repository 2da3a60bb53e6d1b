"""What peers say that the time is, beside this node's own clock."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.swarm.bounded import make_room

PEERS_MAX = 256
LATEST = 253402300800.0  # the end of the year 9999; what lies beyond it is no time


@dataclass(frozen=True)
class ClockDifference:
    """behind: seconds by which this node's clock is behind its peers' (their median); negative: it is ahead.
    peers: how many said their time."""

    behind: float
    peers: int


class PeerClocks:
    """Each peer's clock, as it told the time last: in its handshake, and in each announcement of its own."""

    def __init__(self, wall: Callable[[], float] = unix_seconds, elapsed: Callable[[], float] = boot_seconds) -> None:
        """
        Args:
            wall: seconds since 1970, by this machine's clock, which may be set at any time. elapsed: never set.
        """
        self._wall = wall
        self._elapsed = elapsed
        self._started: dict[bytes, float] = {}  # the peer's time when `elapsed` was 0: own corrections change nothing

    def note(self, peer: bytes, told: float) -> None:
        """`peer` says that it is `told` now (seconds since 1970); 0: it does not say."""
        if 0 < told < LATEST:
            make_room(self._started, peer, PEERS_MAX)
            self._started[peer] = told - self._elapsed()

    def difference(self, peers: Collection[bytes]) -> ClockDifference | None:
        """The difference to these peers; None if none of them said its time.

        It is their median, so that one liar cannot make it; of an even number the smaller of the middle two counts.
        """
        zero = self._wall() - self._elapsed()
        found = sorted(self._started[peer] - zero for peer in peers if peer in self._started)
        if not found:
            return None
        middle = (found[(len(found) - 1) // 2], found[len(found) // 2])
        return ClockDifference(min(middle, key=abs), len(found))
