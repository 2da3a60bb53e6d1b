"""Attacks on what carries the packets: rows 2, 3, 16 and 17 (holders)."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgpack
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2

from ftis_node.packet import MAX_PACKET_BYTES
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.wire.records import OwnerSigned, key_bytes, pack_addresses
from tests.hostile.attack import Attack
from tests.hostile.identity import Honest
from tests.hostile.peer import CALL_SECONDS, Target
from tests.support.swarm import store_request

EXT_TUPLE = 0x40


CALLS = {
    dht_pb2.PingRequest: ("rpc_ping", dht_pb2.PingResponse),
    dht_pb2.FindRequest: ("rpc_find", dht_pb2.FindResponse),
    dht_pb2.StoreRequest: ("rpc_store", dht_pb2.StoreResponse),
}


class OnTheDht(Attack):
    """An attack by calls of hivemind's DHT."""

    async def dht(self, target: Target, request: Any) -> Any:
        """The answer to a request."""
        call, answer = CALLS[type(request)]
        calling = self.peer.transport.p2p.call_protobuf_handler(
            PeerID(target.author), f"DHTProtocol.{call}", request, answer
        )
        return await asyncio.wait_for(calling, CALL_SECONDS)

    async def store(self, target: Target, *records: tuple[bytes, bytes, bytes, float]) -> list[bool]:
        """Stores (key, subkey, value, expiration)."""
        answer = await self.dht(target, store_request(*records))
        return list(answer.store_ok)

    @property
    def key(self) -> bytes:
        """Where the run's nodes leave their addresses."""
        return key_bytes(self.world.run.id)


class Row02ExtBomb(OnTheDht):
    """Values that nest in the DHT's serialiser, and records that are none."""

    row = 2
    rate = 2.0

    async def strike(self):
        bomb = b"\x90"
        for _ in range(200):
            bomb = msgpack.packb(msgpack.ExtType(EXT_TUPLE, b"\x91" + bomb))
        soon = time.time() + 100
        for target in self.peer.targets:
            for record in (
                (self.key, b"", bomb, soon),
                (self.key, bomb, b"", soon),
                (b"\xff" * 1000, b"", self.rng.randbytes(1000), soon),
                (self.key, msgpack.packb("x"), self.rng.randbytes(100), float("nan")),
            ):
                await self._try(self.store(target, record))


class Row02DhtCalls(OnTheDht):
    """Calls with ids that are none, with more than an answer has room for, and values that are large once decoded."""

    row = 2
    rate = 1.0
    KEYS = 100_000
    ELEMENTS = 1 << 20

    async def strike(self):
        odd = dht_pb2.NodeInfo(node_id=self.rng.randbytes(100))
        swelling = b"\xdd" + self.ELEMENTS.to_bytes(4, "big") + b"\x80" * self.ELEMENTS
        requests = [
            dht_pb2.PingRequest(peer=odd, validate=True),
            dht_pb2.FindRequest(keys=[b"\xff" * 1000], peer=odd),
            dht_pb2.FindRequest(keys=[b""] * self.KEYS),
            dht_pb2.StoreRequest(keys=[self.key] * 3, peer=odd),
            store_request((self.key, b"", swelling, time.time() + 100)),
        ]
        for _ in range(20):
            another = dht_pb2.NodeInfo(node_id=self.rng.randbytes(20))
            requests.append(dht_pb2.PingRequest(peer=another))
        for target in self.peer.targets:
            for request in requests:
                await self._try(self.dht(target, request))


