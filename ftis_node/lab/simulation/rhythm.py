"""A node's steps: `Stepper`, with its coroutines step, generate, train and _gather as events."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import cast

from ftis_node.config.settings import Settings
from ftis_node.lab.bench.packets import make_context
from ftis_node.lab.simulation.network import Line
from ftis_node.lab.simulation.scheduler import Scheduler
from ftis_node.lab.simulation.store import Body, SimulatedStore, make_body
from ftis_node.lab.simulation.tally import Step, Tally
from ftis_node.lab.simulation.wire import RUN
from ftis_node.node.stepper import OWN_SHARE_FLOOR, Exchange, Stepper, exchange_interval
from ftis_node.store.packets import PacketStore
from ftis_node.store.used_rounds import milliseconds
from ftis_node.swarm.announcement import PacketRef
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.pool import Pool, Scored
from ftis_node.swarm.standing import Standing
from ftis_node.worker.messages import Answer, Request

CONTEXT = make_context(RUN)
_DIFFERENT, _EQUAL = (0.0, 1.0), (0.0, 0.0)


class NoCompute:
    """There is no model in here."""

    async def call(self, request: Request[Answer]) -> Answer:
        raise NotImplementedError(request.op)


class Rhythm(Stepper):
    """Generates, gathers, trains, again and again. A batch is what `Pool.take` gave; a step is a time."""

    def __init__(
        self,
        *,
        identity: Identity,
        settings: Settings,
        store: SimulatedStore,
        standing: Standing,
        line: Line,
        scheduler: Scheduler,
        swarm: Exchange,
        tally: Tally,
        rng: random.Random,
        packet_bytes: int,
        signal: float,
    ) -> None:
        super().__init__(
            context=CONTEXT,
            own_only=False,
            identity=identity,
            settings=settings,
            store=cast(PacketStore, store),
            worker=NoCompute(),
            standing=standing,
            clock=scheduler.clock,
        )
        self.pool = Pool(settings.max_age, scheduler.clock, rng)  # set here, for an empty pool counts as none above
        self.swarm = swarm
        self._held = store
        self._line = line
        self._tally = tally
        self._rng = rng
        self._packet_bytes = packet_bytes
        self._signal = signal
        self._round = milliseconds()
        self._gathering = False
        self._turn = 0
        self._foreign: list[Scored] = []
        self._missing_groups = 0
        self._began = self._generated = self._waited = 0.0

    def on_bodies(self, arrived: list[tuple[Body, float]]) -> None:
        """Stores what was pulled; scoring takes no time, so the pool gets it at once."""
        self._held.add(body for body, _ in arrived)
        grew = [
            self.pool.add(Scored(body.group, _DIFFERENT if body.signal else _EQUAL, born)) for body, born in arrived
        ]
        if any(grew) and self._gathering:
            self._take()

    def begin_midway(self) -> None:
        """As if it had trained among others before: it announces its share of a step, and is in the middle of it."""
        machine = self._line.machine
        quota = math.ceil(OWN_SHARE_FLOOR * self._settings.batch_groups)
        seconds = quota * machine.group_seconds + machine.train_seconds
        self._paced(seconds)
        self._made(quota, 0, lambda: self._line.after(self._rng.random() * seconds, self.begin))

    def begin(self) -> None:
        """The next step."""
        self._began = self._clock()
        quota = self.own_quota()
        self._missing_groups = self._settings.batch_groups - quota
        self._make(quota, self._gather_now)

    def _make(self, count: int, then: Callable[[], None]) -> None:
        if count <= 0:
            then()
            return
        now = min(count, self.run.slots)
        self._line.after(now * self._line.machine.group_seconds, self._made, now, count - now, then)

    def _made(self, count: int, left: int, then: Callable[[], None]) -> None:
        self._group_seconds.append(self._line.machine.group_seconds)
        refs: list[PacketRef] = []
        for slot in range(count):
            signal = self._rng.random() < self._signal
            body, ref = make_body(self._identity.author, self._round, slot, self._packet_bytes, signal)
            self._held.add([body])
            refs.append(ref)
        self.swarm.announce(self._round, self.progress.step, refs)
        self._round += 1
        self._make(left, then)

    def _gather_now(self) -> None:
        self._generated = self._clock()
        self._foreign = self.pool.take(self._missing_groups)
        self.swarm.poke()
        missing = self._missing_groups - len(self._foreign)
        patience = self._patience(missing)
        if missing <= 0 or patience <= 0:
            self._gathered()
            return
        self._gathering = True
        self._turn += 1
        self._line.after(patience, self._deadline, self._turn)

    def _take(self) -> None:
        self._foreign += self.pool.take(self._missing_groups - len(self._foreign))
        if len(self._foreign) >= self._missing_groups:
            self._gathered()

    def _deadline(self, turn: int) -> None:
        if self._gathering and turn == self._turn:
            self._gathered()

    def _gathered(self) -> None:
        self._gathering = False
        self._waited = self._clock() - self._generated
        self.note_supply()
        self._make(self._missing(self._settings.batch_groups - self._missing_groups + len(self._foreign)), self._train)

    def _train(self) -> None:
        self.swarm.poke()
        now = self._clock()
        step = Step(
            wanted=self._missing_groups,
            taken=[scored.group.key for scored in self._foreign],
            ages=[now - scored.born for scored in self._foreign],
            waited=self._waited,
        )
        self._line.after(self._line.machine.train_seconds, self._trained, step)

    def _trained(self, step: Step) -> None:
        seconds = self._clock() - self._began
        self._paced(seconds)
        self.progress.step += 1
        self._tally.add_step(self._line, step, seconds)
        self.begin()

    def _paced(self, seconds: float) -> None:
        """As `Stepper.train` notes a step's duration."""
        self._step_seconds.append(seconds)
        self.swarm.interval = exchange_interval(self.step_seconds())
