"""Attacks by what is said in the DHT: row 38."""

import os
import time
from collections.abc import Sequence

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PContext, ServicerBase
from hivemind.proto import dht_pb2

from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.wire.dht_limits import DEPTHS
from ftis_node.swarm.wire.records import OwnerSigned, key_bytes, shard_of
from tests.hostile.wire import OnTheDht

LIFETIME = 200.0


def made_up(run_id: bytes, shard: str, count: int) -> list[DHTRecord]:
    """Sound records of peers that nobody is, each with an address in a network of its own.

    Below the first key half the identities have to be thrown away for each bit of the shard.
    """
    records = []
    while len(records) < count:
        owner = Identity(os.urandom(32))
        if shard_of(owner.author, len(shard)) == shard:
            place = f"/ip4/8.{len(records) >> 8 & 255}.{len(records) & 255}.7/tcp/1/p2p/{owner.peer_id}"
            records.append(OwnerSigned(owner, run_id).sign(shard, [place], LIFETIME))
    return records


def pack(records: Sequence[DHTRecord]) -> bytes:
    """As an answer carries them, however many they are."""
    packed = msgpack.packb([[one.subkey, one.value, one.expiration_time] for one in records])
    return packed


class DHTProtocol(ServicerBase):
    """Answers every look-up with made-up records and nodes. The name is that of the handlers.

    node: its 20-byte id in the DHT. answers: what it says it has, by key; other keys get `otherwise`.
    """

    NODES = 1000  # in an answer

    def __init__(self, node: bytes, answers: dict[bytes, bytes], otherwise: bytes = b""):
        self.node = node
        self.answers = answers
        self.otherwise = otherwise
        self.calls = 0
        self._nobody = [Identity(os.urandom(32)).author for _ in range(self.NODES)]

    def info(self) -> dht_pb2.NodeInfo:
        return dht_pb2.NodeInfo(node_id=self.node)

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        return dht_pb2.PingResponse(peer=self.info(), dht_time=time.time(), available=True)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """All is full, and there is more to say about it than was asked."""
        return dht_pb2.StoreResponse(peer=self.info(), store_ok=[False] * 1000)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        self.calls += 1
        results = [self._result(key) for key in request.keys]
        return dht_pb2.FindResponse(peer=self.info(), results=results)

    def _result(self, key: bytes) -> dht_pb2.FindResult:
        near = [key[:-4] + os.urandom(4) for _ in range(self.NODES)]
        return dht_pb2.FindResult(
            type=dht_pb2.FOUND_DICTIONARY,
            value=self.answers.get(key, self.otherwise),
            expiration_time=time.time() + 10 * 365 * 86400,
            nearest_node_ids=near,
            nearest_peer_ids=self._nobody,
        )


class Row38MadeUp(OnTheDht):
    """A node of the DHT right beside the run's first key, which answers look-ups with made-up records and nodes.

    With every strike it offers itself under another id; an honest node believes few of them.
    """

    row = 38
    rate = 2.0

    async def prepare(self):
        run_id = self.world.run.id
        records = made_up(run_id, "", 64)
        signer = OwnerSigned(self.peer.identity, run_id)
        self.nobody: set[str] = set()  # peer ids that it made up
        for record in records:
            owner = signer.owner(record)
            if owner is not None:
                self.nobody.add(peer_id(owner))
        answers = {self.key: pack(records)}
        for depth in DEPTHS:
            answers[key_bytes(run_id, "0" * depth)] = pack(records)
        self.node = DHTProtocol(beside(self.key, 2), answers, b"\xdd\xff\xff\xff\xff")
        await self.node.add_p2p_handlers(self.peer.transport.p2p)

    async def strike(self):
        self.node.node = self.key[:-1] + self.rng.randbytes(1)
        ping = dht_pb2.PingRequest(peer=self.node.info())
        for target in self.peer.targets:
            await self._try(self.peer.meet(target))
            await self._try(self.dht(target, ping))

    async def end(self):
        await self.node.remove_p2p_handlers(self.peer.transport.p2p)


def beside(key: bytes, bits: int) -> bytes:
    """The key with these bits of its last byte changed."""
    return key[:-1] + bytes([key[-1] ^ bits])


def near(run_id: bytes) -> bytes:
    """An id in the DHT that nobody honest will be nearer to the run's first key than."""
    return DHTID.to_bytes(DHTID.from_bytes(beside(key_bytes(run_id), 1)))
