"""Payload bytes, per peer and in total."""

from __future__ import annotations

from collections import Counter


class Traffic:
    """What came in and went out in RPC payloads, in bytes; libp2p's own framing is not in it."""

    def __init__(self) -> None:
        self.received: Counter[bytes] = Counter()
        self.sent: Counter[bytes] = Counter()

    @property
    def bytes_in(self) -> int:
        return self.received.total()

    @property
    def bytes_out(self) -> int:
        return self.sent.total()
