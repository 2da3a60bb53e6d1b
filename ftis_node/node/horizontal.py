"""The batches of a horizontal run: own parts, the others' parts, and groups that the node closes for itself.

A step makes parts until enough groups can be closed, and makes at most as many as a node alone would need for its whole
batch. Then it waits as little as any step, and takes the fullest groups as they are. So a peer that is dead, slow or
hostile costs parts and no time.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftis_node.node.demand import WAIT_SECONDS, waiting_in
from ftis_node.node.step_batch import OwnGroup, StepBatch
from ftis_node.swarm.common_rows import OwnSlots
from ftis_node.swarm.parts import Key, Parts, key_of
from ftis_node.swarm.pool import Newcomers, Scored, Want

if TYPE_CHECKING:
    from ftis_node.node.stepper import Stepper


class HorizontalSource:
    """As `VerticalSource`: batches of groups that are made of several authors' parts. All counts are parts."""

    def __init__(self, node: Stepper, rng: random.Random | None) -> None:
        self.parts = Parts(node.run, node.age_clock, rng, node.takes)
        self.pool = self.parts.pool
        self._node = node
        self._slots = OwnSlots(node.run, node.author)
        self._mine: dict[Key, OwnGroup] = {}  # own parts of open groups

    @property
    def _whole(self) -> int:
        """The parts of a batch, however many groups they make."""
        return self._node.batch_groups * self._node.run.parts

    def _epoch(self) -> int:
        return self._node.run.epoch_at(self._node.unix())

    def add(self, scored: Scored) -> bool:
        return self.parts.add(scored)

    def want(self) -> Want:
        """As `VerticalSource.want`: first parts of groups that have an own part, then of those that may get one."""
        newcomers = self._newcomers()
        most = 2 * self._whole
        waiting = waiting_in(self.pool, newcomers)
        if (room := waiting.left(2)) is not None:
            newcomers.room = max(0, room)
        epochs = (self._epoch(), max(0, self._epoch() - 1))
        others = (key for epoch in epochs for key in self._keys(epoch) if not self.parts.closed(key))
        rows = dict.fromkeys(row for _, row in (*self.parts.fullest(self._mine), *others))
        return Want(most - waiting.groups - len(self._node.scoring), newcomers, most, rows)

    def _keys(self, epoch: int) -> list[Key]:
        """The groups of an epoch by their slots."""
        run = self._node.run
        row_of = self._node.context.row_of
        return [(epoch, row_of(b"", 0, slot, epoch * run.epoch)) for slot in range(run.slots)]

    def _newcomers(self) -> Newcomers:
        """The room in a batch that all authors without a record share, in parts."""
        newcomers = self._node.newcomers()
        if newcomers.room is not None:
            newcomers.room *= self._node.run.parts
        return newcomers

    def slots(self, count: int, issued_at: int) -> list[int]:
        """As `VerticalSource.slots`. Only parts that were admitted say what goes first, for an announcement costs its
        author nothing."""
        counts = self.parts.counts(self._newcomers())
        run = self._node.run
        keys = self._keys(run.epoch_at(issued_at))
        admitted = [run.parts if self.parts.closed(key) else counts[key] for key in keys]
        return self._slots.take(count, issued_at, dict(enumerate(admitted)))

    # --- the batch ------------------------------------------------------------------------------------------------

    async def batch(self, stopping: asyncio.Event) -> StepBatch | None:
        """As `VerticalSource.batch`."""
        node = self._node
        node.raise_failed()
        made = 0
        most = self._most()
        while not node.pressed(stopping) and made < most and self._lacking():
            parts = await node.generate(min(most - made, math.ceil(node.batch_groups / 2)))
            made += len(parts)
            self._mine |= {key: one for one in parts if not self.parts.closed(key := key_of(one.group))}
            node.swarm.wake()
            if not parts:  # the epoch has no more rows
                break
        generated = node.clock()
        if not node.own_only:
            await self._wait(stopping)
        if stopping.is_set() or (most == 0 and self._lacking()):
            return None
        own, foreign = self._take(self._newcomers())
        if own or foreign:
            return StepBatch(own, foreign, wait=node.clock() - generated)
        if not node.flush.is_set():  # the epoch's rows are all answered and trained on
            node.waiting_for = "the rows of the next epoch"
            await node.arrival(stopping)
            node.waiting_for = ""
        return None

    def _most(self) -> int:
        """The most own parts of a step: as many as fill a batch, or the share that the settings give."""
        share = self._node.settings.own_share
        return math.ceil((1.0 if share is None else share) * self._whole)

    def _lacking(self) -> int:
        """The parts that the groups that can be closed lack to fill a batch."""
        waiting = self.parts.by_group()
        ready = self.parts.ready(self._mine, self._epoch())
        return max(0, self._whole - sum(len(waiting.get(key, ())) + (key in self._mine) for key in ready))

    async def _wait(self, stopping: asyncio.Event) -> None:
        """Wait for parts, at most as long as making the missing ones would take, or a node's share of a batch."""
        node = self._node
        share = min(self._lacking(), node.batch_groups)  # of each group one part
        deadline = node.clock() + (WAIT_SECONDS if node.settings.own_share == 0 else node.patience(share))
        while not node.pressed(stopping) and self._lacking() and node.clock() < deadline:
            await node.arrival(stopping, deadline - node.clock())

    def _take(self, newcomers: Newcomers) -> tuple[list[OwnGroup], list[Scored]]:
        """Close groups until a batch is full: those that are ready, then the fullest. A group without a signal counts
        if this node made a part of it, as in other runs."""
        ready = self.parts.ready(self._mine, self._epoch())
        own: list[OwnGroup] = []
        foreign: list[Scored] = []
        for key in dict.fromkeys((*ready, *self.parts.fullest(self._mine))):
            if len(own) + len(foreign) >= self._whole:
                break
            mine = self._mine.pop(key, None)
            theirs = self.parts.close(key, newcomers)
            if mine is None and not _signal(theirs):
                self._node.store.settle([one.group.key for one in theirs], "no-signal")
                continue
            own += [mine] if mine is not None else []
            foreign += theirs
        return own, foreign


def _signal(parts: Sequence[Scored]) -> bool:
    """Whether the rewards of a group differ."""
    return len({reward for one in parts for reward in one.rewards}) > 1
