"""What hivemind's DHT lets strangers do, and this node does not: its handlers believe what a request says.

Importing this module puts the checks in place, once, for every `DHTProtocol` of the process.
"""

from __future__ import annotations

import functools
import time
from itertools import compress
from typing import Any

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext
from hivemind.proto import dht_pb2

from ftis_node.swarm.bounded import make_room
from ftis_node.swarm.budgets import Budgets
from ftis_node.swarm.identity import peer_id

MAX_KEYS = 16
NODES_MAX = 1024
RECORD = ("keys", "subkeys", "values", "expiration_time", "in_cache")  # each a list in a call to store
NEW_IDS_A_SECOND, NEW_IDS_AT_ONCE = 1 / 600, 4.0  # a node that is started anew has a new id in the DHT
CALLS_A_SECOND, CALLS_AT_ONCE = 10.0, 100.0  # of one peer


class _Callers:
    """How often each peer may call, and which id in the DHT it has: one, or it would fill the routing table with those
    that it makes up."""

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
            make_room(self._ids, peer, NODES_MAX)
            self._ids[peer] = node
        return True


_ping, _store, _find = DHTProtocol.rpc_ping, DHTProtocol.rpc_store, DHTProtocol.rpc_find


def _check(dht: DHTProtocol, request: Any, context: P2PContext) -> None:
    """Raises ValueError for more keys than anybody needs."""
    _check_caller(dht, request, context)
    if len(request.keys) > MAX_KEYS or any(len(key) != DHTID.HASH_NBYTES for key in request.keys):
        raise ValueError(f"a DHT call has at most {MAX_KEYS} keys of {DHTID.HASH_NBYTES} bytes")


def _check_caller(dht: DHTProtocol, request: Any, context: P2PContext) -> None:
    """Raises ValueError if it calls too often; an id that is not believed is left out."""
    if "callers" not in dht.__dict__:
        dht.callers = _Callers()
    callers: _Callers = dht.callers
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
    _check(self, request, context)
    return await _find(self, request, context)


@functools.wraps(_store)
async def _rpc_store(self: DHTProtocol, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
    """Only a caller's own record is stored: keys are free, and through one connection come as many as one likes."""
    _check(self, request, context)
    own = msgpack.packb(peer_id(context.remote_id.to_bytes()))
    fields = {name: getattr(request, name) for name in RECORD}
    if len({*map(len, fields.values())}) > 1:
        raise ValueError("a record in a DHT call lacks something")
    kept = [subkey == own for subkey in request.subkeys]
    fewer = dht_pb2.StoreRequest(**{name: list(compress(column, kept)) for name, column in fields.items()})
    if request.HasField("peer"):
        fewer.peer.CopyFrom(request.peer)
    response = await _store(self, fewer, context)
    stored = iter(list(response.store_ok))
    del response.store_ok[:]
    response.store_ok.extend(next(stored) if own_one else False for own_one in kept)
    return response


DHTProtocol.rpc_ping, DHTProtocol.rpc_store, DHTProtocol.rpc_find = _rpc_ping, _rpc_store, _rpc_find
