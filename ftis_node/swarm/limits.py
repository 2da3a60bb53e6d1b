"""How much of each kind fits into one message between two nodes."""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.swarm import ftis_pb2


@dataclass(frozen=True)
class Limits:
    """What a node takes in one message at most; what is over it is left unread.

    entries: whole announcements of an exchange, and ids asked for. mentions: ids of announcements of an exchange.
    digests: packets asked for in one stream.
    """

    entries: int = 32
    mentions: int = 64
    digests: int = 64

    def message(self) -> ftis_pb2.Limits:
        """As a handshake tells them."""
        return ftis_pb2.Limits(entries=self.entries, mentions=self.mentions, digests=self.digests)

    def shared_with(self, peer: ftis_pb2.Limits) -> Limits:
        """The most that both take; what the peer did not say is as here."""
        return Limits(
            min(self.entries, peer.entries or self.entries),
            min(self.mentions, peer.mentions or self.mentions),
            min(self.digests, peer.digests or self.digests),
        )


OWN = Limits()
