"""Limits on what a peer may request: an answer costs more than a request, and a check more than a forgery."""

from collections.abc import Callable, Hashable

from ftis_node.swarm.bounded import Bounded

PEERS_MAX = 1024
TIMES = 8  # on a bad line four answers in a row may be lost
GIVEN_MAX = 1 << 15


class Budgets:
    """A token bucket for each peer."""

    def __init__(self, clock: Callable[[], float], a_second: float, burst: float) -> None:
        """
        Args:
            clock: monotonic, in seconds.
            a_second: tokens that each peer regains every second, up to `burst`.
        """
        self._clock = clock
        self._a_second = a_second
        self._burst = burst
        self._left = Bounded[bytes, tuple[float, float]](PEERS_MAX)  # tokens left, and at which time

    def take(self, peer: bytes, tokens: float = 1.0) -> bool:
        """Take so many tokens, or all that are left; False if the peer had none."""
        left = self.left(peer)
        self._left[peer] = max(0.0, left - tokens), self._clock()
        return left >= 1.0

    def wait(self, peer: bytes, tokens: float) -> float:
        """Take so many tokens, even more than are left. Return the seconds until the balance is no longer negative."""
        left = self.left(peer) - tokens
        self._left[peer] = left, self._clock()
        return max(0.0, -left / self._a_second)

    def spend(self, peer: bytes, tokens: float) -> None:
        """Take so many tokens, even more than are left, down to a whole burst below zero."""
        self._left[peer] = max(-self._burst, self.left(peer) - tokens), self._clock()

    def left(self, peer: bytes) -> float:
        """The tokens that the peer has now."""
        now = self._clock()
        left, at = self._left.get(peer, (self._burst, now))
        return min(self._burst, left + (now - at) * self._a_second)


class FewTimes:
    """What was given to whom. Nothing goes to one peer more than eight times, as long as this is remembered."""

    def __init__(self) -> None:
        self._given = Bounded[tuple[bytes, Hashable], int](GIVEN_MAX)

    def may(self, peer: bytes, what: Hashable) -> bool:
        """Count a further time; False if it was given often enough."""
        times = self._given.pop((peer, what), 0)
        self._given[peer, what] = min(times + 1, TIMES)
        return times < TIMES
