"""One simulated node: the daemon's `Swarm` on its end of the network, and its steps."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

from ftis_node.config.run import RunFile
from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.simulation.announcements import Reader
from ftis_node.lab.simulation.network import MemoryTransport, Meter, Network
from ftis_node.lab.simulation.rhythm import Rhythm
from ftis_node.lab.simulation.scenario import draw_machine
from ftis_node.lab.simulation.store import RUN, SimulatedStore
from ftis_node.lab.simulation.tally import Tally
from ftis_node.node.batch_source import needed_age
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.needs import RowState
from ftis_node.swarm.pulling import Trade
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.swarm import ENOUGH_PEERS, Swarm
from ftis_node.swarm.table import Outcome
from ftis_node.swarm.traffic import Traffic

RUN_FILE = RunFile(run=RUN)


class ScaledTraffic(Traffic):
    """Packets count as much as in `Network.packet_scale`."""

    def __init__(self, upload_bytes: float, recorded: Callable[[bytes], bool], scale: float) -> None:
        super().__init__(upload_bytes, recorded)
        self._scale = scale

    def packet(self, peer: bytes, size: int) -> None:
        self.send(peer, round(size * self._scale))


class SimulatedNode:
    """A node from its start until it leaves."""

    def __init__(
        self, context: AdmissionContext, network: Network, reader: Reader, tally: Tally, rng: random.Random
    ) -> None:
        scenario, settings = tally.scenario, tally.scenario.settings
        identity = Identity(rng.randbytes(32))
        machine = draw_machine(scenario, rng)
        addresses = () if machine.outbound_only else draw_addresses(identity.peer_id, rng)
        self.transport = MemoryTransport(network, identity.author, machine, addresses)
        self.store = SimulatedStore()
        reputation = Reputation(boot_seconds)
        self.swarm = Swarm(
            transport=self.transport,
            identity=identity,
            run_file=RUN_FILE,
            reputation=reputation,
            max_age=settings.max_age,
            trade=Trade(
                context,
                self.store,
                lambda: self.stepper.want(),
                lambda arrived: self.stepper.on_groups(arrived),
                needed_age(RUN, settings, own_only=False),
            ),
            traffic=ScaledTraffic(settings.upload_mbit * 1e6 / 8, reputation.established, network.packet_scale),
            enough_peers=float("inf") if scenario.eager else ENOUGH_PEERS,
            decode=reader,
            rng=rng,
        )
        self.stepper = Rhythm(self, identity, context, reputation, tally, rng)
        self._counted = Counter[str]()  # of the swarm's gossip, before the figures count
        self._life: asyncio.Task[None] | None = None

    def start(self, bootstraps: Sequence[str], *, midway: bool) -> asyncio.Task[None]:
        """Greets the bootstraps; when they have answered, the first step begins. Returns the task that does so.

        Args:
            midway: the node has trained before and is in the middle of a step.
        """
        self._life = asyncio.create_task(self._live(bootstraps, midway))
        return self._life

    async def leave(self) -> None:
        """Is gone at once; its own tasks end too."""
        self.transport.leave()
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait({self._life})
        await self.swarm.close()

    def count_from_now(self) -> None:
        """Nothing before this counts for the figures."""
        self.transport.meter = Meter(boot_seconds())
        self._counted = self.swarm.gossip.counts.copy()

    def entries(self) -> tuple[int, int]:
        """Announcements that came whole, and how many of them were new."""
        counts = self.swarm.gossip.counts
        came = sum(counts[outcome] - self._counted[outcome] for outcome in counts if outcome not in NO_ENTRIES)
        return came, counts[Outcome.NEW] - self._counted[Outcome.NEW]

    def rows(self) -> tuple[int, int]:
        """Rows on which all own answers failed, and those of them that it learned from others."""
        needs = self.stepper.progress.needs
        return needs.count(*RowState), needs.count(RowState.LEARNED, RowState.DONE)

    async def _live(self, bootstraps: Sequence[str], midway: bool) -> None:
        await self.swarm.start(bootstraps)
        await self.stepper.live(midway=midway)


NO_ENTRIES = (Outcome.UNASKED, Outcome.OVER_LIMITS)  # of `Gossip.counts`


def draw_addresses(peer: str, rng: random.Random) -> tuple[str, ...]:
    """Two public addresses as libp2p writes them, over TCP and QUIC."""
    host = ".".join(str(rng.randint(*ends)) for ends in ((11, 99), (1, 254), (1, 254), (1, 254)))
    port = rng.randint(1024, 65535)
    return (f"/ip4/{host}/tcp/{port}/p2p/{peer}", f"/ip4/{host}/udp/{port}/quic-v1/p2p/{peer}")
