"""Pulling packets: `Swarm._pull_loop`, `_pull` and what they call, and the asking side of `swarm.fetch`, as events."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftis_node.lab.simulation.network import PACKETS, Line, Network
from ftis_node.lab.simulation.scheduler import Alarm
from ftis_node.lab.simulation.store import Body
from ftis_node.lab.simulation.uploads import BUSY, HERE
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.fetch import CHUNK_SECONDS, FETCH_SECONDS, OPEN_SECONDS, SLOWEST_BYTES, Rests
from ftis_node.swarm.limits import OWN
from ftis_node.swarm.pulling import IDLE_SECONDS, TAKEN_TOGETHER
from ftis_node.swarm.table import Target

if TYPE_CHECKING:
    from ftis_node.lab.simulation.node import SimulatedNode


@dataclass(eq=False)
class Pull:
    """A stream from one holder. left: what has not landed; asked: by digest, what the holder still has to answer."""

    holder: bytes
    left: list[Target]
    asked: dict[bytes, Target]
    began: float
    arrived: dict[Target, Body] = field(default_factory=dict)
    missing: bool = False
    brought: bool = False
    over: bool = False
    chunks: int = 0


class Pulling:
    """Pulls what the node wants and is not under way, as soon as somebody has it."""

    def __init__(
        self,
        swarm: SimulatedNode,
        line: Line,
        network: Network,
        rng: random.Random,
        on_bodies: Callable[[list[tuple[Body, float]]], None],
    ) -> None:
        """
        Args:
            on_bodies: takes packets, each with its birth in simulated seconds.
        """
        self._swarm = swarm
        self._line = line
        self._network = network
        self._rng = rng
        self._on_bodies = on_bodies
        self._busy_holders: set[bytes] = set()
        self._rests = Rests()
        self._under_way = 0
        self._alarm = Alarm(line.after, self._look)

    def start(self) -> None:
        self._alarm.wait(IDLE_SECONDS)

    def news(self) -> None:
        """There may be something to pull."""
        self._alarm.set()

    def _look(self) -> None:
        want = self._swarm.want()
        need = want.groups - self._under_way
        by_holder: dict[bytes, list[Target]] = {}
        free = self._swarm.contacts.view.keys() - self._busy_holders
        table = self._swarm.gossip.table
        for target in table.choose(need, lambda known: known.held_among(free), want.newcomers) if need > 0 else []:
            by_holder.setdefault(self._rng.choice(self._holders(target)), []).append(target)
            target.known.pulling |= 1 << target.index
        for holder, targets in by_holder.items():
            self._under_way += len(targets)
            self._busy_holders.add(holder)
            self._open(holder, targets)
        self._alarm.wait(IDLE_SECONDS)

    def _holders(self, target: Target) -> list[bytes]:
        known, view = target.known, self._swarm.contacts.view
        return [
            peer
            for peer in dict.fromkeys((known.announcement.author, *known.holders))
            if peer in view and peer not in self._busy_holders and known.held_by(peer, target.index)
        ]

    def _open(self, holder: bytes, targets: list[Target]) -> None:
        asked = {target.ref.digest: target for target in targets[: OWN.digests]}
        pull = Pull(holder, targets, asked, self._network.scheduler.now)
        counts = self._line.meter.counts
        counts["fetches"] += 1
        counts["packets asked"] += len(asked)
        if not self._network.connected(self._line, holder):
            self._line.after(OPEN_SECONDS, self._fault, pull)
            return
        size = ftis_pb2.FetchRequest(digests=list(asked)).ByteSize()
        serve = self._network.nodes[holder].on_fetch

        def reply(digest: bytes, status: int, body: Body | None) -> None:
            self._chunk(pull, digest, status, body)

        self._network.send(self._line, holder, PACKETS, size, serve, list(asked), self._line.id, reply)
        self._expect(pull)

    def _expect(self, pull: Pull) -> None:
        """The next chunk has so long."""
        largest = max(target.ref.size for target in pull.asked.values())
        patience = FETCH_SECONDS - (self._network.scheduler.now - pull.began)
        seconds = min(CHUNK_SECONDS + largest / SLOWEST_BYTES, patience)
        self._line.after(max(0.0, seconds), self._silent, pull, pull.chunks)

    def _silent(self, pull: Pull, chunks: int) -> None:
        if pull.chunks == chunks:
            self._fault(pull)

    def _chunk(self, pull: Pull, digest: bytes, status: int, body: Body | None) -> None:
        if pull.over:
            return
        pull.chunks += 1
        pull.brought |= status == HERE
        target = pull.asked.pop(digest)
        if status == BUSY:
            self._line.meter.counts["busy"] += 1
            target.known.held_no_more(pull.holder, target.index)
        elif status != HERE or body is None:
            target.tried(pull.holder)
        if status != HERE or body is None:
            pull.missing = True
            self._landed(target, pull)
        elif self._admit(target):
            pull.arrived[target] = body
        else:
            self._landed(target, pull)
        if len(pull.arrived) >= TAKEN_TOGETHER:
            self._hand_over(pull)
        if pull.asked:
            self._expect(pull)
        else:
            self._swarm.contacts.answered(pull.holder)
            self._end(pull)

    def _fault(self, pull: Pull) -> None:
        if pull.over:
            return
        self._line.meter.counts["fetches failed"] += 1
        self._swarm.contacts.failed(pull.holder)
        pull.missing = True
        for target in pull.left:
            if target not in pull.arrived:
                target.tried(pull.holder)
        self._end(pull)

    def _end(self, pull: Pull) -> None:
        pull.over = True
        self._hand_over(pull)
        for target in list(pull.left):
            self._landed(target, pull)
        self._rests.note(pull.holder, pull.brought)
        rest = self._rests.seconds(pull.holder, self._swarm.interval) if pull.missing else 0.0
        self._line.after(rest, self._free, pull.holder)

    def _free(self, holder: bytes) -> None:
        self._busy_holders.discard(holder)
        self._alarm.set()

    def _admit(self, target: Target) -> bool:
        target.known.done |= 1 << target.index
        return not self._swarm.store.seen(*target.key)

    def _hand_over(self, pull: Pull) -> None:
        if pull.arrived:
            groups = list(pull.arrived.items())
            pull.arrived.clear()
            self._on_bodies([(body, target.known.born) for target, body in groups])
            for target, _ in groups:
                self._landed(target, pull)
                target.known.have |= 1 << target.index

    def _landed(self, target: Target, pull: Pull) -> None:
        pull.left.remove(target)
        target.known.pulling &= ~(1 << target.index)
        self._under_way -= 1
