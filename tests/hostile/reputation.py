"""Attacks on what nodes remember of others: rows 34, 36, 37 and 44."""

from __future__ import annotations

from ftis_node.store.used_rounds import milliseconds
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.announcement import PacketRef
from ftis_node.swarm.identity import Identity
from tests.hostile.attack import Attack, Crowd

SIZE = 100  # of packets that nobody has, in bytes


class Row34Contradictions(Attack):
    """Keys without number, each of which signs two announcements of one round."""

    row = 34
    rate = 20.0
    refusals = frozenset({"equivocation"})

    async def strike(self) -> None:
        entries = []
        for _ in range(8):
            who, round = Identity(self.rng.randbytes(32)), self.round()
            entries += [self.peer.promise(who, round, self._refs(count)) for count in (1, 2)]
        await self.peer.tell(*entries)

    def _refs(self, count: int) -> list[PacketRef]:
        return [PacketRef(slot, self.rng.randbytes(32), SIZE) for slot in range(count)]


class Row36Downwards(Attack):
    """The highest round first, then lower ones, to answer the rows that the author likes."""

    row = 36
    rate = 4.0
    refusals = frozenset({"too far ahead"})

    async def strike(self) -> None:
        author = self.author()
        top = 2**64 - 1 if self.strikes % 2 else milliseconds() + 3_600_000
        for round in (top, *(top - 1000 * down for down in range(1, 6))):
            packets = [(0, self.world.pack(author.author, round, 0))]
            await self.peer.tell(self.peer.announcement(author, round, packets))


class Row37Introducers(Crowd):
    """Nine peers that tell of announcements without number together."""

    row = 37
    rate = 4.0
    PEERS = 9

    async def strike(self) -> None:
        for peer in self.peers:
            await peer.tell(*(self._one() for _ in range(12)))

    def _one(self) -> ftis_pb2.Entry:
        refs = [PacketRef(slot, self.rng.randbytes(32), SIZE) for slot in range(3)]
        return self.peer.promise(Identity(self.rng.randbytes(32)), self.round(), refs)


class Row44Large(Attack):
    """Announcements of more packets than the run has slots, and masks of what is held that are longer than any."""

    row = 44
    rate = 4.0
    refusals = frozenset({"malformed"})

    async def strike(self) -> None:
        slots = self.world.run.slots
        for count in (slots, 4096):
            refs = [PacketRef(slot, self.rng.randbytes(32), SIZE) for slot in range(count)]
            await self.peer.tell(self.peer.promise(Identity(self.rng.randbytes(32)), self.round(), refs))
        mentions = [ftis_pb2.Mention(id=self.rng.getrandbits(64), held=b"\xff" * 4096) for _ in range(32)]
        await self.peer.tell(more=mentions)
