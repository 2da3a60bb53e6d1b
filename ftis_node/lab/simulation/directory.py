"""What the DHT costs the nodes that answer there: records left and looked up, by the rules of `swarm.wire.directory`.

It is simulated apart from the rest, for a quarter of an hour whatever the scenario's length: a node publishes every
three minutes, and ten thousand nodes are simulated for less than that. Every node reaches every other, so the few that
are nearest to a key serve everybody. A real swarm is cheaper for them: p2pd reaches only nodes that it has met.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import NamedTuple

import numpy as np
from hivemind.proto import dht_pb2

from ftis_node.lab.simulation.scenario import Scenario
from ftis_node.lab.simulation.scheduler import Scheduler
from ftis_node.lab.simulation.wire import RUN, draw_addresses
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.swarm import ENOUGH_PEERS, FIRST_LOOK_UP_SECONDS, RECORD_SECONDS, SETTLED_RECORD_SECONDS
from ftis_node.swarm.wire.dht_guard import NEAREST_MAX
from ftis_node.swarm.wire.directory import FULL_PART, RECORD_LIFETIME, REPLICAS
from ftis_node.swarm.wire.lookup import AT_ONCE, OWN_NODES
from ftis_node.swarm.wire.records import DEPTHS, MAX_RECORDS, OwnerSigned, pack_answer

SECONDS, WARMUP = 900.0, 300.0


class Sizes(NamedTuple):
    """Bytes of messages: a record in an answer, a call to store one, and an answer that names twenty nodes."""

    record: int
    store: int
    nearest: int


@cache
def sizes() -> Sizes:
    """From real messages; a record has four addresses, over TCP and QUIC."""
    who, rng = Identity(bytes(32)), random.Random(0)
    record = OwnerSigned(who, RUN.id).sign(
        "", [*draw_addresses(who.peer_id, rng), *draw_addresses(who.peer_id, rng)], RECORD_LIFETIME
    )
    node = dht_pb2.NodeInfo(node_id=bytes(20))
    store = dht_pb2.StoreRequest(
        keys=[record.key],
        subkeys=[record.subkey],
        values=[record.value],
        expiration_time=[record.expiration_time],
        in_cache=[False],
        peer=node,
    )
    result = dht_pb2.FindResult(nearest_node_ids=[bytes(20)] * NEAREST_MAX, nearest_peer_ids=[who.author] * NEAREST_MAX)
    nearest = dht_pb2.FindResponse(results=[result], peer=node)
    return Sizes(len(pack_answer([record])), store.ByteSize(), nearest.ByteSize())


class SimulatedDht:
    """Places in the DHT, each with one node after another, and the records under each key.

    A place keeps its id when its node leaves, and the next has other digits to its peer id.
    """

    def __init__(self, nodes: int, session_seconds: float, seed: int) -> None:
        self.scheduler = Scheduler()
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
            self.scheduler.after(self._rng.uniform(0, SETTLED_RECORD_SECONDS), self._publish, place, who, self._settles)
            self.scheduler.after(self._rng.expovariate(1 / session_seconds), self._replace, place, who)
        self.scheduler.after(WARMUP, self._count)

    def _newcomer(self) -> str:
        """The hexadecimal digits of a peer id's SHA-256."""
        who = f"{self._rng.getrandbits(128):032x}"
        self._full[who] = set()
        return who

    def _count(self) -> None:
        self.out.clear()
        self.inwards.clear()

    def _replace(self, place: int, old: str) -> None:
        del self._full[old]
        who = self._newcomer()
        self._publish(place, who, False)
        self.scheduler.after(self._rng.expovariate(1 / self._session), self._replace, place, who)

    def _publish(self, place: int, who: str, settled: bool) -> None:
        """As `Directory._publish`; a newcomer looks up once, as if the first peers had not named enough."""
        full = self._full.get(who)
        if full is None:
            return  # it has left
        for depth in DEPTHS:
            if not settled or depth not in full or self._rng.random() < FULL_PART:
                (full.discard if self._leave(who, who[:depth]) else full.add)(depth)
            if depth not in full:
                break
        if not settled:
            self.scheduler.after(FIRST_LOOK_UP_SECONDS, self._look_up, who)
        pause = SETTLED_RECORD_SECONDS if self._settles else RECORD_SECONDS
        self.scheduler.after(pause, self._publish, place, who, self._settles)

    def _leave(self, who: str, shard: str) -> bool:
        kept = self._records(shard)
        if who not in kept and len(kept) >= MAX_RECORDS:
            del kept[self._rng.choice(list(kept))]
        kept[who] = self.scheduler.now + RECORD_LIFETIME
        near = self._near(shard)
        for place in near:  # the walk to them
            self.out[place] += sizes().nearest
        for place in near[:REPLICAS]:
            self.inwards[place] += sizes().store
        return len(kept) < MAX_RECORDS

    def _look_up(self, who: str) -> None:
        if who in self._full:
            depth = self._rng.randint(0, min(1 + max(self._full[who], default=-1), DEPTHS[-1]))
            shard = f"{self._rng.getrandbits(4 * depth):0{depth}x}" if depth else ""
            kept = self._records(shard)
            asked = self._near(shard)[: AT_ONCE if len(kept) >= MAX_RECORDS else OWN_NODES]
            for place in asked:
                self.out[place] += sizes().nearest
            for place in asked[:REPLICAS]:
                self.out[place] += len(kept) * sizes().record

    def _records(self, shard: str) -> dict[object, float]:
        kept = self._kept.setdefault(shard, {})
        for who in [who for who, until in kept.items() if until < self.scheduler.now]:
            del kept[who]
        return kept

    def _near(self, shard: str) -> list[int]:
        """The places nearest to a key, nearest first."""
        if shard not in self._nearest:
            far = self._ids ^ np.uint64(random.Random(f"key {shard}").getrandbits(63))
            some = np.argpartition(far, min(OWN_NODES, len(far)) - 1)[:OWN_NODES]
            self._nearest[shard] = [int(place) for place in some[np.argsort(far[some])]]
        return self._nearest[shard]


def directory_figures(scenario: Scenario) -> dict[str, float]:
    """Bytes a second that nodes send in answers of the DHT: the busiest, and the mean."""
    dht = SimulatedDht(scenario.nodes, scenario.session_seconds, scenario.seed)
    dht.scheduler.run(SECONDS, lambda now: None)
    seconds = SECONDS - WARMUP
    return {
        "directory_busiest_bytes_out_s": max(dht.out.values(), default=0) / seconds,
        "directory_busiest_bytes_in_s": max(dht.inwards.values(), default=0) / seconds,
        "directory_bytes_out_per_node_s": dht.out.total() / seconds / scenario.nodes,
    }
