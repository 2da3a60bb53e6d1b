"""Pauses before a node greets an unresponsive peer again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ftis_node.host.clocks import backoff

# A node greets a peer that it met before again after 1, 2, 4 … s: twelve times, within 34 minutes. While others name
# the peer, or it calls this node, no pause is longer than 20 s.
FIRST_PAUSE, NAMED_PAUSE = 1.0, 20.0
TRIES_OF_MET = 12
LONGEST_PAUSE = FIRST_PAUSE * 2.0**TRIES_OF_MET
REFUSED_PAUSE = 300.0  # a peer of another run or protocol may have restarted in this one


@dataclass
class _Failures:
    """Failed greetings of one peer in a row. last: time of the last one. named: another peer named it since then."""

    times: int
    last: float
    named: bool = False
    refused: bool = False

    @property
    def pause(self) -> float:
        """Seconds from the last greeting to the next."""
        if self.refused:
            return REFUSED_PAUSE
        return backoff(self.times, FIRST_PAUSE, NAMED_PAUSE if self.named else LONGEST_PAUSE)


class Retries:
    """Failed greetings in a row, by peer. The owner of this object bounds the memory with `forget`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: seconds, including those in which the machine sleeps (`boot_seconds`).
        """
        self._clock = clock
        self._failures: dict[bytes, _Failures] = {}

    def failed(self, peer: bytes) -> int:
        """Note a failed greeting; return the number of failures in a row."""
        times = self.times(peer) + 1
        self._failures[peer] = _Failures(times, self._clock())
        return times

    def refused(self, peer: bytes) -> None:
        """Note that the peer answered, but belongs to another run or protocol."""
        self._failures[peer] = _Failures(0, self._clock(), refused=True)

    def named(self, peer: bytes) -> None:
        """Note a sign that the peer is alive: another peer named it, or it called."""
        if (failures := self._failures.get(peer)) is not None:
            failures.named = True

    def times(self, peer: bytes) -> int:
        """The number of failed greetings in a row."""
        failures = self._failures.get(peer)
        return failures.times if failures is not None else 0

    def seconds(self, peer: bytes) -> float:
        """Seconds until the node may greet the peer; 0: now."""
        failures = self._failures.get(peer)
        return max(0.0, failures.last + failures.pause - self._clock()) if failures is not None else 0.0

    def forget(self, peer: bytes) -> None:
        """Forget a peer that has answered or is no longer of interest."""
        self._failures.pop(peer, None)
