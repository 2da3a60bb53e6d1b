"""Bounds on what strangers cost: dictionaries that forget, items in a message, and what a peer may request.

Identities and ids are free. An answer costs more than a request, and a check more than a forgery.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TypeVar

from ftis_node.host.clocks import Clock
from ftis_node.swarm import ftis_pb2

PEERS_MAX = 1024  # with budgets

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Bounded(dict[Key, Value]):
    """A dictionary that holds at most `most` entries: a new key removes the oldest. A key's age is that of its entry,
    not of its latest value, and reading does not change it. Only assignment and `setdefault` keep the bound; `update`
    does not."""

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if key not in self and len(self) >= self.most:
            del self[next(iter(self))]
        super().__setitem__(key, value)

    def setdefault(self, key: Key, default: Value) -> Value:
        """A key's value; a missing key gets `default`, and may remove the oldest."""
        if key not in self:
            self[key] = default
        return self[key]


@dataclass(frozen=True)
class Limits:
    """The most items that a node reads in one message; it ignores the rest.

    entries: whole announcements in an exchange, and requested ids. mentions: ids of announcements in an exchange.
    digests: packets requested in one stream. room: bytes of announcements that this node gives in one message, since a
    run may have very large ones; at 0 or below it gives nothing. It is this node's own choice and is not sent.
    """

    entries: int = 32
    mentions: int = 64
    digests: int = 64
    room: float = 256 << 10

    def message(self) -> ftis_pb2.Limits:
        """The limits as a handshake carries them."""
        return ftis_pb2.Limits(entries=self.entries, mentions=self.mentions, digests=self.digests)

    def within(self, room: float) -> Limits:
        """The same with at most so much room, in bytes; it may be negative."""
        return replace(self, room=min(self.room, room))

    def shared_with(self, peer: ftis_pb2.Limits) -> Limits:
        """The smaller of both nodes' limits; a limit that the peer left out (0) is as here. The room is the default."""
        return Limits(
            min(self.entries, peer.entries or self.entries),
            min(self.mentions, peer.mentions or self.mentions),
            min(self.digests, peer.digests or self.digests),
        )


OWN = Limits()


@dataclass
class Budgets:
    """A token bucket for each peer.

    clock: monotonic, in seconds. a_second: tokens that each peer regains every second, up to `burst`. A peer begins
    with a full burst. Of more than 1024 the one that is here for longest is forgotten, and begins anew.
    """

    clock: Clock
    a_second: float
    burst: float

    def __post_init__(self) -> None:
        self._left = Bounded[bytes, tuple[float, float]](PEERS_MAX)  # tokens left, and at which time

    def take(self, peer: bytes, tokens: float = 1.0) -> bool:
        """Take so many tokens, or all that are left; False, and nothing is taken, if the peer had less than one."""
        left = self.left(peer)
        if left < 1.0:  # nothing is taken: who asks in vain regains its tokens all the same
            return False
        self._left[peer] = max(0.0, left - tokens), self.clock()
        return True

    def wait(self, peer: bytes, tokens: float) -> float:
        """Take so many tokens, even more than are left. Return the seconds until the balance is no longer negative."""
        left = self.left(peer) - tokens
        self._left[peer] = left, self.clock()
        return max(0.0, -left / self.a_second)

    def spend(self, peer: bytes, tokens: float) -> None:
        """Take so many tokens, even more than are left, down to a whole burst below zero."""
        left = self.left(peer) - tokens
        self._left[peer] = max(-self.burst, left), self.clock()

    def left(self, peer: bytes) -> float:
        """The tokens that the peer has now, at most `burst`; negative after `wait` or `spend`. Takes nothing."""
        now = self.clock()
        left, at = self._left.get(peer, (self.burst, now))
        return min(self.burst, left + (now - at) * self.a_second)
