"""Messages between nodes: latency, uplinks, who can dial whom, and what was sent and received."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftis_node.lab.simulation.scenario import Machine, Scenario
from ftis_node.lab.simulation.scheduler import Scheduler

if TYPE_CHECKING:
    from ftis_node.lab.simulation.node import SimulatedNode

GOSSIP, MEMBERSHIP, PACKETS = "gossip", "membership", "packets"
KINDS = (GOSSIP, MEMBERSHIP, PACKETS)
# TCP, then Noise and the multiplexer with their negotiation: three round trips to open a connection.
DIAL_LATENCIES = 6


@dataclass
class Meter:
    """What one node sent and received since second `since`, in bytes of RPC messages, and what came of its calls."""

    since: float
    out: Counter[str] = field(default_factory=Counter)
    inwards: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class Line:
    """A node's end: its identity, its machine, and what it counts. alive: false once it has left."""

    def __init__(self, scheduler: Scheduler, id: bytes, addresses: tuple[str, ...], machine: Machine) -> None:
        """
        Args:
            id: the 38-byte peer id.
            addresses: where it may be dialled; none if it only dials.
        """
        self.id = id
        self.addresses = addresses
        self.machine = machine
        self.alive = True
        self.joined = scheduler.now
        self.meter = Meter(scheduler.now)
        self.links: set[bytes] = set()  # open connections
        self._scheduler = scheduler
        self._free_at = 0.0  # when the uplink has sent the packets that wait for it

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Plans a call that is dropped if the node has left by then."""
        self._scheduler.after(seconds, self._if_alive, call, args)

    def departs(self, size: int) -> float:
        """Seconds until a packet of `size` bytes has left: packets stand in one queue for the uplink."""
        now = self._scheduler.now
        self._free_at = max(self._free_at, now) + size / self.machine.uplink
        return self._free_at - now

    def _if_alive(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.alive:
            call(*args)


class Network:
    """Everybody who is there. Totals are of the whole simulation: sent = received + lost + flying, in bytes."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.nodes: dict[bytes, SimulatedNode] = {}
        self.dialable: list[bytes] = []
        self.addresses: dict[bytes, tuple[str, ...]] = {}
        self.totals: Counter[str] = Counter()
        self.dials: Counter[str] = Counter()  # by how they ended
        self._latency = scenario.latency
        self._rng = rng

    def enter(self, node: SimulatedNode) -> None:
        self.nodes[node.line.id] = node
        self.addresses[node.line.id] = node.line.addresses
        if node.line.addresses:
            self.dialable.append(node.line.id)

    def leave(self, node: SimulatedNode) -> None:
        node.line.alive = False
        del self.nodes[node.line.id]
        if node.line.addresses:
            self.dialable.remove(node.line.id)
        for peer in node.line.links:
            if peer in self.nodes:
                self.nodes[peer].line.links.discard(node.line.id)

    def some_dialable(self, count: int) -> list[bytes]:
        """Random nodes that can be dialled."""
        return self._rng.sample(self.dialable, min(count, len(self.dialable)))

    def connected(self, caller: Line, peer: bytes) -> bool:
        return peer in caller.links and peer in self.nodes

    def dial(self, caller: Line, peer: bytes) -> bool:
        """Opens a connection; False if the peer is gone or cannot be dialled. It stays open until either leaves."""
        node = self.nodes.get(peer)
        outcome = "gone" if node is None else "opened" if node.line.addresses else "outbound-only"
        self.dials[outcome] += 1
        if node is None or not node.line.addresses:
            return False
        caller.links.add(peer)
        node.line.links.add(caller.id)
        caller.meter.counts["connections"] += 1
        node.line.meter.counts["connections"] += 1
        return True

    def dial_seconds(self) -> float:
        return DIAL_LATENCIES * self._latency

    def send(
        self, sender: Line, receiver: bytes, kind: str, size: int, deliver: Callable[..., None], *args: Any
    ) -> None:
        """A small message: it is never queued, but takes its time on the uplink."""
        self.depart(sender, receiver, kind, size, size / sender.machine.uplink, deliver, *args)

    def depart(
        self,
        sender: Line,
        receiver: bytes,
        kind: str,
        size: int,
        seconds: float,
        deliver: Callable[..., None],
        *args: Any,
    ) -> None:
        """A message that has left its sender in `seconds`; `deliver` is called if the receiver is still there."""
        sender.meter.out[kind] += size
        sender.meter.counts["messages"] += 1
        self.totals["sent"] += size
        self.totals["flying"] += size
        self.scheduler.after(seconds + self._latency, self._arrive, receiver, kind, size, deliver, args)

    def _arrive(
        self, receiver: bytes, kind: str, size: int, deliver: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        self.totals["flying"] -= size
        node = self.nodes.get(receiver)
        if node is None:
            self.totals["lost"] += size
            return
        self.totals["received"] += size
        node.line.meter.inwards[kind] += size
        deliver(*args)
