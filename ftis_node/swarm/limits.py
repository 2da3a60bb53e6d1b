"""The most items of each kind in one message between two nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftis_node.swarm import ftis_pb2


@dataclass(frozen=True)
class Limits:
    """The most items that a node reads in one message; it ignores the rest.

    entries: whole announcements in an exchange, and requested ids. mentions: ids of announcements in an exchange.
    digests: packets requested in one stream. room: bytes of announcements that this node gives in one message, since a
    run may have very large ones; at 0 or below it gives nothing.
    """

    entries: int = 32
    mentions: int = 64
    digests: int = 64
    room: float = 256 << 10

    def message(self) -> ftis_pb2.Limits:
        """The limits as a handshake carries them."""
        return ftis_pb2.Limits(entries=self.entries, mentions=self.mentions, digests=self.digests)

    def within(self, room: float) -> Limits:
        """The same with so little room."""
        return replace(self, room=min(self.room, room))

    def shared_with(self, peer: ftis_pb2.Limits) -> Limits:
        """The smaller of both nodes' limits; a limit that the peer left out is as here."""
        return Limits(
            min(self.entries, peer.entries or self.entries),
            min(self.mentions, peer.mentions or self.mentions),
            min(self.digests, peer.digests or self.digests),
        )


OWN = Limits()
