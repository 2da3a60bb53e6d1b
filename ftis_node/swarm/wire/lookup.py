"""One walk through the DHT towards a key: a bounded number of calls; each record comes with the peer that sent it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hivemind.dht.routing import DHTID

from ftis_node.swarm.addresses import peer_at
from ftis_node.swarm.wire.dht_guard import GuardedDht
from ftis_node.swarm.wire.dht_limits import AT_ONCE, OWN_NODES
from ftis_node.swarm.wire.records import OwnerSigned, unpack_answer
from ftis_node.swarm.wire.transport import Answer

NAMED_NODES = 12  # calls to nodes that other nodes named
NAMED_BY_ONE = 4  # used from each answer


async def walk(dht: GuardedDht, key: bytes, validator: OwnerSigned, take: Callable[[Answer], object]) -> None:
    """Ask the nodes nearest to a key, nearest first, at most 24.

    The nodes of the own routing table come first, so that a peer cannot displace them with nodes that do not exist.

    Args:
        take: takes each answer; what is true ends the walk.
    """
    target = DHTID.from_bytes(key)
    own = dht.routing_table.get_nearest_neighbors(target, OWN_NODES, exclude=dht.node_id)
    nodes = {node: peer.to_bytes() for node, peer in own}
    named: dict[DHTID, bytes] = {}
    asked = {dht.p2p.peer_id.to_bytes()}
    left = OWN_NODES + NAMED_NODES
    while left > 0 and (source := nodes or named):
        nearest = sorted(source, key=target.xor_distance)[: min(AT_ONCE, left)]
        batch = [(node, peer) for node in nearest if (peer := source.pop(node)) not in asked]
        asked.update(peer for _, peer in batch)
        left -= len(batch)
        enough = False
        for found in await asyncio.gather(*(_ask(dht, node, peer, key, validator) for node, peer in batch)):
            if found is not None:
                answer, others = found
                enough |= bool(take(answer))
                fresh = [(node, peer) for node, peer in others if peer not in asked]
                named.update(sorted(fresh, key=lambda one: target.xor_distance(one[0]))[:NAMED_BY_ONE])
        if enough:
            return


async def _ask(
    dht: GuardedDht, node: DHTID, peer: bytes, key: bytes, validator: OwnerSigned
) -> tuple[Answer, list[tuple[DHTID, bytes]]] | None:
    found = await dht.look_up(peer, key)
    if found is None:
        return None
    value, others = found
    # Sixty-four signatures take some 10 ms, so check them outside the event loop.
    addresses = await asyncio.to_thread(check, key, value, validator) if value else {}
    return Answer(node, peer, addresses), others


def check(key: bytes, value: bytes, validator: OwnerSigned) -> dict[bytes, list[str]]:
    """The owners' own addresses in the validly signed records of an answer, by owner."""
    found: dict[bytes, list[str]] = {}
    for record in unpack_answer(key, value):
        owner = validator.owner(record)
        if owner is not None:
            own = [text for text in validator.addresses(record) if peer_at(text) == owner]  # and remembers it parsed
            found |= {owner: own} if own else {}
    return found
