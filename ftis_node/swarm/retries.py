"""When peers that did not answer are greeted again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# A peer that was met before is greeted again after 1, 2, 4 … s: twelve times, within 34 minutes. While others name it,
# or it calls this node, no pause is longer than 20 s.
FIRST_PAUSE, NAMED_PAUSE = 1.0, 20.0
TRIES_OF_MET = 12
REFUSED_PAUSE = 300.0  # a peer of another run or protocol may have been started anew in this one


@dataclass
class _Vain:
    """Greetings of one peer in vain. named: somebody has named it since the last of them."""

    times: int
    last: float
    named: bool = False
    refused: bool = False

    @property
    def pause(self) -> float:
        """Seconds from the last greeting to the next."""
        if self.refused:
            return REFUSED_PAUSE
        pause = FIRST_PAUSE * 2.0 ** min(self.times - 1, TRIES_OF_MET)
        return min(pause, NAMED_PAUSE) if self.named else pause


class Retries:
    """Greetings in vain, in a row, of peers that were heard of. The owner of this object bounds them, by `forget`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: seconds, which go on while the machine sleeps (`boot_seconds`).
        """
        self._clock = clock
        self._vain: dict[bytes, _Vain] = {}

    def failed(self, peer: bytes) -> int:
        """Notes a greeting in vain; returns how many there were in a row."""
        times = self.times(peer) + 1
        self._vain[peer] = _Vain(times, self._clock())
        return times

    def refused(self, peer: bytes) -> None:
        """Notes that a peer of another run or protocol has answered."""
        self._vain[peer] = _Vain(0, self._clock(), refused=True)

    def named(self, peer: bytes) -> None:
        """Notes a sign that the peer lives: another named it, or it called."""
        if (vain := self._vain.get(peer)) is not None:
            vain.named = True

    def times(self, peer: bytes) -> int:
        """Greetings in vain so far."""
        vain = self._vain.get(peer)
        return vain.times if vain is not None else 0

    def seconds(self, peer: bytes) -> float:
        """Until the peer may be greeted; 0: now."""
        vain = self._vain.get(peer)
        return max(0.0, vain.last + vain.pause - self._clock()) if vain is not None else 0.0

    def forget(self, peer: bytes) -> None:
        """The peer has answered, or is of no interest any more."""
        self._vain.pop(peer, None)
