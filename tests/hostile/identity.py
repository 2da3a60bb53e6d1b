"""Attacks by who says what: rows 6, 7, 14, 15, 31 and 61."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from ftis_node.packet import packet_digest
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.announcement import Announcement, PacketRef, announce
from ftis_node.swarm.fetch import HolderFault, fetch
from ftis_node.swarm.handshake import greeting
from ftis_node.swarm.known import Known, Target, announcement_id
from ftis_node.swarm.traffic import Traffic
from tests.hostile.attack import Attack, Crowd
from tests.hostile.peer import CALL_SECONDS, always


class Honest(Attack):
    """An attack on what honest nodes have announced."""

    def theirs(self) -> list[Announcement]:
        """Announcements by targets that were heard, the latest last."""
        honest = {target.author for target in self.peer.targets}
        return [made for made in self.peer.heard.values() if made.author in honest]

    def known(self) -> list[int]:
        """The ids of the latest of these."""
        return [announcement_id(made.encode()) for made in self.theirs()[-32:]]

    async def held(self, count: int = 24, age: float = 0.0) -> list[ftis_pb2.Entry]:
        """The latest of these, asked for now: "I hold all of it"."""
        await self.peer.overhear()
        return [self.peer.entry(made.encode(), len(made.packets), age) for made in self.theirs()[-count:]]


class Row06Forged(Honest):
    """Others' names under what they never said, others' packets as one's own, another run's packets, and packets of
    honest authors with other bytes in them."""

    row = 6
    refusals = frozenset({"forged", "other author", "other run", "wrong bytes"})

    async def prepare(self):
        self.peer.serve = self._altered

    async def strike(self):
        await self.peer.overhear()
        entries = [self._other_run()]
        theirs = self.theirs()
        for made in self.rng.sample(theirs, min(4, len(theirs))):
            entries.append(self._forged(made))
            entries += await self._stolen(made)
            entries.append(self.peer.entry(made.encode(), len(made.packets)))  # what is served is something else
        await self.peer.tell(*entries)

    def _forged(self, made: Announcement) -> ftis_pb2.Entry:
        """In the name of an honest author, who would contradict itself with it, had it signed it."""
        victim = made.author
        author = self.author()
        body = self.world.pack(victim, made.round, 0)
        self.peer.bodies[packet_digest(body)] = body
        mine = announce(
            author,
            run_id=made.run_id,
            round=made.round,
            policy_step=0,
            issued_at=int(time.time()),
            packets=[PacketRef(0, packet_digest(body), len(body), 1)],
        )
        return self.peer.entry(mine.encode().replace(author.author, victim), 1)

    async def _stolen(self, made: Announcement) -> list[ftis_pb2.Entry]:
        """Somebody else's packet under one's own name."""
        target = Target(Known(made, b"", 0.0, 0.0, None), 0)
        found = fetch(self.peer.transport, made.author, [target], Traffic())
        bodies = []
        with contextlib.suppress(HolderFault):  # a node that leaves this peer alone gives it nothing
            bodies = [chunk.packet async for _, chunk in found if chunk.packet]
        slot = made.packets[0].slot
        return [self.peer.announcement(self.author(), made.round, [(slot, body)]) for body in bodies]

    def _other_run(self) -> ftis_pb2.Entry:
        author = self.author()
        round = self.round()
        body = self.world.pack(author.author, round, 0, run_id=b"another run's id")
        return self.peer.announcement(author, round, [(0, body)])

    async def _altered(self, request: ftis_pb2.FetchRequest, peer: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]:
        async for chunk in self.peer.give(request, peer):
            if chunk.status == ftis_pb2.FetchChunk.GONE:
                chunk = ftis_pb2.FetchChunk(digest=chunk.digest, packet=self.rng.randbytes(300))
            yield chunk


class Row07Replayed(Honest):
    """The same again and again, what is hours old, and two announcements of one round."""

    row = 7
    rate = 4.0
    refusals = frozenset({"known", "replayed", "equivocation"})

    async def strike(self):
        entries = await self.held()
        author = self.author()
        round = self.round()
        hours_ago = int(time.time()) - 4 * 3600
        entries += [self.sound(author, round, slots) for slots in ((0,), (0, 1))]
        entries.append(self.sound(self.author(), 1, issued_at=hours_ago))
        await self.peer.tell(*entries)
        await self.peer.tell(*entries)


class Row07Aged(Honest):
    """What honest nodes have just announced, told as if it were about to expire; the referrer's age is not signed."""

    row = 7
    rate = 10.0

    async def strike(self):
        await self.peer.tell(*await self.held(age=599.9))


class Row14Escapes(Attack):
    """What a terminal or a browser would obey, wherever a peer's words may turn up."""

    row = 14
    LONG = 100
    WORDS = "\x1b[2J\x1b]0;owned\x07<script>alert(1)</script>\r\n2026-01-01 ERROR forged line\u202e"

    async def prepare(self):
        self.peer.agent = self.WORDS
        self.peer.serve = self._fail

    async def strike(self):
        for target in self.peer.targets:
            await self.peer.meet(target)
        await self.peer.tell(self.sound(self.author(), self.round()))

    async def _fail(self, request: ftis_pb2.FetchRequest, _: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]:
        """A handler's error is told to the caller in its own words."""
        if request.digests:
            raise RuntimeError(self.WORDS + "long" * self.LONG)
        yield ftis_pb2.FetchChunk()


class Row15Sybils(Crowd):
    """Eight peers and many authors more behind one address, all with sound groups: a majority by count."""

    row = 15
    rate = 2.0
    PEERS = 8

    async def strike(self):
        for peer in self.peers:
            entries = []
            for author in (peer.identity, self.author()):
                entries.append(self.sound(author, self.round(), range(3), peer=peer))
            await peer.tell(*entries)


class Row31Calls(Attack):
    """A thousand calls a second and node, of bytes that mean nothing; who is cut off dials again."""

    row = 31
    rate = 20.0
    CALLS = 50
    BYTES = 2000

    async def strike(self):
        garbage = ftis_pb2.Entry(announcement=self.rng.randbytes(self.BYTES))
        request = ftis_pb2.ExchangeRequest(entries=[garbage])
        for target in self.peer.targets:
            await self._try(self.peer.transport.connect(target.author, [target.address]))
            stub = self.peer.stub(target)
            calls = [stub.rpc_exchange(request, timeout=CALL_SECONDS) for _ in range(self.CALLS)]
            await asyncio.gather(*calls, return_exceptions=True)


class Row31Flood(Attack):
    """Announcements of identities that cost nothing, whole and by mention, as fast as they are taken."""

    row = 31
    rate = 20.0

    async def prepare(self):
        self.peer.serve = always(ftis_pb2.FetchChunk.GONE)

    async def strike(self):
        entries = [self.promise() for _ in range(32)]
        mentions = [ftis_pb2.Mention(id=self.rng.getrandbits(64), held=b"\xff") for _ in range(32)]
        await self.peer.tell(*entries, more=mentions)


class Row61Again(Honest):
    """What honest nodes announced, and their run file, again and again."""

    row = 61
    rate = 16.0

    async def strike(self):
        request = ftis_pb2.ExchangeRequest(wanted=self.known(), again=True)
        for target in self.peer.targets:
            stub = self.peer.stub(target)
            calls = (
                stub.rpc_exchange(request),
                stub.rpc_exchange(request),
                stub.rpc_handshake(greeting(None, [])),
            )
            await asyncio.gather(*calls, return_exceptions=True)
