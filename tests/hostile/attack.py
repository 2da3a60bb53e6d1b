"""What all attacks have in common."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import ClassVar

from ftis_node.store.used_rounds import milliseconds
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.identity import Identity
from tests.hostile.peer import Hostile, hostile
from tests.hostile.world import World


class Attack:
    """One way to do harm, struck again and again.

    row: of the table of what a node must survive. rate: strikes a second. refusals: reasons under which an honest node
    counts what it refuses of this attack, among its refused packets or its announcements.
    """

    row: ClassVar[int]
    rate: ClassVar[float] = 1.0
    refusals: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, peer: Hostile, seed: int = 0) -> None:
        self.peer = peer
        self.world: World = peer.world
        self.rng = random.Random(f"{self.row} {seed}")
        self.authors: list[Identity] = [peer.identity]
        self.strikes = 0
        self.errors: list[str] = []
        self._rounds = itertools.count(milliseconds())

    def author(self) -> Identity:
        """Another identity; they are free, and need no connection of their own."""
        self.authors.append(Identity(self.rng.randbytes(32)))
        return self.authors[-1]

    def round(self) -> int:
        """A round that was not used yet."""
        return next(self._rounds)

    async def begin(self) -> None:
        await self._try(self.prepare())

    async def prepare(self) -> None:
        """Once, before the first strike; not part of the attack's time."""

    async def strike(self) -> None:
        """One blow."""
        raise NotImplementedError

    async def end(self) -> None:
        """Lets go of what the attack holds."""

    async def run(self, stop: asyncio.Event) -> None:
        """Strikes until told to stop. What a target refuses with an error is noted, and the next strike comes."""
        try:
            while not stop.is_set():
                await self._try(self.strike())
                self.strikes += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 1 / self.rate)
        finally:
            await self._try(self.end())

    async def _try(self, blow: object) -> None:
        try:
            await blow  # type: ignore[misc]
        except Exception as error:  # whatever the target, or p2pd between the two, made of it
            self.errors = [*self.errors[-9:], repr(error)[:200]]


class Crowd(Attack):
    """By several peers behind one address: `peers`, the first of which is the attack's own."""

    PEERS: ClassVar[int]

    def __init__(self, peer: Hostile, seed: int = 0) -> None:
        super().__init__(peer, seed)
        self._stack = AsyncExitStack()
        self.peers = [peer]

    async def prepare(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="crowd-")))
        addresses = [target.address for target in self.peer.targets]
        for number in range(1, self.PEERS):
            opening = hostile(folder / str(number), addresses, self.author(), self.world)
            self.peers.append(await self._stack.enter_async_context(opening))

    async def end(self) -> None:
        await self._stack.aclose()


class Lies(Attack):
    """Rounds of packets, each with its own lie, under sound announcements; by the peer itself once, then by fresh
    authors."""

    def packets(self, author: bytes, round: int) -> Sequence[bytes]:
        """What is announced as slots 0, 1, … of the round."""
        raise NotImplementedError

    def authors_a_strike(self) -> int:
        return 4

    async def strike(self) -> None:
        entries: list[ftis_pb2.Entry] = []
        for _ in range(self.authors_a_strike()):
            author = self.peer.identity if not self.strikes and not entries else self.author()
            round = self.round()
            packets = list(enumerate(self.packets(author.author, round)))
            entries.append(self.peer.announcement(author, round, packets))
        await self.peer.tell(*entries)
