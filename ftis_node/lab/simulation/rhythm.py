"""A node's steps: the daemon's `Stepper` over a compute process that has no model."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.simulation.scenario import Machine, Scenario
from ftis_node.lab.simulation.store import RUN, make_packet, rewards
from ftis_node.lab.simulation.tally import Step, Tally
from ftis_node.node.demand import OWN_SHARE_FLOOR
from ftis_node.node.step_batch import StepBatch
from ftis_node.node.stepper import Stepper, exchange_interval
from ftis_node.node.vertical import VerticalSource
from ftis_node.packet import Packet, decode
from ftis_node.step_report import StepFigures, StepReport, TakenStep
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.reputation import Reputation
from ftis_node.worker.messages import Answer, Generate, Generated, Request, ScoredPacket, ScoreGroup
from ftis_node.worker.messages import Step as TrainingStep

if TYPE_CHECKING:
    from ftis_node.lab.simulation.node import SimulatedNode

# The figures that training on an honest author's samples shows: its claims hold. See `swarm.claims`.
_HONEST = {"tokens": 400.0, "excess": 0.0, "excess_squares": 1.0, "surprising": 0.0, "likelihood": -1.0}
_FIGURES = {"loss_share": 0.0, "loss_weight": 0.0, **_HONEST}


class ModelledCompute:
    """A compute process whose work only takes time. Scoring takes none."""

    def __init__(self, machine: Machine, rng: random.Random, scenario: Scenario) -> None:
        self._machine = machine
        self._rng = rng
        self._scenario = scenario

    async def call(self, request: Request[Answer]) -> Answer:
        """`worker.client.Worker.call` for the requests of a stepper."""
        return cast(Answer, await self._answer(request))

    async def _answer(self, request: Request[Any]) -> Generated | StepReport | list[float]:
        if isinstance(request, Generate):
            seconds = len(request.rows) * self._machine.group_seconds
            await asyncio.sleep(seconds)
            return Generated([self._made(request, slot) for slot in range(len(request.rows))], seconds, sys.maxsize)
        if isinstance(request, TrainingStep):
            await asyncio.sleep(self._machine.train_seconds)
            samples = Counter[str]()
            for part in (part for group in request.groups for part in group.parts):
                samples[part.source] += len(part.rewards)
            sources = {source: {"samples": float(count), **_FIGURES} for source, count in samples.items()}
            return StepReport(0.0, 0.0, 0, self._machine.train_seconds, diagnostics=StepFigures(sources=sources))
        if isinstance(request, ScoreGroup):
            packet = decode(request.packet)
            assert isinstance(packet, Packet)
            return rewards(packet)
        raise NotImplementedError(request.op)

    def _made(self, request: Generate, slot: int) -> ScoredPacket:
        signal = self._rng.random() < self._scenario.signal
        right = RUN.group // 2 if signal else RUN.group * (self._rng.random() >= self._scenario.failed)
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

    def __init__(
        self,
        node: SimulatedNode,
        identity: Identity,
        context: AdmissionContext,
        reputation: Reputation,
        tally: Tally,
        rng: random.Random,
    ) -> None:
        self._machine = node.transport.machine
        super().__init__(
            context=context,
            own_only=False,
            identity=identity,
            settings=tally.scenario.settings,
            store=cast(PacketStore, node.store),
            worker=ModelledCompute(self._machine, rng, tally.scenario),
            reputation=reputation,
            swarm=node.swarm,
            clock=boot_seconds,
        )
        self.source = self._planning = PlannedSource(self, rng)
        self._tally = tally
        self._rng = rng

    async def live(self, *, midway: bool) -> None:
        """Takes steps for ever.

        Args:
            midway: it has trained among others before: it announces its share of a step, and is in the middle of it.
        """
        if midway:
            quota = math.ceil(OWN_SHARE_FLOOR * self.settings.batch_groups)
            seconds = quota * self._machine.group_seconds + self._machine.train_seconds
            self._step_seconds.append(seconds)
            self.swarm.interval = exchange_interval(seconds)
            await self.generate(quota)
            await asyncio.sleep(self._rng.random() * seconds)
        stopping = asyncio.Event()
        while True:
            await self.step(stopping)

    async def train(self, batch: StepBatch, began: float) -> TakenStep:
        now = self.clock()
        step = Step(
            wanted=self.settings.batch_groups - self._planning.planned,
            taken=[scored.group.key for scored in batch.foreign],
            ages=[now - scored.born for scored in batch.foreign],
            waited=batch.wait,
        )
        taken = await super().train(batch, began)
        self._tally.add_step(self._machine, step, taken.seconds.total)
        return taken
