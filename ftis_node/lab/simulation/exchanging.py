"""Push–pull gossip among simulated nodes: `Swarm._exchange_loop`, `_exchange` and `on_exchange`, as events."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from ftis_node.lab.simulation.contacts import Contacts
from ftis_node.lab.simulation.network import GOSSIP, Line, Network
from ftis_node.lab.simulation.scheduler import Alarm
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.gossip import Gossip
from ftis_node.swarm.swarm import EXCHANGE_SECONDS, IDLE_SECONDS, PEERS_TOLD
from ftis_node.swarm.table import Known

if TYPE_CHECKING:
    from ftis_node.lab.simulation.node import SimulatedNode


class Exchanging:
    """Asks a few random peers while hungry or with news to tell, at least every half minute."""

    def __init__(self, swarm: SimulatedNode, line: Line, network: Network, rng: random.Random, *, peers: int) -> None:
        """
        Args:
            peers: how many are asked at once.
        """
        self._swarm = swarm
        self._line = line
        self._network = network
        self._rng = rng
        self._peers = peers
        self._asking: set[bytes] = set()
        self._turn = self._through_with = 0
        self._alarm = Alarm(line.after, self._round)

    @property
    def _gossip(self) -> Gossip:
        return self._swarm.gossip

    @property
    def _contacts(self) -> Contacts:
        return self._swarm.contacts

    def start(self) -> None:
        self._alarm.set()
        self._wait()

    def tell(self) -> None:
        """There is something to tell or to ask."""
        self._alarm.set()

    def _wait(self) -> None:
        self._alarm.wait(self._swarm.interval if self._swarm.want() > 0 else IDLE_SECONDS)

    def _round(self) -> None:
        """Who does not answer keeps the next round waiting for one interval at most."""
        view = [peer for peer in self._contacts.view if peer not in self._asking]
        self._turn += 1
        for peer in self._rng.sample(view, min(self._peers, len(view))):
            self._asking.add(peer)
            self._ask(peer)
        if self._asking:
            self._line.after(self._swarm.interval, self._through, self._turn)
        else:
            self._through(self._turn)

    def _asked(self, peer: bytes) -> None:
        self._asking.discard(peer)
        if not self._asking:
            self._through(self._turn)

    def _through(self, turn: int) -> None:
        if turn == self._turn and self._through_with != turn:
            self._through_with = turn
            self._line.after(self._swarm.interval / 2, self._wait)

    def _ask(self, peer: bytes) -> None:
        known, entries = self._gossip.offer(peer, self._network.scheduler.now)
        request = ftis_pb2.ExchangeRequest(entries=entries)
        over = False

        def late() -> None:
            nonlocal over
            if not over:
                over = True
                self._line.meter.counts["exchanges failed"] += 1
                self._contacts.failed(peer)
                self._contacts.lonely()
                self._asked(peer)

        def answered(answer: ftis_pb2.ExchangeResponse, told: list[bytes]) -> None:
            nonlocal over
            if not over:
                over = True
                self._take(peer, known, answer, told)

        self._line.meter.counts["exchanges"] += 1
        self._line.after(EXCHANGE_SECONDS, late)
        if self._network.connected(self._line, peer):
            handler = self._network.nodes[peer].exchanging.on_exchange
            self._network.send(self._line, peer, GOSSIP, request.ByteSize(), handler, request, self._line.id, answered)

    def _take(
        self,
        peer: bytes,
        known: list[Known],
        answer: ftis_pb2.ExchangeResponse,
        told: list[bytes],
    ) -> None:
        self._contacts.answered(peer)
        if answer.stranger:
            self._line.meter.counts["strangers"] += 1
            self._contacts.refused(peer, lambda _: self._asked(peer))
            return
        self._gossip.told(peer, known)
        self._contacts.hear_told(told)
        self._merge(answer.entries, peer)
        self._asked(peer)

    def on_exchange(
        self,
        request: ftis_pb2.ExchangeRequest,
        peer: bytes,
        answered: Callable[[ftis_pb2.ExchangeResponse, list[bytes]], None],
    ) -> None:
        known: list[Known] = []
        told: list[bytes] = []
        if peer not in self._contacts.view:
            answer = ftis_pb2.ExchangeResponse(stranger=True)
        else:
            self._merge(request.entries, peer)
            known, entries = self._gossip.offer(peer, self._network.scheduler.now)
            told = self._contacts.some(PEERS_TOLD, peer)
            answer = ftis_pb2.ExchangeResponse(entries=entries, peers=self._contacts.addresses(told))
            self._gossip.told(peer, known)
        self._network.send(self._line, peer, GOSSIP, answer.ByteSize(), answered, answer, told)

    def _merge(self, entries: list[ftis_pb2.Entry], peer: bytes) -> None:
        counts = self._line.meter.counts
        counts["entries"] += len(entries)
        new = self._gossip.merge(entries, peer)
        if new:
            counts["new entries"] += new
            self._swarm.news()
