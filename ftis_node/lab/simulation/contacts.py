"""Whom a node knows: `Membership`, and the loops of `Swarm` that greet, as events."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ftis_node.lab.simulation.network import MEMBERSHIP, Line, Network
from ftis_node.lab.simulation.scheduler import Alarm
from ftis_node.lab.simulation.wire import RUN
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.gossip import Gossip
from ftis_node.swarm.handshake import HANDSHAKE_SECONDS, greeting
from ftis_node.swarm.membership import (
    ADDRESSES_TOLD,
    GIVE_UP_AFTER,
    GIVE_UP_SECONDS,
    HEARD_SIZE,
    MET_SIZE,
    PEERS_IN_A_HANDSHAKE,
    VIEW_SIZE,
)
from ftis_node.swarm.retries import TRIES_OF_MET, Retries
from ftis_node.swarm.swarm import (
    ALONE_SECONDS,
    ENOUGH_PEERS,
    FIRST_LOOK_UP_SECONDS,
    MAINTAIN_SECONDS,
    RECORD_SECONDS,
    SETTLED_RECORD_SECONDS,
)
from ftis_node.swarm.wire.libp2p import DIAL_SECONDS

AFTER_GREETING_SECONDS = 1.0  # as `_maintain_loop` sleeps


@dataclass
class Contact:
    """A peer of the view. seen: when it last answered, in simulated seconds; failures: in a row."""

    seen: float
    failures: int = 0


class Contacts:
    """The view, who was heard of, and the greeting of strangers."""

    def __init__(
        self,
        line: Line,
        network: Network,
        gossip: Gossip,
        rng: random.Random,
        *,
        at_once: int,
        eager: bool,
        poke: Callable[[], None],
    ) -> None:
        """
        Args:
            at_once: strangers that are greeted at once.
            eager: as `Scenario.eager`.
            poke: tells the swarm that there may be more to ask and to pull.
        """
        self.view: dict[bytes, Contact] = {}
        self._line = line
        self._network = network
        self._gossip = gossip
        self._rng = rng
        self._at_once = at_once
        self._eager = eager
        self._poke = poke
        self._hello = greeting(RUN, line.addresses)
        self._hello_bytes = self._hello.ByteSize()
        self._heard: dict[bytes, None] = {}
        self._met: dict[bytes, None] = {}
        self._retries = Retries(lambda: network.scheduler.now)
        self._bootstraps: list[bytes] = []
        self._alarm = Alarm(line.after, self._maintain)

    def start(self, bootstraps: Iterable[bytes], then: Callable[[], None]) -> None:
        """Greets the bootstraps, and then starts the loops; `then` is called in between."""
        self._bootstraps = list(bootstraps)
        self.hear(self._bootstraps)

        def loops(_: bool) -> None:
            self._meet_more()
            then()
            self._line.after(FIRST_LOOK_UP_SECONDS if self.view else 0.0, self._look_up)
            self._alarm.wait(MAINTAIN_SECONDS if self.view else ALONE_SECONDS)

        self._greet_all(self.strangers(HEARD_SIZE), loops)

    def hear(self, peers: Iterable[bytes]) -> bool:
        """Remembers peers that somebody mentioned; returns whether any was not known at all."""
        news = False
        for peer in peers:
            self._retries.named(peer)
            if peer == self._line.id or peer in self._heard:
                continue
            if len(self._heard) >= HEARD_SIZE:
                self._forget(self._rng.choice(list(self._heard)))
            news |= peer not in self.view
            self._heard[peer] = None
        return news

    @property
    def settled(self) -> bool:
        """As `Swarm._settled`: whether there are peers enough not to hurry to meet more."""
        return not self._eager and len(self.view) >= ENOUGH_PEERS

    def hear_told(self, peers: Iterable[bytes]) -> None:
        """What others told of others."""
        if self.hear(peers) and not self.settled:
            self._alarm.set()

    def refused(self, peer: bytes, then: Callable[[bool], None]) -> None:
        """A peer of the view answered that it does not know this node (any more)."""
        if self.settled:
            self.view.pop(peer, None)
            then(False)
        else:
            self.greet(peer, then)

    def lost(self, peer: bytes) -> None:
        """A call failed; the peer may have left the view with it."""
        if peer not in self.view:
            self._alarm.set()

    def called(self, peer: bytes) -> None:
        """As `Membership.called`: a peer that was met, and lost since, calls."""
        if self.settled or peer in self.view or peer not in self._met:
            return
        self.hear([peer])
        if not self._retries.seconds(peer):
            self._alarm.set()

    def strangers(self, count: int) -> list[bytes]:
        """As `Membership.strangers`."""
        found = [peer for peer in self._heard if peer not in self.view and not self._retries.seconds(peer)]
        self._rng.shuffle(found)
        found.sort(key=lambda peer: (peer not in self._bootstraps, peer not in self._met, self._retries.times(peer)))
        return found[:count]

    def greet(self, peer: bytes, then: Callable[[bool], None]) -> None:
        """Dials a peer if there is no connection, and shakes hands; tells `then` whether it is now in the view."""
        answered = False

        def late() -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._in_vain(peer)
                then(False)

        def met(told: list[bytes]) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._admit(peer)
                self.hear(told)
                self._gossip.forget_peer(peer)
                then(True)

        def shake() -> None:
            self._line.after(HANDSHAKE_SECONDS, late)
            if peer in self._network.nodes:
                other = self._network.nodes[peer].contacts
                args = (self._line.id, met)
                self._network.send(self._line, peer, MEMBERSHIP, self._hello_bytes, other.on_handshake, *args)

        self._line.meter.counts["handshakes"] += 1
        if self._network.connected(self._line, peer):
            shake()
        elif not self._network.addresses[peer]:
            late()
        elif self._network.dial(self._line, peer):
            self._line.after(self._network.dial_seconds(), shake)
        else:
            self._line.after(DIAL_SECONDS, late)

    def on_handshake(self, peer: bytes, met: Callable[[list[bytes]], None]) -> None:
        known = peer in self.view
        self._admit(peer)
        told = self.some(PEERS_IN_A_HANDSHAKE, peer)
        answer = ftis_pb2.Handshake()
        answer.MergeFrom(self._hello)
        answer.peers.extend(self.addresses(told))
        self._gossip.forget_peer(peer)
        if not known and not self.settled:
            self._poke()
            self._alarm.set()
        self._network.send(self._line, peer, MEMBERSHIP, answer.ByteSize(), met, told)

    def failed(self, peer: bytes) -> None:
        contact = self.view.get(peer)
        if contact is not None:
            contact.failures += 1
            if contact.failures >= GIVE_UP_AFTER and self._network.scheduler.now - contact.seen > GIVE_UP_SECONDS:
                del self.view[peer]
                if self._network.addresses[peer]:
                    self.hear([peer])

    def answered(self, peer: bytes) -> None:
        contact = self.view.get(peer)
        if contact is not None:
            contact.failures, contact.seen = 0, self._network.scheduler.now

    def some(self, count: int, besides: bytes) -> list[bytes]:
        """Some peers of the view that can be dialled, to tell another."""
        peers = [peer for peer in self.view if peer != besides and self._network.addresses[peer]]
        return self._rng.sample(peers, min(count, len(peers)))

    def addresses(self, peers: Iterable[bytes]) -> list[str]:
        return [text for peer in peers for text in self._network.addresses[peer][:ADDRESSES_TOLD]]

    def has_met(self, peer: bytes) -> bool:
        """As `Membership.limits`: whether it may ask."""
        return peer in self._met

    def _admit(self, peer: bytes) -> None:
        self._retries.forget(peer)
        self._met.pop(peer, None)
        while len(self._met) >= MET_SIZE:
            del self._met[next(met for met in self._met if met not in self.view)]
        self._met[peer] = None
        if peer not in self.view and len(self.view) >= VIEW_SIZE:
            del self.view[self._rng.choice(list(self.view))]
        self.view[peer] = Contact(self._network.scheduler.now)
        if self._network.addresses[peer]:
            self._forget(peer)
            self.hear([peer])

    def _in_vain(self, peer: bytes) -> None:
        if peer not in self._heard:
            return
        times = self._retries.failed(peer)
        if peer not in self._bootstraps and times >= (TRIES_OF_MET if peer in self._met else GIVE_UP_AFTER):
            self._forget(peer)

    def _forget(self, peer: bytes) -> None:
        self._heard.pop(peer, None)
        self._retries.forget(peer)

    def _greet_all(self, peers: list[bytes], then: Callable[[bool], None]) -> None:
        """Greets them at once; tells `then`, when all have answered or not, whether any was met."""
        if not peers:
            then(False)
            return
        answers: list[bool] = []

        def one(met: bool) -> None:
            answers.append(met)
            if len(answers) == len(peers):
                then(any(answers))

        for peer in peers:
            self.greet(peer, one)

    def _maintain(self) -> None:
        if not self.settled:
            self.hear(self._bootstraps)
            self._line.meter.counts["look_ups"] += 1
        if not self.view:
            for peer in self._bootstraps:
                self._retries.forget(peer)
            self.hear(self._network.some_dialable(HEARD_SIZE))
        self._greet_all(self.strangers(1 if self.settled else self._at_once), self._maintained)

    def _maintained(self, met: bool) -> None:
        if met and not self.settled:
            self._poke()
            self._meet_more()
        self._line.after(AFTER_GREETING_SECONDS, self._wait)

    def _wait(self) -> None:
        """As `Swarm._leisure`."""
        waits = (self._retries.seconds(peer) for peer in self._heard if not self.settled and peer not in self.view)
        patience = min(filter(None, waits), default=MAINTAIN_SECONDS)
        self._alarm.wait(min(MAINTAIN_SECONDS, patience) if self.view else ALONE_SECONDS)

    def _meet_more(self) -> None:
        if len(self.view) < ENOUGH_PEERS and self.strangers(1):
            self._alarm.set()

    def _look_up(self) -> None:
        """As `Swarm._record_loop`; what it costs those who answer is in `lab.simulation.directory`."""
        if not self.settled:
            self._line.meter.counts["look_ups"] += 1
            self.hear_told(self._network.some_dialable(HEARD_SIZE))
        self._line.after(SETTLED_RECORD_SECONDS if self.settled else RECORD_SECONDS, self._look_up)
