"""Checks on hivemind's DHT, which trusts the contents of requests and answers.

The import of this module installs the checks for every `DHTProtocol` of the process. hivemind keeps the routing table;
this project keeps the records (`shelf`, `lookup`). hivemind's storage and caches stay empty.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import dht_pb2

from ftis_node.swarm.bounded import put
from ftis_node.swarm.budgets import Budgets
from ftis_node.swarm.identity import is_author, peer_id
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.records import pack_answer
from ftis_node.swarm.wire.shards import NEAREST_MAX
from ftis_node.swarm.wire.shelf import Shelf

MAX_KEYS = 16  # in a call that stores; a look-up has one
NODES_MAX = 1024
RECORD = ("keys", "subkeys", "values", "expiration_time", "in_cache")  # lists in a store call
NEW_IDS_A_SECOND, NEW_IDS_AT_ONCE = 1 / 600, 4.0  # a node has a new DHT id after each start
CALLS_A_SECOND, CALLS_AT_ONCE = 10.0, 100.0  # by one peer


class _Callers:
    """The call budget and the DHT id of each peer. A peer has one id; otherwise it could fill the routing table with
    invented ones."""

    def __init__(self) -> None:
        self.calls = Budgets(time.monotonic, CALLS_A_SECOND, CALLS_AT_ONCE)
        self._ids: dict[bytes, bytes] = {}
        self._new = Budgets(time.monotonic, NEW_IDS_A_SECOND, NEW_IDS_AT_ONCE)

    def believes(self, peer: bytes, node: bytes) -> bool:
        if len(node) != DHTID.HASH_NBYTES:
            return False
        if self._ids.get(peer) != node:
            if not self._new.take(peer):
                return False
            put(self._ids, peer, node, NODES_MAX)
        return True


_ping, _store, _find = DHTProtocol.rpc_ping, DHTProtocol.rpc_store, DHTProtocol.rpc_find


def _callers(dht: DHTProtocol) -> _Callers:
    callers: _Callers = dht.__dict__.setdefault("callers", _Callers())
    return callers


# --- calls of peers ---------------------------------------------------------------------------------------------------


def _check(dht: DHTProtocol, request: Any, context: P2PContext, most: int) -> None:
    """Raise ValueError if a call has more than so many keys or malformed ones."""
    _check_caller(dht, request, context)
    if len(request.keys) > most or any(len(key) != DHTID.HASH_NBYTES for key in request.keys):
        raise ValueError(f"this DHT call may have at most {most} keys of {DHTID.HASH_NBYTES} bytes")


def _check_caller(dht: DHTProtocol, request: Any, context: P2PContext) -> None:
    """Raise ValueError if the peer calls too often; remove a DHT id that is not credible."""
    callers = _callers(dht)
    peer = context.remote_id.to_bytes()
    if not callers.calls.take(peer):
        raise ValueError(f"a peer has {CALLS_A_SECOND:g} DHT calls a second")
    if request.peer.node_id and not callers.believes(peer, request.peer.node_id):
        request.ClearField("peer")


@functools.wraps(_ping)
async def _rpc_ping(self: DHTProtocol, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
    _check_caller(self, request, context)
    return await _ping(self, request, context)


@functools.wraps(_find)
async def _rpc_find(self: DHTProtocol, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
    """Answer with the nearest nodes, which hivemind finds, and the records that this node keeps under the key; not if
    the caller's questions have drawn too much."""
    traffic, caller = self.__dict__.setdefault("traffic", Traffic()), context.remote_id.to_bytes()
    _check(self, request, context, 1 if traffic.room(caller) > 0 else 0)
    response: dht_pb2.FindResponse = await _find(self, request, context)
    shelf: Shelf | None = self.__dict__.get("shelf")  # None until `swarm.wire.directory` has set one
    for key, result in zip(request.keys, response.results, strict=True):
        if shelf is not None and (records := shelf.records(key)):
            result.type, result.value = dht_pb2.FOUND_DICTIONARY, pack_answer(records)
    traffic.answer(caller, response.ByteSize())
    return response


