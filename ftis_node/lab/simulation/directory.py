"""The cost of the DHT for the nodes that answer: records left and looked up, by the rules of `swarm.wire.directory`.

It is simulated apart from the rest, for a quarter of an hour whatever the scenario's length: a node publishes every
three minutes, and ten thousand nodes are simulated for less than that. Every node reaches every other, so the few that
are nearest to a key serve everybody. A real swarm is cheaper for them: p2pd reaches only nodes that it has met.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

import numpy as np

from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.clock import SimulatedLoop
from ftis_node.lab.simulation.scenario import Scenario
from ftis_node.swarm.swarm import ENOUGH_PEERS, FIRST_LOOK_UP_SECONDS, RECORD_SECONDS, SETTLED_RECORD_SECONDS
from ftis_node.swarm.wire import dht_limits as dht
from ftis_node.swarm.wire.transport import Answer, PeerDirectory

SECONDS, WARMUP = 900.0, 300.0


# Bytes of real messages; tests/test_simulation.py makes them again. A record of four addresses in an answer, a call
# to store one, and an answer that names twenty nodes.
RECORD_BYTES, STORE_BYTES, NEAREST_BYTES = 504, 552, 1267
LATENCIES = 4  # of a look-up: two rounds of questions


class Records:
    """The addresses that nodes have left, in memory and all under one key."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.taking_part: dict[bytes, None] = {}
        self._left: dict[bytes, tuple[list[str], float]] = {}  # by owner, and until when

    def leave(self, owner: bytes, addresses: Sequence[str]) -> None:
        """Keeps a record for some minutes."""
        self._left.pop(owner, None)  # so that they lie in the order in which they end
        self._left[owner] = (list(addresses), boot_seconds() + dht.RECORD_LIFETIME)

    def some(self) -> dict[bytes, list[str]]:
        """As many as one key holds, drawn by chance."""
        now = boot_seconds()
        for owner in list(takewhile(lambda one: self._left[one][1] <= now, self._left)):
            del self._left[owner]
        owners = self.rng.sample(list(self._left), min(dht.MAX_RECORDS, len(self._left)))
        return {owner: self._left[owner][0] for owner in owners}


class MemoryDirectory(PeerDirectory):
    """A node's place in the directory, that finds a random part of all records.

    The shards, and the bytes that they cost, are in `SimulatedDht`.
    """

    def __init__(self, records: Records, author: bytes, counts: Callable[[], Counter[str]], latency: float) -> None:
        """
        Args:
            counts: returns where this node's look-ups are counted.
        """
        self._records = records
        self._author = author
        self._counts = counts
        self._latency = latency

    async def join(self, peers: Collection[bytes], outside: Collection[bytes]) -> None:
        self._records.taking_part[self._author] = None

    async def publish(self, addresses: Sequence[str], *, settled: bool) -> None:
        self._records.leave(self._author, addresses)

    async def find(self, take: Callable[[Answer], None], *, alone: bool) -> None:
        self._counts()["look_ups"] += 1
        referrers = list(self._records.taking_part)
        found = self._records.some()
        await asyncio.sleep(LATENCIES * self._latency)
        for referrer in self._records.rng.sample(referrers, min(dht.REFERRERS_ENOUGH, len(referrers))):
            if referrer != self._author:
                take(Answer(0, referrer, found))

    async def leave(self) -> None:
        self._records.taking_part.pop(self._author, None)


