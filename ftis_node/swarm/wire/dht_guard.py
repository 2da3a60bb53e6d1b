"""hivemind's node of the DHT, with checks: it trusts the contents of requests and answers.

hivemind keeps the routing table; this project keeps the records (`shelf`, `lookup`). hivemind's storage and caches stay
empty.
"""

from __future__ import annotations

import time
from typing import Any

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2

from ftis_node.swarm.identity import is_author, peer_id
from ftis_node.swarm.limits import Bounded, Budgets
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.dht_limits import NEAREST_MAX, REPLICAS
from ftis_node.swarm.wire.records import Shelf, pack_answer

MAX_KEYS = 16  # in a call that stores; a look-up has one
NODES_MAX = 1024
RECORD = ("keys", "subkeys", "values", "expiration_time", "in_cache")  # lists in a store call
NEW_IDS_A_SECOND = 1 / 600  # a node has a new DHT id after each start
NEW_IDS_AT_ONCE = 4.0
CALLS_A_SECOND = 10.0  # by one peer
CALLS_AT_ONCE = 100.0
BUCKET = 20  # hivemind's defaults for the routing table
DEPTH_MODULO = 5
CALL_SECONDS = 3.0


class GuardedDht(DHTProtocol):  # type: ignore[misc]
    """A node of the DHT. A peer has one id in it; otherwise it could fill the routing table with invented ones."""

    shelf: Shelf
    traffic: Traffic
    node_info = dht_pb2.NodeInfo()  # peers may call before hivemind sets it

    @classmethod
    async def begin(cls, p2p: Any, shelf: Shelf, traffic: Traffic) -> GuardedDht:
        """Answer calls of peers on this P2P of hivemind from now on.

        Args:
            traffic: budgets what answers may have, and counts them.
        """
        # `create` passes on nothing. By the class's name peers call it.
        kind: Any = type(DHTProtocol.__name__, (cls,), {"shelf": shelf, "traffic": traffic})
        begun: GuardedDht = await kind.create(
            p2p,
            DHTID.generate(),
            BUCKET,
            DEPTH_MODULO,
            REPLICAS,
            CALL_SECONDS,
        )
        return begun

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._calls = Budgets(time.monotonic, CALLS_A_SECOND, CALLS_AT_ONCE)
        self._new = Budgets(time.monotonic, NEW_IDS_A_SECOND, NEW_IDS_AT_ONCE)
        self._ids = Bounded[bytes, bytes](NODES_MAX)  # by peer

    def _believes(self, peer: bytes, node: bytes) -> bool:
        """Whether a peer may have this id: the one that it has, or, not too often, another that nobody else has. Then
        it is noted as the peer's."""
        if len(node) != DHTID.HASH_NBYTES:
            return False
        if self._ids.get(peer) == node:
            return True
        if not self._new.take(peer):
            return False
        caller = PeerID(peer)
        owner = self.routing_table.get(node_id=DHTID.from_bytes(node), default=caller)
        if owner != caller:
            return False
        self._ids[peer] = node
        return True

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """hivemind's; but a new id of a peer replaces its old one, and when the table is full the oldest that waits for
        room in the same bucket, if any does."""
        table = self.routing_table
        old = table.get(peer_id=peer_id, default=node_id)
        if node_id is not None and old != node_id:
            del table[old]
        await super().update_routing_table(node_id, peer_id, responded)
        if len(table.uid_to_peer_id) > NODES_MAX and node_id in table:
            bucket = table.buckets[table.get_bucket_index(node_id)]
            del table[next(iter(bucket.replacement_nodes), node_id)]

    # --- calls of peers -----------------------------------------------------------------------------------------------

    def _check(self, request: Any, context: P2PContext, most: int) -> bytes:
        """Return the caller. Raise ValueError if a call has more than so many keys or malformed ones."""
        caller = self._check_caller(request, context)
        if len(request.keys) > most or any(len(key) != DHTID.HASH_NBYTES for key in request.keys):
            raise ValueError(f"this DHT call may have at most {most} keys of {DHTID.HASH_NBYTES} bytes")
        return caller

    def _check_caller(self, request: Any, context: P2PContext) -> bytes:
        """Return the caller. Raise ValueError if it calls too often; remove a DHT id that is not credible."""
        caller: bytes = context.remote_id.to_bytes()
        if not self._calls.take(caller):
            raise ValueError(f"a peer has {CALLS_A_SECOND:g} DHT calls a second")
        if request.peer.node_id and not self._believes(caller, request.peer.node_id):
            request.ClearField("peer")
        return caller

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Answer with this node's id, and note the caller's."""
        if context.handle_name.endswith("rpc_ping"):  # not hivemind's, within another call
            self._check_caller(request, context)
        return await super().rpc_ping(request, context)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Answer with the nearest nodes, which hivemind finds, and the records that this node keeps under the key; not
        if the caller's questions have drawn too much."""
        room = self.traffic.room(context.remote_id.to_bytes())
        caller = self._check(request, context, int(room > 0))
        response: dht_pb2.FindResponse = await super().rpc_find(request, context)
        for key, result in zip(request.keys, response.results, strict=True):
            records = self.shelf.records(key)
            if records:
                result.type = dht_pb2.FOUND_DICTIONARY
                result.value = pack_answer(records)
        self.traffic.answer(caller, response.ByteSize())
        return response

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Keep only the caller's own record: keys are free, and one connection can carry any number of records.

        `store_ok` says for each record whether its key had room.
        """
        caller = self._check(request, context, MAX_KEYS)
        own = msgpack.packb(peer_id(caller))
        fields = [getattr(request, name) for name in RECORD]
        if len({*map(len, fields)}) > 1:
            raise ValueError("a record in a DHT call lacks something")
        met = dht_pb2.StoreRequest()
        if request.HasField("peer"):
            met.peer.CopyFrom(request.peer)
        response: dht_pb2.StoreResponse = await super().rpc_store(met, context)
        for key, subkey, value, expiration, _ in zip(*fields, strict=True):
            kept = subkey == own and self.shelf.keep(DHTRecord(key, subkey, value, expiration), caller)
            response.store_ok.append(kept)
        return response

    # --- calls to peers -----------------------------------------------------------------------------------------------

    async def call_ping(self, peer: PeerID, **_: Any) -> DHTID | None:
        """Return a peer's id in the DHT; None without an answer, or if the id is not credible. hivemind calls this."""
        response = await self._call("rpc_ping", peer, dht_pb2.PingRequest(peer=self.node_info))
        if response is None or not response.peer.node_id:
            return None
        return DHTID.from_bytes(response.peer.node_id)

    async def look_up(self, peer: bytes, key: bytes) -> tuple[bytes, list[tuple[DHTID, bytes]]] | None:
        """Look up a key at one peer; None without an answer.

        Returns the unchecked bytes that it has under the key, and the nodes that it names as nearest.
        """
        response = await self._call("rpc_find", PeerID(peer), dht_pb2.FindRequest(keys=[key], peer=self.node_info))
        if response is None or len(response.results) != 1:
            return None
        (result,) = response.results
        named = zip(result.nearest_node_ids[:NEAREST_MAX], result.nearest_peer_ids[:NEAREST_MAX], strict=False)
        nodes = [
            (DHTID.from_bytes(node), one) for node, one in named if len(node) == DHTID.HASH_NBYTES and is_author(one)
        ]
        return result.value, nodes

    async def leave_record(self, peer: bytes, record: DHTRecord) -> bool | None:
        """Store this node's record at a peer. Return whether the key has room there; None without an answer."""
        request = dht_pb2.StoreRequest(
            keys=[record.key],
            subkeys=[record.subkey],
            values=[record.value],
            expiration_time=[record.expiration_time],
            in_cache=[False],
            peer=self.node_info,
        )
        response = await self._call("rpc_store", PeerID(peer), request)
        if response is None:
            return None
        return list(response.store_ok[:1]) == [True]

    async def _call(self, name: str, peer: PeerID, request: Any) -> Any:
        """A peer's answer, without an id that is not credible; None without an answer. The routing table follows."""
        try:
            response = await getattr(self.get_stub(peer), name)(request, timeout=self.wait_timeout)
        except Exception:  # hivemind raises anything from a remote handler's repr to a socket error
            await self.update_routing_table(self.routing_table.get(peer_id=peer), peer, responded=False)
            return None
        if self._believes(peer.to_bytes(), response.peer.node_id):
            await self.update_routing_table(DHTID.from_bytes(response.peer.node_id), peer, responded=True)
        else:
            response.ClearField("peer")
        return response
