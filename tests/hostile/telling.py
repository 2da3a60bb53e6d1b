"""Attacks on what nodes tell one another and whom they ask: rows 67 to 70 and 75."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.certificates import Certificate, Removal, encode
from ftis_node.swarm.identity import SIGNATURE_BYTES
from tests.hostile.attack import Attack, Crowd
from tests.hostile.identity import Honest
from tests.hostile.peer import always, hostile

GONE = always(ftis_pb2.FetchChunk.GONE)
BUSY = always(ftis_pb2.FetchChunk.BUSY)


class Row67Records(Attack):
    """Certificates and removals by the run's founder and by targets, none of which they have signed."""

    row = 67
    rate = 5.0

    async def strike(self):
        now = int(time.time())
        for target in self.peer.targets:
            made = {
                "run_id": self.world.run.id,
                "issuer": target.author,
                "issued_at": now,
                "signature": self.rng.randbytes(SIGNATURE_BYTES),
            }
            records = []
            for _ in range(8):
                member = self.stranger().author
                records.append(encode(Removal(**made, member=member)))
                records.append(encode((Certificate(**made, member=member, expires=now + 9999),)))
            await self._try(self.peer.exchange(target, roster=records))


class Row68Deaf(Honest):
    """Answers no exchange in time, and says of each answer that it was lost: all is to be told again."""

    row = 68
    rate = 10.0
    HOURS = 3600.0

    async def prepare(self):
        self.peer.on_exchange = self._never

    async def strike(self):
        latest = self.strikes % 2 == 1
        for target in self.peer.targets:
            await self._try(self.peer.exchange(target, again=True, latest=latest, wanted=self.known()))

    async def _never(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> ftis_pb2.ExchangeResponse:
        await asyncio.sleep(self.HOURS)
        return ftis_pb2.ExchangeResponse()


class Row69Holders(Honest, Crowd):
    """Four keys that hold all packets of honest authors, as they say: one has none, one hangs up, two say "busy"."""

    row = 69
    rate = 4.0
    PEERS = 4

    async def prepare(self):
        await super().prepare()
        for number, peer in enumerate(self.peers):
            peer.serve = (GONE, self._broken, BUSY, BUSY)[number]

    async def strike(self):
        entries = await self.held()
        for peer in self.peers:
            await self._try(peer.tell(*entries))

    async def _broken(self, request: ftis_pb2.FetchRequest, _: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]:
        for _digest in request.digests[:0]:
            yield ftis_pb2.FetchChunk()


class Row70Busy(Row69Holders):
    """One key that holds all packets of honest authors, as it says, and is always busy."""

    row = 70
    PEERS = 1

    async def prepare(self):
        await super().prepare()
        self.peer.serve = BUSY


class Row75Keys(Crowd):
    """A fresh key that shakes hands and leaves, again and again: candidates without number."""

    row = 75
    rate = 2.0
    PEERS = 1

    async def strike(self):
        folder = Path(self.scratch) / str(self.strikes)
        addresses = [target.address for target in self.peer.targets]
        async with hostile(folder, addresses, self.stranger(), self.world):
            pass
