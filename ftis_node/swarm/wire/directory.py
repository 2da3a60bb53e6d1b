"""The DHT: publishes and looks up hints about the addresses of a run's nodes. A node works without it.

Records of a run lie under its first key while it has room (64), else under its shards: see docs/network.md.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from ftis_node.swarm.wire import dht_limits
from ftis_node.swarm.wire.dht_guard import GuardedDht
from ftis_node.swarm.wire.dht_limits import DEPTHS, MAX_RECORDS, OWN_NODES, REPLICAS
from ftis_node.swarm.wire.records import OwnerSigned, Shelf, key_bytes, shard_of, unpack_answer
from ftis_node.swarm.wire.transport import Answer, DirectoryUser, PeerDirectory

DHT_SECONDS = 10.0
LEAVE_SECONDS = 1.0
NEIGHBOURS = 3
NAMED_NODES = 12  # calls of a look-up to nodes that other nodes named
NAMED_BY_ONE = 4  # used from each answer

logger = logging.getLogger(__name__)


class Directory(PeerDirectory):
    """This node in the DHT. Errors there are logged and not raised."""

    def __init__(self, p2p: Callable[[], Any], user: DirectoryUser) -> None:
        """
        Args:
            p2p: returns the present P2P of hivemind; a restart replaces it.
        """
        self._p2p = p2p
        self._user = user
        self._author = user.identity.author
        self._validator = OwnerSigned(user.identity, user.run_id)
        self._shelf = Shelf(self._validator, user.known)
        self._full = set[int]()  # depths at which this node's key had no room at the last publication
        self._outside: Collection[bytes] = ()
        self._dht: GuardedDht | None = None

    async def join(self, peers: Collection[bytes], outside: Collection[bytes] = ()) -> None:
        """Join the DHT and make some live peers its neighbours there. Otherwise a node that started alone, or lost all
        its neighbours, would be in a DHT of its own.

        Args:
            outside: peers of other runs that the owner named. They keep this node's record too, so that a node that
                knows only them finds it.
        """
        self._outside = outside
        try:
            if self._dht is None:
                self._dht = await asyncio.wait_for(
                    GuardedDht.begin(self._p2p(), self._shelf, self._user.traffic), DHT_SECONDS
                )
            await asyncio.wait_for(self._meet(self._dht, peers), DHT_SECONDS)
        except Exception as error:  # hivemind raises whatever a bad peer makes it raise
            logger.warning("The DHT cannot be used at present, peers are found without it: %r", error)

    async def publish(self, addresses: Sequence[str], *, settled: bool) -> None:
        """Publish this node's addresses for four minutes.

        Args:
            settled: whether this node has enough peers. If not, it publishes under every key on its way down, even if
                peers call the key full: otherwise invented records could hide it.
        """
        with suppress(Exception):
            async with asyncio.timeout(DHT_SECONDS * len(DEPTHS)):
                for depth in DEPTHS:
                    if not settled or depth not in self._full or random.random() < dht_limits.FULL_PART:
                        if await self._leave(shard_of(self._author, depth), addresses):
                            self._full.discard(depth)
                        else:
                            self._full.add(depth)
                    if depth not in self._full:
                        return

    async def find(self, take: Callable[[Answer], None], *, alone: bool) -> None:
        """Look up the run's first key, and random shards below full keys.

        Every answer names its referrer and is only a hint; a handshake must confirm each address.

        Args:
            alone: whether this node has no peers; it then looks up each depth. Otherwise it draws one of the depths
                where it would publish, so that the first key's few replicas do not serve all newcomers.
        """
        for owner, addresses in self._shelf.addresses().items():  # each owner stored them itself
            take(Answer(DHTID(0), owner, {owner: addresses}))
        depths: Sequence[int] = DEPTHS
        if not alone:
            deepest = min(1 + max(self._full, default=-1), DEPTHS[-1])
            depths = [random.randint(0, deepest)]
        for depth in depths:
            shard = f"{random.getrandbits(4 * depth):0{depth}x}" if depth else ""
            if not await self._find_under(key_bytes(self._user.run_id, shard), take):
                return

    async def _find_under(self, key: bytes, take: Callable[[Answer], None]) -> bool:
        """Look up a key, and pass each answer to `take`. Return whether the key is full, by the answers of referrers
        without doubt."""
        referrers = set[bytes]()
        owners = set[bytes]()

        def enough(answer: Answer) -> bool:
            take(answer)
            if answer.addresses and not self._user.doubted(answer.referrer):
                referrers.add(answer.referrer)
                owners.update(answer.addresses)
            return len(referrers) >= dht_limits.REFERRERS_ENOUGH and len(owners) >= MAX_RECORDS

        await self._walk(key, enough)
        return len(owners) >= MAX_RECORDS

    async def leave(self) -> None:
        """Leave the DHT; if p2pd is gone, this takes a second."""
        dht = self._dht
        self._dht = None
        if dht is not None:
            with suppress(Exception):
                await asyncio.wait_for(dht.shutdown(), LEAVE_SECONDS)

    async def _meet(self, dht: GuardedDht, peers: Collection[bytes]) -> None:
        """Call some of these peers and all outside of the run; with few neighbours also the nodes nearest to this one.
        Those that answer become neighbours."""
        most = min(NEIGHBOURS, len(peers))
        called = [*random.sample(list(peers), most), *self._outside]
        met = await asyncio.gather(*(dht.call_ping(PeerID(peer)) for peer in called))
        if any(met) and len(dht.routing_table.uid_to_peer_id) < OWN_NODES:
            await self._ask_nearest(dht, dht.node_id.to_bytes(), lambda answer: False)

    async def _walk(self, key: bytes, take: Callable[[Answer], object]) -> None:
        """As `_ask_nearest`, for a time at most; nothing if this node is not in the DHT."""
        if self._dht is not None:
            try:
                await asyncio.wait_for(self._ask_nearest(self._dht, key, take), DHT_SECONDS)
            except Exception as error:
                logger.debug("Nothing more can be looked up in the DHT: %r", error)

    async def _leave(self, shard: str, addresses: Sequence[str]) -> bool:
        """Store the record at the five nearest nodes that answer; return whether at least half of them had room."""
        dht = self._dht
        if dht is None:
            return True
        record = self._validator.sign(shard, addresses, dht_limits.RECORD_LIFETIME)
        await asyncio.gather(*(dht.leave_record(peer, record) for peer in self._outside))
        beside = record.key[:-1] + bytes([record.key[-1] ^ 1])  # same neighbours, no records, small answers
        answers = list[Answer]()
        await self._walk(beside, answers.append)
        target = DHTID.from_bytes(record.key)
        answers.sort(key=lambda answer: target.xor_distance(answer.node))
        room = []
        own_distance = target.xor_distance(dht.node_id)
        nearer = [one for one in answers if target.xor_distance(one.node) < own_distance]
        if len(nearer) < REPLICAS:
            room.append(self._shelf.keep(record, self._author))
        while answers and len(room) < REPLICAS:
            missing = REPLICAS - len(room)
            left = await asyncio.gather(*(dht.leave_record(one.referrer, record) for one in answers[:missing]))
            del answers[:missing]
            room += [one for one in left if one is not None]
        return 2 * sum(room) >= len(room)

    async def _ask_nearest(self, dht: GuardedDht, key: bytes, take: Callable[[Answer], object]) -> None:
        """Ask the nodes nearest to a key, nearest first, at most 24.

        The nodes of the own routing table come first, so that a peer cannot displace them with nodes that do not exist.

        Args:
            take: takes each answer; what is true ends it.
        """
        target = DHTID.from_bytes(key)
        own = dht.routing_table.get_nearest_neighbors(target, OWN_NODES, exclude=dht.node_id)
        nodes = {node: peer.to_bytes() for node, peer in own}
        named = dict[DHTID, bytes]()
        asked = {dht.p2p.peer_id.to_bytes()}
        left = OWN_NODES + NAMED_NODES
        enough = False
        while left > 0 and (nodes or named) and not enough:
            source = nodes or named
            most = min(dht_limits.AT_ONCE, left)
            nearest = sorted(source, key=target.xor_distance)[:most]
            batch = {node: source.pop(node) for node in nearest}
            calls = [self._ask(dht, node, peer, key) for node, peer in batch.items() if peer not in asked]
            asked.update(batch.values())
            left -= len(calls)
            for found in await asyncio.gather(*calls):
                if found is None:
                    continue
                answer, others = found
                enough |= bool(take(answer))
                fresh = [(node, peer) for node, peer in others if peer not in asked]
                fresh.sort(key=lambda one: target.xor_distance(one[0]))
                named.update(fresh[:NAMED_BY_ONE])

    async def _ask(
        self,
        dht: GuardedDht,
        node: DHTID,
        peer: bytes,
        key: bytes,
    ) -> tuple[Answer, list[tuple[DHTID, bytes]]] | None:
        """Look up a key at one node. Return its checked answer and the nodes that it names; None without an answer."""
        found = await dht.look_up(peer, key)
        if found is None:
            return None
        value, others = found
        addresses = dict[bytes, list[str]]()
        if value:  # sixty-four signatures take some 10 ms, so check them outside the event loop
            addresses = await asyncio.to_thread(check, key, value, self._validator)
        return Answer(node, peer, addresses), others


def check(key: bytes, value: bytes, validator: OwnerSigned) -> dict[bytes, list[str]]:
    """The owners' own addresses in the validly signed records of an answer, by owner."""
    found = {}
    for record in unpack_answer(key, value):
        owner = validator.owner(record)
        if owner is not None:
            found[owner] = validator.addresses(record, owner)
    return {owner: addresses for owner, addresses in found.items() if addresses}
