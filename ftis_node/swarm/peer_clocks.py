"""The clocks of peers, compared with this node's own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.swarm.bounded import put

PEERS_MAX = 256
LATEST = 253402300800.0  # the end of the year 9999; a later value is not a time


@dataclass(frozen=True)
class ClockDifference:
    """The difference between this node's clock and its peers'. behind: seconds that this node is behind their median;
    negative: ahead. peers: the number that sent their time."""

    behind: float
    peers: int


class PeerClocks:
    """Each peer's clock by its latest message: a handshake, or an announcement of its own."""

    def __init__(self, wall: Callable[[], float] = unix_seconds, elapsed: Callable[[], float] = boot_seconds) -> None:
        """
        Args:
            wall: seconds since 1970, by this machine's clock, which may be set at any time. elapsed: never set.
        """
        self._wall = wall
        self._elapsed = elapsed
        self._started: dict[bytes, float] = {}  # the peer's time when `elapsed` was 0: own corrections change nothing

    def note(self, peer: bytes, time: float) -> None:
        """Note the time that `peer` sent (seconds since 1970); 0: it sent none."""
        if 0 < time < LATEST:
            put(self._started, peer, time - self._elapsed(), PEERS_MAX)

    def difference(self, peers: Collection[bytes]) -> ClockDifference | None:
        """The difference to these peers; None if none of them sent its time.

        The median is safe against one liar. With an even number, the smaller of the middle two counts.
        """
        zero = self._wall() - self._elapsed()
        found = sorted(self._started[peer] - zero for peer in peers if peer in self._started)
        if not found:
            return None
        middle = (found[(len(found) - 1) // 2], found[len(found) // 2])
        return ClockDifference(min(middle, key=abs), len(found))