class SimulatedDht:
    """Places in the DHT, each with one node after another, and the records under each key.

    A place keeps its id when its node leaves, and the next has other digits to its peer id.
    """

    def __init__(self, nodes: int, session_seconds: float, seed: int) -> None:
        self.loop = SimulatedLoop()
        self.out, self.inwards = Counter[int](), Counter[int]()
        self._rng = random.Random(f"directory {seed}")
        self._ids = np.random.default_rng(seed).integers(0, 2**63, nodes, np.uint64)
        self._session = session_seconds
        self._settles = nodes > ENOUGH_PEERS
        self._kept: dict[str, dict[object, float]] = {}
        self._full: dict[object, set[int]] = {}
        self._nearest: dict[str, list[int]] = {}
        for place in range(nodes):
            who = self._newcomer()
            self.loop.call_later(self._rng.uniform(0, SETTLED_RECORD_SECONDS), self._publish, place, who, self._settles)
            self.loop.call_later(self._rng.expovariate(1 / session_seconds), self._replace, place, who)
        for counts in (self.out, self.inwards):
            self.loop.call_later(WARMUP, counts.clear)

    def run(self, seconds: float) -> None:
        """Runs to this second."""
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.loop.close()

    def _newcomer(self) -> str:
        """The hexadecimal digits of a peer id's SHA-256."""
        who = f"{self._rng.getrandbits(128):032x}"
        self._full[who] = set()
        return who

    def _replace(self, place: int, old: str) -> None:
        del self._full[old]
        who = self._newcomer()
        self._publish(place, who, False)
        self.loop.call_later(self._rng.expovariate(1 / self._session), self._replace, place, who)

    def _publish(self, place: int, who: str, settled: bool) -> None:
        """As `Directory._publish`; a newcomer looks up once, as if the first peers had not named enough."""
        full = self._full.get(who)
        if full is None:
            return  # it has left
        for depth in dht.DEPTHS:
            if not settled or depth not in full or self._rng.random() < dht.FULL_PART:
                (full.discard if self._leave(who, who[:depth]) else full.add)(depth)
            if depth not in full:
                break
        if not settled:
            self.loop.call_later(FIRST_LOOK_UP_SECONDS, self._look_up, who)
        pause = SETTLED_RECORD_SECONDS if self._settles else RECORD_SECONDS
        self.loop.call_later(pause, self._publish, place, who, self._settles)

    def _leave(self, who: str, shard: str) -> bool:
        kept = self._records(shard)
        if who not in kept and len(kept) >= dht.MAX_RECORDS:
            del kept[self._rng.choice(list(kept))]
        kept[who] = self.loop.time() + dht.RECORD_LIFETIME
        near = self._near(shard)
        for place in near:  # the walk to them
            self.out[place] += NEAREST_BYTES
        for place in near[: dht.REPLICAS]:
            self.inwards[place] += STORE_BYTES
        return len(kept) < dht.MAX_RECORDS

    def _look_up(self, who: str) -> None:
        if who in self._full:
            depth = self._rng.randint(0, min(1 + max(self._full[who], default=-1), dht.DEPTHS[-1]))
            shard = f"{self._rng.getrandbits(4 * depth):0{depth}x}" if depth else ""
            kept = self._records(shard)
            asked = self._near(shard)[: dht.AT_ONCE if len(kept) >= dht.MAX_RECORDS else dht.OWN_NODES]
            for place in asked:
                self.out[place] += NEAREST_BYTES
            for place in asked[: dht.REPLICAS]:
                self.out[place] += len(kept) * RECORD_BYTES

    def _records(self, shard: str) -> dict[object, float]:
        kept = self._kept.setdefault(shard, {})
        for who in [who for who, until in kept.items() if until < self.loop.time()]:
            del kept[who]
        return kept

    def _near(self, shard: str) -> list[int]:
        """The places nearest to a key, nearest first."""
        if shard not in self._nearest:
            far = self._ids ^ np.uint64(random.Random(f"key {shard}").getrandbits(63))
            some = np.argpartition(far, min(dht.OWN_NODES, len(far)) - 1)[: dht.OWN_NODES]
            self._nearest[shard] = [int(place) for place in some[np.argsort(far[some])]]
        return self._nearest[shard]


def directory_figures(scenario: Scenario) -> dict[str, float]:
    """Bytes a second that nodes send in answers of the DHT: the busiest, and the mean."""
    places = SimulatedDht(scenario.nodes, scenario.session_seconds, scenario.seed)
    places.run(SECONDS)
    seconds = SECONDS - WARMUP
    return {
        "directory_busiest_bytes_out_s": max(places.out.values(), default=0) / seconds,
        "directory_busiest_bytes_in_s": max(places.inwards.values(), default=0) / seconds,
        "directory_bytes_out_per_node_s": places.out.total() / seconds / scenario.nodes,
    }
