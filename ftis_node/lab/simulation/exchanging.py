"""Push–pull gossip among simulated nodes: `Swarm._exchange_loop`, `_exchange` and `on_exchange`, as events."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ftis_node.lab.simulation.contacts import Contacts
from ftis_node.lab.simulation.network import GOSSIP, Line, Network
from ftis_node.lab.simulation.scheduler import Alarm
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.gossip import Gossip
from ftis_node.swarm.pulling import IDLE_SECONDS
from ftis_node.swarm.swarm import EXCHANGE_SECONDS, PEERS_TOLD, QUESTIONS

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
        self._alarm.wait(self._swarm.interval if self._swarm.want().groups > 0 else IDLE_SECONDS)

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
        self._line.meter.counts["exchanges"] += 1
        self._call(peer, self._gossip.ask(peer), QUESTIONS)

    def _call(self, peer: bytes, request: ftis_pb2.ExchangeRequest, questions: int) -> None:
        over = False

        def late() -> None:
            nonlocal over
            if not over:
                over = True
                self._line.meter.counts["exchanges failed"] += 1
                self._gossip.failed(request, peer)
                self._contacts.failed(peer)
                self._contacts.lost(peer)
                self._asked(peer)

        def answered(answer: ftis_pb2.ExchangeResponse, told: list[bytes]) -> None:
            nonlocal over
            if not over:
                over = True
                self._take(peer, request, answer, told, questions - 1)

        self._line.meter.counts["calls"] += 1
        self._line.after(EXCHANGE_SECONDS, late)
        if self._network.connected(self._line, peer):
            handler = self._network.nodes[peer].exchanging.on_exchange
            self._network.send(self._line, peer, GOSSIP, request.ByteSize(), handler, request, self._line.id, answered)

    def _take(
        self,
        peer: bytes,
        request: ftis_pb2.ExchangeRequest,
        answer: ftis_pb2.ExchangeResponse,
        told: list[bytes],
        questions: int,
    ) -> None:
        self._contacts.answered(peer)
        if answer.stranger:
            self._line.meter.counts["strangers"] += 1
            self._gossip.failed(request, peer)
            self._contacts.refused(peer, lambda _: self._asked(peer))
            return
        before = self._gossip.counts["new"]
        follow = self._gossip.take(request, answer, peer)
        self._count(answer.entries, before)
        self._contacts.hear_told(told)
        if follow is not None and questions:
            self._call(peer, follow, questions)
            return
        if follow is not None:
            self._gossip.unsent(follow, peer)
        self._asked(peer)

    def on_exchange(
        self,
        request: ftis_pb2.ExchangeRequest,
        peer: bytes,
        answered: Callable[[ftis_pb2.ExchangeResponse, list[bytes]], None],
    ) -> None:
        told: list[bytes] = []
        if not self._contacts.has_met(peer):
            answer = ftis_pb2.ExchangeResponse(stranger=True)
        else:
            self._contacts.called(peer)
            before = self._gossip.counts["new"]
            answer = self._gossip.answer(request, peer)
            self._count(request.entries, before)
            told = self._contacts.some(PEERS_TOLD, peer)
            answer.peers.extend(self._contacts.addresses(told))
        self._network.send(self._line, peer, GOSSIP, answer.ByteSize(), answered, answer, told)

    def _count(self, entries: Sequence[ftis_pb2.Entry], before: int) -> None:
        """Notes entries that came, and how many were new: `before` of all were so until then."""
        self._line.meter.counts["entries"] += len(entries)
        self._line.meter.counts["new entries"] += self._gossip.counts["new"] - before
