"""One simulated node: the daemon's `Swarm` on its end of the network, and the daemon's `Stepper` over a compute process
that has no model."""

import asyncio
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ftis_node.config.run import RunFile
from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.exchange import trade_of
from ftis_node.lab.simulation.network import MemoryTransport, Network
from ftis_node.lab.simulation.scenario import Machine, draw_machine
from ftis_node.lab.simulation.store import CONTEXT, RUN, Reader, SimulatedStore, make_packet, rewards
from ftis_node.lab.simulation.tally import Step, Tally
from ftis_node.node.demand import OWN_SHARE_FLOOR
from ftis_node.node.means import Means
from ftis_node.node.step_batch import StepBatch
from ftis_node.node.stepper import Stepper, exchange_interval
from ftis_node.node.vertical import VerticalSource
from ftis_node.packet import Packet, decode
from ftis_node.step_report import StepFigures, StepReport, TakenStep
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.swarm import Swarm
from ftis_node.worker.messages import Answer, Generate, Generated, Request, ScoredPacket, ScoreGroup
from ftis_node.worker.messages import Step as TrainingStep

RUN_FILE = RunFile(run=RUN)


class SimulatedNode:
    """A node from its start until it leaves. It draws its key, machine and addresses from `rng` as it is made, and has
    a place in the network from then on."""

    def __init__(self, network: Network, reader: Reader, tally: Tally, rng: random.Random) -> None:
        scenario = tally.scenario
        settings = scenario.settings
        self.identity = identity = Identity(rng.randbytes(32))
        machine = draw_machine(scenario, rng)
        addresses: tuple[str, ...] = ()
        if not machine.outbound_only:
            addresses = draw_addresses(identity.peer_id, rng)
        self.transport = MemoryTransport(network, identity.author, machine, addresses)
        self.store = cast(PacketStore, SimulatedStore())
        reputation = Reputation(boot_seconds)
        self.swarm = Swarm(
            transport=self.transport,
            identity=identity,
            run_file=RUN_FILE,
            reputation=reputation,
            max_age=settings.max_age,
            trade=trade_of(CONTEXT, self.store, lambda: self.stepper),
            decode=reader,
            rng=rng,
        )
        self.swarm.traffic.limit(settings.upload_mbit * 1e6 / 8)
        self.stepper = Rhythm(self, tally, rng)
        self._life: asyncio.Task[None] | None = None

    def start(self, bootstraps: Sequence[str], *, midway: bool) -> asyncio.Task[None]:
        """Greets the bootstraps; when they have answered, the first step begins. Returns the task that does so, which
        ends only by an error or by `leave`.

        Args:
            midway: the node has trained before and is in the middle of a step.
        """
        self._life = asyncio.create_task(self._live(bootstraps, midway))
        return self._life

    async def leave(self) -> None:
        """Is gone at once, and nobody is told; its own tasks end too. Also for a node that was never started."""
        self.transport.leave()
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait({self._life})
        await self.swarm.close()

    async def _live(self, bootstraps: Sequence[str], midway: bool) -> None:
        """The node's whole life after its start."""
        await self.swarm.start(bootstraps)
        await self.stepper.live(midway=midway)


def draw_addresses(peer: str, rng: random.Random) -> tuple[str, ...]:
    """Two public addresses as libp2p writes them, over TCP and QUIC."""
    host = str(rng.randint(11, 99))
    for _ in range(3):
        host += f".{rng.randint(1, 254)}"
    port = rng.randint(1024, 65535)
    return (f"/ip4/{host}/tcp/{port}/p2p/{peer}", f"/ip4/{host}/udp/{port}/quic-v1/p2p/{peer}")


_FIGURES = {
    "loss_share": 0.0,
    "loss_weight": 0.0,
    # what training on an honest author's samples shows: its claims hold; see `swarm.claims`
    "tokens": 400.0,
    "excess": 0.0,
    "excess_squares": 1.0,
    "surprising": 0.0,
    "likelihood": -1.0,
}


@dataclass
class ModelledCompute:
    """A compute process whose work only takes time. Scoring takes none. signal: the part of groups whose rewards
    differ."""

    machine: Machine
    rng: random.Random
    signal: float

    async def call(self, request: Request[Answer]) -> Answer:
        """`worker.client.Worker.call` for the requests of a stepper."""
        answer: Any
        if isinstance(request, Generate):
            count = len(request.rows)
            seconds = count * self.machine.group_seconds
            await asyncio.sleep(seconds)
            groups = [self._made(request, slot) for slot in range(count)]
            answer = Generated(groups, seconds, generation_batch=sys.maxsize)
        elif isinstance(request, TrainingStep):
            await asyncio.sleep(self.machine.train_seconds)
            samples = Counter[str]()
            for group in request.groups:
                for part in group.parts:
                    samples[part.source] += len(part.rewards)
            sources = {}
            for source, count in samples.items():
                sources[source] = {"samples": float(count), **_FIGURES}
            diagnostics = StepFigures(sources=sources)
            answer = StepReport(0.0, 0.0, 0, self.machine.train_seconds, diagnostics=diagnostics)
        else:
            assert isinstance(request, ScoreGroup)
            answer = rewards(cast(Packet, decode(request.packet)))
        return cast(Answer, answer)

    def _made(self, request: Generate, slot: int) -> ScoredPacket:
        """A packet of which half, or all, is right; all alike is a group without a signal."""
        right = RUN.group
        if self.rng.random() < self.signal:
            right = RUN.group // 2
        packet, body = make_packet(request.author, request.round, slot, request.policy_step, right)
        return ScoredPacket(body, rewards(packet))


class PlannedSource(VerticalSource):
    """Knows the own groups that the latest batch was planned with."""

    planned = 0

    def own_quota(self) -> int:
        self.planned = super().own_quota()
        return self.planned


class Rhythm(Stepper):
    """Takes one step after the other, and notes each for the figures."""

    def __init__(self, node: SimulatedNode, tally: Tally, rng: random.Random) -> None:
        self._machine = node.transport.machine
        means = Means(
            context=CONTEXT,
            own_only=False,
            author=node.identity.author,
            settings=tally.scenario.settings,
            store=node.store,
            worker=ModelledCompute(self._machine, rng, tally.scenario.signal),
            reputation=node.swarm.reputation,
            swarm=node.swarm,
            clock=boot_seconds,
        )
        self._planning = PlannedSource(means, rng)
        super().__init__(means, self._planning)
        self._tally = tally
        self._rng = rng

    async def live(self, *, midway: bool) -> None:
        """Takes steps for ever.

        Args:
            midway: it has trained among others before: it announces its share of a step, and is in the middle of it.
        """
        if midway:
            quota = math.ceil(OWN_SHARE_FLOOR * self.means.settings.batch_groups)
            seconds = quota * self._machine.group_seconds + self._machine.train_seconds
            self.means.pace.steps.append(seconds)
            self.means.swarm.interval = exchange_interval(seconds)
            await self.source.maker.generate(quota)
            await asyncio.sleep(self._rng.random() * seconds)
        stopping = asyncio.Event()
        while True:
            await self.step(stopping)

    async def train(self, batch: StepBatch, began: float) -> TakenStep:
        """As `Stepper.train`, and noted in the tally when it has ended."""
        now = self.means.clock()
        step = Step(
            wanted=self.means.settings.batch_groups - self._planning.planned,
            taken=[scored.group.key for scored in batch.foreign],
            ages=[now - scored.born for scored in batch.foreign],
            waited=batch.wait,
        )
        taken = await super().train(batch, began)
        self._tally.steps.append((self._machine, step, taken.seconds.total))
        return taken