@functools.wraps(_store)
async def _rpc_store(self: DHTProtocol, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
    """Keep only the caller's own record: keys are free, and one connection can carry any number of records.

    `store_ok` says for each record whether its key had room.
    """
    _check(self, request, context, MAX_KEYS)
    caller = context.remote_id.to_bytes()
    own = msgpack.packb(peer_id(caller))
    fields = [getattr(request, name) for name in RECORD]
    if len({*map(len, fields)}) > 1:
        raise ValueError("a record in a DHT call lacks something")
    met = dht_pb2.StoreRequest(peer=request.peer) if request.HasField("peer") else dht_pb2.StoreRequest()
    response: dht_pb2.StoreResponse = await _store(self, met, context)
    shelf: Shelf | None = self.__dict__.get("shelf")  # None until `swarm.wire.directory` has set one
    for key, subkey, value, expiration, _ in zip(*fields, strict=True):
        kept = shelf is not None and subkey == own and shelf.keep(DHTRecord(key, subkey, value, expiration), caller)
        response.store_ok.append(kept)
    return response


# --- calls to peers ---------------------------------------------------------------------------------------------------


class _Asking:
    """A stub for calls to a peer that removes what is not credible from its answers before hivemind reads them."""

    def __init__(self, dht: DHTProtocol, peer: PeerID) -> None:
        self._dht = dht
        self._peer = peer.to_bytes()
        self._stub = ServicerBase.get_stub.__func__(DHTProtocol, dht.p2p, peer)

    async def rpc_ping(self, request: dht_pb2.PingRequest, timeout: float | None = None) -> dht_pb2.PingResponse:
        return self._known(await self._stub.rpc_ping(request, timeout=timeout))

    async def rpc_store(self, request: dht_pb2.StoreRequest, timeout: float | None = None) -> dht_pb2.StoreResponse:
        response = self._known(await self._stub.rpc_store(request, timeout=timeout))
        del response.store_ok[len(request.keys) :]
        return response

    async def rpc_find(self, request: dht_pb2.FindRequest, timeout: float | None = None) -> dht_pb2.FindResponse:
        response = self._known(await self._stub.rpc_find(request, timeout=timeout))
        if len(response.results) != len(request.keys):
            raise ValueError("a DHT answer has another number of results than the call had keys")
        for result in response.results:
            ids, peers = list(result.nearest_node_ids[:NEAREST_MAX]), list(result.nearest_peer_ids[:NEAREST_MAX])
            del result.nearest_node_ids[:], result.nearest_peer_ids[:]
            for node, peer in zip(ids, peers, strict=False):
                if len(node) == DHTID.HASH_NBYTES and is_author(peer):
                    result.nearest_node_ids.append(node)
                    result.nearest_peer_ids.append(peer)
        return response

    def _known(self, response: Any) -> Any:
        if response.peer.node_id and not _callers(self._dht).believes(self._peer, response.peer.node_id):
            response.ClearField("peer")
        return response


def _get_stub(self: DHTProtocol, peer: PeerID) -> _Asking:
    return _Asking(self, peer)


async def ask(dht: DHTProtocol, peer: bytes, key: bytes) -> tuple[bytes, list[tuple[DHTID, bytes]]] | None:
    """Look up a key at one peer; None without an answer.

    Returns the unchecked bytes that it has under the key, and the nodes that it names as nearest.
    """
    request = dht_pb2.FindRequest(keys=[key], peer=dht.node_info)
    response = await _answer(dht, peer, _Asking(dht, PeerID(peer)).rpc_find(request, timeout=dht.wait_timeout))
    if response is None:
        return None
    result = response.results[0]
    ids = map(DHTID.from_bytes, result.nearest_node_ids)
    return result.value, list(zip(ids, result.nearest_peer_ids, strict=True))


async def leave_record(dht: DHTProtocol, peer: bytes, record: DHTRecord) -> bool | None:
    """Store this node's record at a peer. Return whether the key has room there; None without an answer."""
    request = dht_pb2.StoreRequest(
        keys=[record.key],
        subkeys=[record.subkey],
        values=[record.value],
        expiration_time=[record.expiration_time],
        in_cache=[False],
        peer=dht.node_info,
    )
    response = await _answer(dht, peer, _Asking(dht, PeerID(peer)).rpc_store(request, timeout=dht.wait_timeout))
    return None if response is None else list(response.store_ok) == [True]


async def _answer(dht: DHTProtocol, peer: bytes, calling: Any) -> Any:
    """Await an answer and update the routing table; None without an answer."""
    try:
        response = await calling
    except Exception:  # hivemind raises anything from a remote handler's repr to a socket error
        gone = dht.routing_table.get(peer_id=PeerID(peer))
        await dht.update_routing_table(gone, PeerID(peer), responded=False)
        return None
    if response.peer.node_id:
        await dht.update_routing_table(DHTID.from_bytes(response.peer.node_id), PeerID(peer), responded=True)
    return response


DHTProtocol.rpc_ping, DHTProtocol.rpc_store, DHTProtocol.rpc_find = _rpc_ping, _rpc_store, _rpc_find
DHTProtocol.get_stub = _get_stub
