"""A node's steps: the daemon's `Stepper`, whose generating, scoring and training are times and no models."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from ftis_node.config.settings import Settings
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.lab.simulation.scenario import Machine
from ftis_node.lab.simulation.store import CONTEXT, SimulatedStore, make_packet, packet_ref, rewards
from ftis_node.lab.simulation.tally import Step, Tally
from ftis_node.node.stepper import OWN_SHARE_FLOOR, OwnGroup, Stepper, exchange_interval
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.pool import Pool, Scored
from ftis_node.swarm.standing import Standing
from ftis_node.swarm.table import Arrival

COMPLETIONS = CONTEXT.run.completions
# The figures that training on an honest author's samples shows: its claims hold. See `swarm.claims`.
_HONEST = {"tokens": 400.0, "excess": 0.0, "excess_squares": 1.0, "surprising": 0.0, "likelihood": -1.0}


class NoCompute:
    """There is no model in here."""

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        raise NotImplementedError(op)


class Rhythm(Stepper):
    """Generates, gathers, trains, again and again. Scoring takes no time."""

    def __init__(
        self,
        *,
        identity: Identity,
        settings: Settings,
        store: SimulatedStore,
        standing: Standing,
        machine: Machine,
        tally: Tally,
        rng: random.Random,
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
            clock=boot_seconds,
            pool=Pool(settings.max_age, boot_seconds, rng),
        )
        self._held = store
        self._machine = machine
        self._tally = tally
        self._rng = rng
        self._signal = signal
        self._round = int(1000 * unix_seconds())

    async def live(self, *, midway: bool) -> None:
        """Takes steps for ever.

        Args:
            midway: it has trained among others before: it announces its share of a step, and is in the middle of it.
        """
        if midway:
            quota = math.ceil(OWN_SHARE_FLOOR * self._settings.batch_groups)
            seconds = quota * self._machine.group_seconds + self._machine.train_seconds
            self._paced(seconds)
            await self.generate(quota)
            await asyncio.sleep(self._rng.random() * seconds)
        stopping = asyncio.Event()
        while True:
            await self.step(stopping)

    async def on_groups(self, arrived: Sequence[Arrival]) -> None:
        self._held.arrive(arrived)
        for one in arrived:
            scored = Scored(one.group, rewards(one.group.packet), one.born)
            self.standing.scored(one.group.author, scored.rewards, signal=scored.has_signal)
            if self.standing.banned(one.group.author) is None and self.pool.add(scored):
                self._pool_grew.set()

    async def _generate_round(self, count: int) -> list[OwnGroup]:
        await asyncio.sleep(count * self._machine.group_seconds)
        self._group_seconds.append(self._machine.group_seconds)
        author, number = self._identity.author, self._round
        self._round += 1
        made = [
            make_packet(author, number, slot, self.progress.step, signal=self._rng.random() < self._signal)
            for slot in range(count)
        ]
        self._held.add(made)
        refs = [packet_ref(slot, body) for slot, (_, body) in enumerate(made)]
        self.swarm.announce(number, self.progress.step, refs)
        return [OwnGroup(group, {}, rewards(group.packet)) for group, _ in made]

    async def train(
        self, own: Sequence[OwnGroup], foreign: Sequence[Scored], *, began: float, wait: float = 0.0
    ) -> dict[str, Any]:
        now = self._clock()
        step = Step(
            wanted=self._settings.batch_groups - self._planned,
            taken=[scored.group.key for scored in foreign],
            ages=[now - scored.born for scored in foreign],
            waited=wait,
        )
        await asyncio.sleep(self._machine.train_seconds)
        for author, groups in Counter(scored.group.author for scored in foreign).items():
            samples = groups * COMPLETIONS
            self.standing.trained(author, groups, {"samples": samples, "loss_share": 0.0, **_HONEST})
        seconds = self._clock() - began
        self._paced(seconds)
        self.progress.step += 1
        self._tally.add_step(self._machine, step, seconds)
        return {}

    def own_quota(self) -> int:
        self._planned = super().own_quota()
        return self._planned

    def _paced(self, seconds: float) -> None:
        """As `Stepper.train` notes a step's duration."""
        self._step_seconds.append(seconds)
        self.swarm.interval = exchange_interval(self.step_seconds())
