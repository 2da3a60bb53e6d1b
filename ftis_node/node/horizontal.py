"""The steps of a node in a horizontal run: its own parts, the others' parts, and groups that it closes for itself.

A step makes parts until enough groups can be closed, and makes at most as many as a node alone would need for its whole
batch. Then it waits as little as any step, and takes the fullest groups as they are. So a peer that is dead, slow or
hostile costs parts and no time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from ftis_node.config.settings import Settings
from ftis_node.node.step_batch import OwnGroup
from ftis_node.node.stepper import WAIT_SECONDS, Stepper, first_of
from ftis_node.step_report import TakenStep
from ftis_node.swarm.parts import EPOCHS, Key, Parts, key_of
from ftis_node.swarm.pool import Newcomers, Pool, Scored, Want


class HorizontalStepper(Stepper):
    """Assembles batches of groups that are made of several authors' parts."""

    def __init__(self, *, pool: Pool | None, **rest: Any) -> None:
        assert isinstance(pool, Parts)
        super().__init__(pool=pool, **rest)
        self._parts = pool
        self._mine: dict[Key, OwnGroup] = {}  # own parts of open groups

    @property
    def _completions(self) -> int:
        """Completions of a batch, however many groups they make."""
        return self.batch_groups * self.run.group

    def _epoch(self) -> int:
        return self.run.epoch_at(self._unix())

    # --- foreign parts --------------------------------------------------------------------------------------------

    def want(self) -> Want:
        """The parts to pull: first those of groups that have an own part, then those that may get one."""
        if self.own_only or self.resting:
            return Want(0, Newcomers(), 0)
        most = 2 * self._completions // self.run.completions
        waiting, newcomers = self.pool.waiting(), self._newcomers()
        if newcomers.room is not None:
            newcomers.room = max(0, 2 * newcomers.room - self._of_newcomers(waiting))
        epochs = (self._epoch(), max(0, self._epoch() - 1))
        others = (key for epoch in epochs for key in self._keys(epoch) if not self._parts.closed(key))
        rows = dict.fromkeys(row for _, row in (*self._parts.fullest(self._mine), *others))
        return Want(0, newcomers, most, most - sum(waiting.values()) - len(self._scoring), rows)

    def _keys(self, epoch: int) -> list[Key]:
        """The groups of an epoch by their slots."""
        issued_at = epoch * self.run.epoch
        return [(epoch, self._context.row_of(b"", 0, slot, issued_at)) for slot in range(self.run.slots)]

    def _newcomers(self) -> Newcomers:
        """The room in a batch that all authors without a record share, in parts."""
        newcomers = super()._newcomers()
        if newcomers.room is not None:
            newcomers.room *= self.run.parts
        return newcomers

    # --- the step -------------------------------------------------------------------------------------------------

    def _take_slots(self, count: int, unix: int) -> list[int]:
        """Only parts that were admitted say what goes first, for an announcement costs its author nothing."""
        counts, whole = self._parts.counts(self._newcomers()), self.run.parts
        keys = self._keys(self.run.epoch_at(unix))
        admitted = [whole if self._parts.closed(key) else counts[key] for key in keys]
        return self._slots.take_parts(count, unix, dict(enumerate(admitted)))

    async def generate(self, count: int) -> list[OwnGroup]:
        """Make and announce `count` parts, fewer where the epoch has no more rows."""
        made = await super().generate(count)
        for one in made:
            if not self._parts.closed(key_of(one.group)):
                self._mine[key_of(one.group)] = one
        return made

    async def step(self, stopping: asyncio.Event) -> TakenStep | None:
        """As `Stepper.step`."""
        self._raise_failed()
        began = self._clock()
        made, most = 0, self._most()
        while not (stopping.is_set() or self.hurry.is_set()) and made < most and not self._enough():
            parts = await self.generate(min(most - made, math.ceil(self.batch_groups / 2)))
            made += len(parts)
            self.swarm.poke()
            if not parts:
                break
        generated = self._clock()
        if not self.own_only:
            await self._wait(stopping)
        if stopping.is_set() or (most == 0 and not self._enough()):
            return None
        own, foreign = self._take(self._newcomers())
        waited = self._clock() - generated
        if not own and not foreign:
            if not self.hurry.is_set():  # the epoch's rows are all answered and trained on
                self.waiting_for = "the rows of the next epoch"
                await first_of(self._pool_grew, stopping, self.hurry, seconds=WAIT_SECONDS)
                self.waiting_for = ""
            return None
        self.swarm.poke()
        return await self.train(own, foreign, began=began, wait=waited)

    def _most(self) -> int:
        """The most own parts of a step: as many as fill a batch, or the share that the settings give."""
        share = self.settings.own_share
        return math.ceil((1.0 if share is None else share) * self._completions / self.run.completions)

    def _lacking(self) -> int:
        """The parts that the groups that can be closed lack to fill a batch."""
        waiting = self._parts.by_group()
        ready = self._parts.ready(self._mine, self._epoch())
        parts = sum(len(waiting.get(key, ())) + (key in self._mine) for key in ready)
        return max(0, math.ceil(self._completions / self.run.completions) - parts)

    def _enough(self) -> bool:
        """Whether the groups that can be closed fill a batch."""
        return not self._lacking()

    async def _wait(self, stopping: asyncio.Event) -> None:
        """Wait for parts, at most as long as making the missing ones would take, or a node's share of a batch."""
        listens, share = self.settings.own_share == 0, self.batch_groups  # in parts: of each group one
        deadline = self._clock() + (WAIT_SECONDS if listens else self._patience(min(self._lacking(), share)))
        while not (stopping.is_set() or self.hurry.is_set() or self._enough()) and self._clock() < deadline:
            left = max(deadline - self._clock(), 0.01)
            await first_of(self._pool_grew, stopping, self.hurry, seconds=min(left, WAIT_SECONDS))
            self._pool_grew.clear()

    def _take(self, newcomers: Newcomers) -> tuple[list[OwnGroup], list[Scored]]:
        """Close groups until a batch is full: those that are ready, then the fullest. A group without a signal counts
        if this node made a part of it, as in other runs."""
        ready = self._parts.ready(self._mine, self._epoch())
        own: list[OwnGroup] = []
        foreign: list[Scored] = []
        for key in dict.fromkeys((*ready, *self._parts.fullest(self._mine))):
            if (len(own) + len(foreign)) * self.run.completions >= self._completions:
                break
            mine, theirs = self._mine.pop(key, None), self._parts.close(key, newcomers)
            if mine is None and not _signal(theirs):
                self._store.settle([one.group.key for one in theirs], "no-signal")
                continue
            own += [mine] if mine is not None else []
            foreign += theirs
        return own, foreign


def needed_age(settings: Settings, stepper: Stepper) -> float | None:
    """Seconds for which a packet may answer a row that the node asks for; None: it asks for none."""
    if stepper.run.parts > 1:
        return float(EPOCHS * stepper.run.epoch)
    return settings.needed_age if stepper.by_need else None


def _signal(parts: Sequence[Scored]) -> bool:
    """Whether the rewards of a group differ."""
    return len({reward for one in parts for reward in one.rewards}) > 1
