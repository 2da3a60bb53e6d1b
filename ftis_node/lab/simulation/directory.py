"""The cost of the DHT for the nodes that answer: records left and looked up, by the rules of `swarm.wire.directory`.

It is simulated apart from the rest, normally for a quarter of an hour whatever the scenario's length: a node publishes
every three minutes, and ten thousand nodes are simulated for less than that. Every node reaches every other, so the few
that are nearest to a key serve everybody. A real swarm is cheaper for them: p2pd reaches only nodes that it has met.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.clock import SimulatedLoop
from ftis_node.lab.simulation.scenario import Scenario
from ftis_node.swarm.swarm import ENOUGH_PEERS, FIRST_LOOK_UP_SECONDS, RECORD_SECONDS, SETTLED_RECORD_SECONDS
from ftis_node.swarm.wire import dht_limits as dht
from ftis_node.swarm.wire.transport import Answer, PeerDirectory

SECONDS = 600.0  # that count
WARMUP = 300.0  # before them
LATER = 2  # the turn from which a node has enough peers, if there are so many

# Bytes of real messages; tests/test_directory.py makes them again. An answer, and each node that it names; a record of
# four addresses in an answer, and what a call to store one has besides.
ANSWER_BYTES = 27
NAMED_BYTES = 62
RECORD_BYTES = 504
STORE_BYTES = 48
ASKED = dht.NEAREST_MAX + 1  # by a walk where all know all: an answer names no others
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
        end = boot_seconds() + dht.RECORD_LIFETIME
        self._left[owner] = (list(addresses), end)

    def some(self) -> dict[bytes, list[str]]:
        """Records that have not ended, by owner: as many as one key holds, drawn by chance."""
        now = boot_seconds()
        ended = list(takewhile(lambda owner: self._left[owner][1] <= now, self._left))
        for owner in ended:
            del self._left[owner]
        owners = list(self._left)
        count = min(dht.MAX_RECORDS, len(owners))
        drawn = self.rng.sample(owners, count)
        return {owner: self._left[owner][0] for owner in drawn}


@dataclass
class MemoryDirectory(PeerDirectory):
    """A node's place in the directory, that finds a random part of all records.

    The shards, and the bytes that they cost, are in `SimulatedDht`.

    counts: returns where this node's look-ups are counted.
    """

    records: Records
    author: bytes
    counts: Callable[[], Counter[str]]
    latency: float

    async def join(self, peers: Collection[bytes], outside: Collection[bytes]) -> None:
        """From now on this node may be named as who gave an answer."""
        self.records.taking_part[self.author] = None

    async def publish(self, addresses: Sequence[str], *, settled: bool) -> None:
        """Leaves this node's record, at once and at no cost."""
        self.records.leave(self.author, addresses)

    async def find(self, take: Callable[[Answer], None], *, alone: bool) -> None:
        """Hands one random part of the records to `take`, as the answer of each of some random nodes."""
        self.counts()["look_ups"] += 1
        referrers = list(self.records.taking_part)
        count = min(dht.REFERRERS_ENOUGH, len(referrers))
        found = self.records.some()
        await asyncio.sleep(LATENCIES * self.latency)
        for referrer in self.records.rng.sample(referrers, count):
            if referrer != self.author:
                take(Answer(0, referrer, found))

    async def leave(self) -> None:
        self.records.taking_part.pop(self.author, None)


