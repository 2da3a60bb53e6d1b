"""What all attacks have in common."""

import asyncio
import contextlib
import itertools
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

from ftis_node.store.packets import milliseconds
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.announcement import PacketRef
from ftis_node.swarm.identity import Identity
from tests.hostile.peer import Hostile, hostile
from tests.hostile.world import Said, World


class Attack:
    """One way to do harm, struck again and again.

    row: of the table of what a node must survive. rate: strikes a second. refusals: reasons under which an honest node
    counts what it refuses of this attack, among its refused packets or its announcements. versions: of packets of the
    runs that it is for.
    """

    row: ClassVar[int]
    rate: ClassVar[float] = 1.0
    refusals: ClassVar[frozenset[str]] = frozenset()
    versions: ClassVar[tuple[int, ...]] = (1, 2)

    def __init__(self, peer: Hostile, seed: int = 0):
        self.peer = peer
        self.world: World = peer.world
        self.rng = random.Random(f"{self.row} {seed}")
        self.authors: list[Identity] = [peer.identity]
        self.strikes = 0
        self.errors: list[str] = []
        self._rounds = itertools.count(milliseconds())

    def author(self) -> Identity:
        """Another identity; they are free, and need no connection of their own."""
        self.authors.append(self.stranger())
        return self.authors[-1]

    def stranger(self) -> Identity:
        """An identity of which nothing is kept."""
        return Identity(self.rng.randbytes(32))

    def round(self) -> int:
        """A round that was not used yet."""
        return next(self._rounds)

    def promise(
        self,
        author: Identity | None = None,
        round: int | None = None,
        *,
        count: int = 3,
        size: int = 1000,
        peer: Hostile | None = None,
    ) -> ftis_pb2.Entry:
        """An announcement of packets of this size in bytes that nobody has; by default a stranger's, of a new round."""
        refs = [PacketRef(slot, self.rng.randbytes(32), size, 1) for slot in range(count)]
        return (peer or self.peer).promise(author or self.stranger(), round or self.round(), refs)

    def sound(
        self, author: Identity, round: int, slots: Sequence[int] = (0,), peer: Hostile | None = None, **options: Any
    ) -> ftis_pb2.Entry:
        """An announcement of packets as they must be, which a peer holds, by default the attack's own."""
        packets = [(slot, self.world.pack(author.author, round, slot)) for slot in slots]
        return (peer or self.peer).announcement(author, round, packets, **options)

    async def begin(self):
        await self._try(self.prepare())

    async def prepare(self):
        """Once, before the first strike; not part of the attack's time."""

    async def strike(self):
        """One blow."""
        raise NotImplementedError

    async def end(self):
        """Lets go of what the attack holds."""

    async def run(self, stop: asyncio.Event):
        """Strikes until told to stop. What a target refuses with an error is noted, and the next strike comes."""
        try:
            while not stop.is_set():
                await self._try(self.strike())
                self.strikes += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 1 / self.rate)
        finally:
            await self._try(self.end())

    async def _try(self, blow: object):
        try:
            await blow
        except Exception as error:  # whatever the target, or p2pd between the two, made of it
            self.errors = [*self.errors[-9:], repr(error)[:200]]


class Crowd(Attack):
    """By several peers behind one address: `peers`, the first of which is the attack's own."""

    PEERS: ClassVar[int]

    def __init__(self, peer: Hostile, seed: int = 0):
        super().__init__(peer, seed)
        self._stack = AsyncExitStack()
        self.peers = [peer]

    async def prepare(self):
        self.scratch = folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="crowd-")))
        addresses = [target.address for target in self.peer.targets]
        for number in range(1, self.PEERS):
            opening = hostile(folder / str(number), addresses, self.author(), self.world)
            self.peers.append(await self._stack.enter_async_context(opening))

    async def end(self):
        await self._stack.aclose()


class Lies(Attack):
    """Rounds of packets, each with its own lie, under sound announcements; by the peer itself once, then by fresh
    authors.

    An attack says what its packets are, or only which completions are in them.
    """

    AUTHORS: ClassVar[int] = 4  # a strike
    SLOTS: ClassVar[int] = 3  # a round

    def packets(self, author: bytes, round: int) -> Sequence[bytes]:
        """What is announced as slots 0, 1, … of the round."""
        made = []
        for slot in range(min(self.SLOTS, self.world.run.slots)):
            row = self.world.row(author, round, slot)
            made.append(self.world.pack(author, round, slot, self.completions(row, slot)))
        return made

    def completions(self, row: int, slot: int) -> Sequence[Said]:
        """The group of a slot, which answers the row."""
        raise NotImplementedError

    def alternate(self, right: Said, wrong: Said) -> list[Said]:
        """A group that teaches something."""
        return [right if index % 2 else wrong for index in range(self.world.run.group)]

    async def strike(self):
        entries = []
        for _ in range(self.AUTHORS):
            author = self.peer.identity if not self.strikes and not entries else self.author()
            round = self.round()
            packets = list(enumerate(self.packets(author.author, round)))
            entries.append(self.peer.announcement(author, round, packets))
        await self.peer.tell(*entries)


@contextlib.asynccontextmanager
async def striking(attacks: Sequence[Attack]) -> AsyncIterator[None]:
    """All of them, until the block ends."""
    await asyncio.gather(*(attack.begin() for attack in attacks))
    stop = asyncio.Event()
    running = [asyncio.create_task(attack.run(stop)) for attack in attacks]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*running)
