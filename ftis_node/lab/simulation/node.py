"""One simulated node: its end of the network, its swarm, its steps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from ftis_node.lab.simulation.contacts import Contacts
from ftis_node.lab.simulation.exchanging import Exchanging
from ftis_node.lab.simulation.network import Line, Network
from ftis_node.lab.simulation.pulling import Pulling
from ftis_node.lab.simulation.rhythm import Rhythm
from ftis_node.lab.simulation.scenario import Scenario, draw_machine
from ftis_node.lab.simulation.store import SimulatedStore
from ftis_node.lab.simulation.tally import Tally
from ftis_node.lab.simulation.uploads import Reply, SimulatedUploads
from ftis_node.lab.simulation.wire import RUN, Reader, SharedTable, draw_addresses
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.gossip import Gossip
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.pool import Want
from ftis_node.swarm.standing import Standing


class SimulatedNode:
    """A node, and to its parts and its stepper what `Swarm` is in the daemon."""

    interval = 1.0  # as `Swarm` begins with

    def __init__(
        self, scenario: Scenario, network: Network, reader: Reader, tally: Tally, identity: Identity, rng: random.Random
    ) -> None:
        settings, clock = scenario.settings, network.scheduler.clock
        machine = draw_machine(scenario, rng)
        addresses = () if machine.outbound_only else draw_addresses(identity.peer_id, rng)
        self.line = line = Line(network.scheduler, identity.author, addresses, machine)
        self.store = SimulatedStore()
        self._identity = identity
        table = SharedTable(settings.max_age, clock, rng, reader)
        standing = Standing(clock)
        self.gossip = Gossip(table, RUN, identity.author, standing, self.store.seen, self.news, decode=reader)
        self.contacts = Contacts(
            line,
            network,
            self.gossip,
            rng,
            at_once=settings.exchange_peers,
            eager=scenario.eager,
            poke=self.poke,
        )
        self.exchanging = Exchanging(self, line, network, rng, peers=settings.exchange_peers)
        self.stepper = Rhythm(
            identity=identity,
            settings=settings,
            store=self.store,
            standing=standing,
            line=line,
            scheduler=network.scheduler,
            swarm=self,
            tally=tally,
            rng=rng,
            packet_bytes=scenario.packet_bytes,
            signal=scenario.signal,
        )
        self.pulling = Pulling(self, line, network, rng, self.stepper.on_bodies)
        self._uploads = SimulatedUploads(line, network, self.store, settings.upload_mbit * 1e6 / 8)

    def start(self, bootstraps: Sequence[bytes], *, midway: bool) -> None:
        """Greets the bootstraps; when they have answered, the loops and the first step begin.

        Args:
            midway: the node has trained before and is in the middle of a step.
        """

        def loops() -> None:
            self.exchanging.start()
            self.pulling.start()
            if midway:
                self.stepper.begin_midway()
            else:
                self.stepper.begin()

        self.contacts.start(bootstraps, loops)

    def want(self) -> Want:
        return self.stepper.want()

    def announce(self, round: int, policy_step: int, packets: Sequence[PacketRef]) -> None:
        self.gossip.announce(
            announce(
                self._identity,
                run_id=RUN.id,
                round=round,
                policy_step=policy_step,
                issued_at=int(time.time()),
                packets=packets,
            )
        )
        self.exchanging.tell()

    def poke(self) -> None:
        self.pulling.news()
        self.exchanging.tell()

    def news(self) -> None:
        """Something to pull."""
        self.pulling.news()

    def recent_authors(self, seconds: float) -> set[bytes]:
        return self.gossip.table.recent_authors(seconds) - {self._identity.author}

    def has_peers(self) -> bool:
        return bool(self.contacts.view)

    def on_fetch(self, digests: list[bytes], peer: bytes, reply: Reply) -> None:
        if self.contacts.has_met(peer):
            self._uploads.serve(digests, peer, reply)
        else:
            self._uploads.refuse(digests, peer, reply)