class Row03Oversize(Attack):
    """Messages that are large, that say they are, or that become so when they are read."""

    row = 3
    rate = 1.0
    TINY = 200_000
    refusals = frozenset({"over the limits"})

    async def prepare(self):
        self.peer.serve = self._endless

    async def strike(self):
        many = ftis_pb2.ExchangeRequest(mentions=[ftis_pb2.Mention()] * self.TINY)
        large = ftis_pb2.Entry(announcement=bytes(MAX_PACKET_BYTES - 100))
        big = ftis_pb2.ExchangeRequest(entries=[large])
        for target in self.peer.targets:
            for request in (many, big):
                await self._try(self.peer.stub(target).rpc_exchange(request, timeout=CALL_SECONDS))
            await self._try(self._lie_of_length(target))
        for size in (MAX_PACKET_BYTES, 1000):  # more than the run has room for, and what `_endless` will exceed
            await self.peer.tell(self.promise(self.author(), size=size))

    async def _lie_of_length(self, target: Target):
        """Four gigabytes are on their way, and then more than a message may have."""
        for length in (4 << 30, 2 * MAX_PACKET_BYTES):
            _, writer = await self.peer.open_stream(target)
            try:
                head = P2P.MESSAGE_MARKER + length.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)
                writer.write(head + bytes(1 << 20))
                await asyncio.wait_for(writer.drain(), 2.0)
            finally:
                writer.close()

    async def _endless(self, request: ftis_pb2.FetchRequest, _: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]:
        """More than was signed, and more than a message may have."""
        for digest in request.digests:
            yield ftis_pb2.FetchChunk(digest=digest, packet=bytes(2 * MAX_PACKET_BYTES))


class Row16Eclipse(OnTheDht):
    """Addresses that lead nowhere in every answer, and DHT records that are immortal, somebody else's or too many."""

    row = 16
    rate = 4.0

    async def prepare(self):
        self.nobody: set[str] = set()  # peer ids that it made up
        self.peer.say_hello = self._hello
        self.peer.say = self._answer

    async def strike(self):
        for target in self.peer.targets:
            await self.peer.meet(target)
            await self.peer.exchange(target)
            nowhere = pack_addresses(self._nowhere(8))
            soon = time.time() + 200
            stored = await self.store(
                target,
                (self.key, msgpack.packb(peer_id(target.author)), nowhere + bytes(64), soon),
                self._signed(nowhere, soon + 10 * 365 * 86400),
                self._signed(bytes(100_000), soon),
                (self.rng.randbytes(20), msgpack.packb(self.author().peer_id), nowhere + bytes(64), soon),
            )
            if any(stored):
                self.errors = [*self.errors, f"the DHT took records that it must not: {stored}"]
            await self.store(target, *(self._signed(nowhere, soon) for _ in range(8)))

    def _signed(self, value: bytes, expiration: float) -> tuple[bytes, bytes, bytes, float]:
        owner = self.stranger()
        record = DHTRecord(self.key, msgpack.packb(owner.peer_id), value, expiration)
        return record.key, record.subkey, OwnerSigned(owner, self.world.run.id).sign_value(record), expiration

    def _nowhere(self, count: int) -> list[str]:
        """Peers that nobody is, at ports of this machine where nobody listens."""
        ids = [self.stranger().peer_id for _ in range(count)]
        self.nobody.update(ids)
        return [f"/ip4/127.{self.rng.randrange(1, 255)}.0.1/tcp/1/p2p/{id}" for id in ids]

    def _hello(self, request: ftis_pb2.Handshake) -> ftis_pb2.Handshake:
        hello = self.peer.hello(request)
        hello.peers.extend(self._nowhere(32))
        hello.addresses.extend(self._nowhere(8))
        return hello

    def _answer(self, request: ftis_pb2.ExchangeRequest) -> ftis_pb2.ExchangeResponse:
        return ftis_pb2.ExchangeResponse(peers=self._nowhere(4))


class Row17Holders(Honest):
    """ "I hold it", said of everything; who asks hears "busy", waits, or gets nothing to the end."""

    row = 17
    rate = 2.0
    SLOW = 7.0  # seconds a chunk, under what the other side waits

    async def prepare(self):
        self.peer.serve = self._crawl

    async def strike(self):
        entries = await self.held(16)
        entries += [self.promise(self.author()) for _ in range(16)]
        await self.peer.tell(*entries)

    async def _crawl(self, request: ftis_pb2.FetchRequest, _: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]:
        for digest in request.digests:
            await asyncio.sleep(self.SLOW)
            yield ftis_pb2.FetchChunk(digest=digest, status=ftis_pb2.FetchChunk.BUSY)