class SimulatedDht:
    """Places in the DHT, each with one node after another, and the records under each key. It runs on a loop of its own
    (`loop`), which the caller runs and closes.

    out, inwards: bytes by place since they were cleared.
    A place keeps its id when its node leaves, and the next has other digits to its peer id.
    """

    def __init__(self, scenario: Scenario, *, fresh: bool = False, record_bytes: int = RECORD_BYTES) -> None:
        """
        Args:
            fresh: all nodes join in second 0; else they have been there for some time.
        """
        self.loop = SimulatedLoop()
        self.out = Counter[int]()
        self.inwards = Counter[int]()
        self._rng = random.Random(f"directory {scenario.seed}")
        draw = np.random.default_rng(scenario.seed)
        self._ids = draw.integers(0, 2**63, scenario.nodes, np.uint64)
        self._session = scenario.session_seconds
        self._settles = scenario.nodes > ENOUGH_PEERS
        self._record_bytes = record_bytes
        others = max(0, scenario.nodes - 2)  # than who asks and who answers
        self._answer_bytes = ANSWER_BYTES + NAMED_BYTES * min(dht.NEAREST_MAX, others)
        self._here: dict[int, str] = {}  # who has a place
        self._kept: dict[str, dict[object, float]] = {}  # by key and owner, until when
        self._nearest: dict[str, list[int]] = {}
        for place in range(scenario.nodes):
            wait = 0.0
            turn = 0
            if not fresh:
                wait = self._rng.uniform(0, SETTLED_RECORD_SECONDS)
                turn = LATER
            self.loop.call_later(wait, self._arrive, place, turn)

    def _arrive(self, place: int, turn: int = 0) -> None:
        """Another node has this place for a session, and begins its turns. turn: the one that it begins with."""
        who = f"{self._rng.getrandbits(128):032x}"  # the digits of its peer id's SHA-256
        self._here[place] = who
        stay = self._rng.expovariate(1 / self._session)
        self.loop.call_later(stay, self._arrive, place)
        self._turn(place, who, set(), turn)

    def _turn(self, place: int, who: str, full: set[int], turn: int) -> None:
        """As `Swarm._record_loop`, with two turns as if the first peers had not named enough.

        Args:
            full: depths at which its key had no room. A turn changes it, and the next has it.
            turn: 0 for a node's first.
        """
        if self._here[place] != who:
            return  # it has left
        settled = self._settles and turn >= LATER
        if len(self._ids) <= dht.OWN_NODES:
            self._ask(place, "")  # `Directory._meet`
        self._publish(place, who, full, settled)
        if turn and not settled:
            self._look_up(place, full)
        pause = FIRST_LOOK_UP_SECONDS
        if settled:
            pause = SETTLED_RECORD_SECONDS
        elif turn:
            pause = RECORD_SECONDS
        self.loop.call_later(pause, self._turn, place, who, full, turn + 1)

    def _publish(self, place: int, who: str, full: set[int], settled: bool) -> None:
        """As `Directory._publish`: down to the first depth that has room, by what this node knows of it."""
        for depth in dht.DEPTHS:
            skips = settled and depth in full and self._rng.random() >= dht.FULL_PART
            if skips:
                continue
            if self._leave(place, who, who[:depth]):
                full.discard(depth)
                return
            full.add(depth)

    def _leave(self, place: int, who: str, shard: str) -> bool:
        """Leaves a node's record under a key; returns whether there is room for more."""
        kept = self._records(shard)
        if who not in kept and len(kept) >= dht.MAX_RECORDS:
            del kept[self._rng.choice(list(kept))]
        kept[who] = self.loop.time() + dht.RECORD_LIFETIME
        self._ask(place, shard)
        for keeper in self._keepers(shard):
            if keeper != place:
                self.inwards[keeper] += self._record_bytes + STORE_BYTES
        return len(kept) < dht.MAX_RECORDS

    def _look_up(self, place: int, full: set[int]) -> None:
        """Asks for the records under a random key at one of the depths at which the node would publish."""
        deepest_full = max(full, default=-1)
        deepest = min(deepest_full + 1, dht.DEPTHS[-1])
        depth = self._rng.randint(0, deepest)
        shard = ""
        if depth:
            shard = f"{self._rng.getrandbits(4 * depth):0{depth}x}"
        kept = self._records(shard)
        most = ASKED
        if len(kept) >= dht.MAX_RECORDS:
            most = dht.AT_ONCE
        asked = self._ask(place, shard, most)
        for keeper in self._keepers(shard):
            if keeper in asked:
                self.out[keeper] += len(kept) * self._record_bytes

    def _ask(self, place: int, shard: str, most: int = ASKED) -> list[int]:
        """As `wire.directory.walk`: the places whose nodes answer, nearest first; their answers are counted."""
        asked = [other for other in self._near(shard) if other != place][:most]
        for other in asked:
            self.out[other] += self._answer_bytes
        return asked

    def _records(self, shard: str) -> dict[object, float]:
        """What lies under a key now, to be changed by the caller; what has ended is removed."""
        kept = self._kept.setdefault(shard, {})
        now = self.loop.time()
        over = [who for who, until in kept.items() if until < now]
        for who in over:
            del kept[who]
        return kept

    def _keepers(self, shard: str) -> list[int]:
        """The places that keep what lies under a key."""
        return self._near(shard)[: dht.REPLICAS]

    def _near(self, shard: str) -> list[int]:
        """The places nearest to a key, nearest first; kept for the next call, for places do not move."""
        if shard not in self._nearest:
            key = random.Random(f"key {shard}").getrandbits(63)
            distances = self._ids ^ np.uint64(key)
            last = min(ASKED, len(distances) - 1)
            nearest = np.argpartition(distances, last)[: ASKED + 1]
            in_order = nearest[np.argsort(distances[nearest])]
            self._nearest[shard] = in_order.tolist()
        return self._nearest[shard]


def directory_figures(
    scenario: Scenario,
    *,
    warmup: float = WARMUP,
    seconds: float = SECONDS,
    **more: Any,
) -> dict[str, float]:
    """Bytes a second that nodes send in answers of the DHT: the busiest, and the mean; and that the busiest receives.
    Not to be called within a running event loop.

    Args:
        seconds: that count, after those of `warmup`.
        more: as `SimulatedDht` takes it.
    """
    places = SimulatedDht(scenario, **more)
    with closing(places.loop) as loop:
        loop.run_until_complete(asyncio.sleep(warmup))
        places.out.clear()
        places.inwards.clear()
        loop.run_until_complete(asyncio.sleep(seconds))
    return {
        "directory_busiest_bytes_out_s": max(places.out.values(), default=0) / seconds,
        "directory_busiest_bytes_in_s": max(places.inwards.values(), default=0) / seconds,
        "directory_bytes_out_per_node_s": places.out.total() / seconds / scenario.nodes,
    }
