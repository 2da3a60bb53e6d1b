"""Payload bytes, per peer and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

PEERS_MAX = 1024


class Traffic:
    """Received and sent RPC payloads in bytes, without libp2p's own framing."""

    def __init__(self) -> None:
        self.received: Counter[bytes] = Counter()
        self.sent: Counter[bytes] = Counter()
        self._forgotten_in = 0
        self._forgotten_out = 0

    @property
    def bytes_in(self) -> int:
        return self.received.total() + self._forgotten_in

    @property
    def bytes_out(self) -> int:
        return self.sent.total() + self._forgotten_out

    def forget_all_but(self, peers: Container[bytes]) -> None:
        """Bound the memory: above 1024 peers, those outside `peers` count in the totals only."""
        self._forgotten_in += _fold(self.received, peers)
        self._forgotten_out += _fold(self.sent, peers)


def _fold(counter: Counter[bytes], peers: Container[bytes]) -> int:
    if len(counter) <= PEERS_MAX:
        return 0
    return sum(counter.pop(peer) for peer in list(counter) if peer not in peers)
