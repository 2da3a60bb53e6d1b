"""Attacks on what nodes remember of others: rows 34, 36, 37 and 44."""

from ftis_node.store.packets import milliseconds
from ftis_node.swarm import ftis_pb2
from tests.hostile.attack import Attack, Crowd

SIZE = 100  # of packets that nobody has, in bytes


class Row34Contradictions(Attack):
    """Keys without number, each of which signs two announcements of one round."""

    row = 34
    rate = 20.0
    refusals = frozenset({"equivocation"})

    async def strike(self):
        entries = []
        for _ in range(8):
            who = self.stranger()
            round = self.round()
            entries += [self.promise(who, round, count=count, size=SIZE) for count in (1, 2)]
        await self.peer.tell(*entries)


class Row36Downwards(Attack):
    """The highest round first, then lower ones, to answer the rows that the author likes."""

    row = 36
    rate = 4.0
    refusals = frozenset({"too far ahead"})

    async def strike(self):
        author = self.author()
        top = 2**64 - 1 if self.strikes % 2 else milliseconds() + 3_600_000
        for round in (top, *(top - 1000 * down for down in range(1, 6))):
            await self.peer.tell(self.sound(author, round))


class Row37Introducers(Crowd):
    """Nine peers that tell of announcements without number together."""

    row = 37
    rate = 4.0
    PEERS = 9

    async def strike(self):
        for peer in self.peers:
            told = [self.promise(size=SIZE, peer=peer) for _ in range(12)]
            await peer.tell(*told)


class Row44Large(Attack):
    """Announcements of more packets than the run has slots, and masks of what is held that are longer than any."""

    row = 44
    rate = 4.0
    refusals = frozenset({"malformed"})

    async def strike(self):
        for count in (self.world.run.slots, 4096):
            await self.peer.tell(self.promise(count=count, size=SIZE))
        mentions = [ftis_pb2.Mention(id=self.rng.getrandbits(64), held=b"\xff" * 4096) for _ in range(32)]
        await self.peer.tell(more=mentions)
