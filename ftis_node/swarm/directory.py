"""The DHT: hints about where a run's nodes may be dialled, left and looked up. Nothing hangs on it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Sequence
from contextlib import suppress

from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import get_dht_time

from ftis_node.swarm import dht_guard  # noqa: F401 - puts its checks in place
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.records import OwnerSigned, pack_addresses, record_key, unpack_addresses
from ftis_node.swarm.transport import Transport

RECORD_LIFETIME = 240.0
DHT_SECONDS = 10.0
LEAVE_SECONDS = 1.0
NEIGHBOURS = 3

logger = logging.getLogger(__name__)


class Directory:
    """This node in the DHT. Whatever goes wrong there is logged and goes no further."""

    def __init__(self, transport: Transport, identity: Identity, run_id: bytes) -> None:
        self._transport = transport
        self._identity = identity
        self._run_id = run_id
        self._dht: DHTNode | None = None

    async def join(self, peers: Collection[bytes]) -> None:
        """Takes part, and makes sure that some living peers are among its neighbours there: who started alone, or whose
        neighbours have all gone, would be in a DHT of its own otherwise."""
        try:
            if self._dht is None:
                validator = OwnerSigned(self._identity, self._run_id)
                creating = DHTNode.create(p2p=self._transport.p2p, record_validator=validator)
                self._dht = await asyncio.wait_for(creating, DHT_SECONDS)
            await asyncio.wait_for(self._meet(self._dht, peers), DHT_SECONDS)
        except Exception as error:  # hivemind raises whatever a bad peer makes it raise
            logger.warning("The DHT cannot be used at present, peers are found without it: %r", error)

    async def publish(self, addresses: Sequence[str]) -> None:
        """Leaves this node's addresses there, for four minutes."""
        if self._dht is not None:
            storing = self._dht.store(
                record_key(self._run_id),
                pack_addresses(addresses),
                get_dht_time() + RECORD_LIFETIME,
                subkey=self._identity.peer_id,
            )
            with suppress(Exception):
                await asyncio.wait_for(storing, DHT_SECONDS)

    async def find(self) -> list[list[str]]:
        """Addresses that nodes of the run left there, a list for each node. Who is met is decided by a handshake."""
        if self._dht is None:
            return []
        try:
            found = await asyncio.wait_for(self._dht.get(record_key(self._run_id), latest=True), DHT_SECONDS)
        except Exception as error:
            logger.debug("Nothing can be looked up in the DHT: %r", error)
            return []
        if found is None or not isinstance(found.value, dict):
            return []
        return [unpack_addresses(entry.value) for entry in found.value.values()]

    async def leave(self) -> None:
        """Takes part no longer; a p2pd that is gone costs a second."""
        dht, self._dht = self._dht, None
        if dht is not None:
            dht.is_alive = False
            if dht.cache_refresh_task is not None:
                dht.cache_refresh_task.cancel()
            with suppress(Exception):
                await asyncio.wait_for(dht.shutdown(), LEAVE_SECONDS)

    async def _meet(self, dht: DHTNode, peers: Collection[bytes]) -> None:
        some = random.sample(list(peers), min(NEIGHBOURS, len(peers)))
        met = await asyncio.gather(*(dht.protocol.call_ping(PeerID(peer), strict=False) for peer in some))
        if any(met):
            await dht.find_nearest_nodes([dht.node_id])
