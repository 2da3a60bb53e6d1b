"""The batches of a horizontal run: own parts, the others' parts, and groups that the node closes for itself.

A step makes parts until enough groups can be closed, and makes at most as many as a node alone would need for its whole
batch. Then it waits as little as any step, and takes the fullest groups as they are. So a peer that is dead, slow or
hostile costs parts and no time.
"""

import asyncio
import math
import random
from collections.abc import Sequence

from ftis_node.node.demand import WAIT_SECONDS, waiting_in
from ftis_node.node.inbox import Inbox
from ftis_node.node.maker import Maker
from ftis_node.node.means import Means
from ftis_node.node.step_batch import StepBatch
from ftis_node.swarm.announcement import decode_announcement
from ftis_node.swarm.common_rows import OwnSlots
from ftis_node.swarm.parts import Key, Parts, key_of
from ftis_node.swarm.pool import Newcomers, Pool, Scored, Want


class HorizontalSource:
    """As `VerticalSource`: batches of groups that are made of several authors' parts. All counts are parts, of which a
    group has `Run.parts`. A key is (epoch, row) of a group (`parts.Key`)."""

    def __init__(self, means: Means, rng: random.Random | None) -> None:
        self.parts = Parts(means.run, means.age_clock, rng, means.takes)
        self.inbox = Inbox(means, lambda scored: self.parts.add(scored))
        self.maker = Maker(means, self.slots)
        self._means = means
        self._slots = OwnSlots(means.run, means.author)
        for data, _ in means.store.latest_announced(means.run.epoch):  # by an earlier start: these rows are answered
            made = decode_announcement(data, max_packets=means.run.slots)
            self._slots.take(len(made.packets), made.issued_at, {ref.slot: 1 for ref in made.packets})
        self._mine: dict[Key, Scored] = {}  # own parts of open groups

    @property
    def pool(self) -> Pool:
        """The parts of others that wait."""
        return self.parts.pool

    @property
    def _whole(self) -> int:
        """The parts of a batch, however many groups they make."""
        return self._means.batch_groups * self._means.run.parts

    def _epoch(self) -> int:
        """The present epoch by the wall clock, which may be set back."""
        return self._means.run.epoch_at(self._means.unix())

    def want(self) -> Want:
        """As `VerticalSource.want`, up to two batches: first parts of groups that have an own part, then of those that
        may get one, in this epoch or the one before. The swarm pulls in the order of these rows."""
        newcomers = self._newcomers()
        most = 2 * self._whole
        waiting = waiting_in(self.pool, newcomers)
        newcomers.room = max(0, waiting.left(2))  # of newcomers' parts, those that wait are there already
        keys = self.parts.fullest(self._mine)
        epoch = self._epoch()
        for may_get_one in (epoch, max(0, epoch - 1)):
            keys += [key for key in self._keys(may_get_one) if key not in self.parts.closed]
        rows = dict.fromkeys(row for _, row in keys)
        missing = most - waiting.groups - len(self.inbox.scoring)
        return Want(missing, newcomers, most, rows)

    def _keys(self, epoch: int) -> list[Key]:
        """The groups of an epoch; the index is the slot, from which `slots` reads them."""
        run = self._means.run
        begins = epoch * run.epoch
        row_of = self._means.context.row_of
        return [(epoch, row_of(b"", 0, slot, begins)) for slot in range(run.slots)]

    def _newcomers(self) -> Newcomers:
        """The room in a batch that all authors without a record share, in parts."""
        newcomers = self._means.newcomers()
        newcomers.room *= self._means.run.parts
        return newcomers

    def slots(self, count: int, issued_at: int) -> list[int]:
        """As `VerticalSource.slots`, of the epoch of `issued_at`; ascending, each once in an epoch. Those that others'
        parts wait for come first. Only parts that were admitted say so, for an announcement costs its author
        nothing."""
        run = self._means.run
        admitted = self.parts.counts(self._newcomers())
        by_slot = {}
        for slot, key in enumerate(self._keys(run.epoch_at(issued_at))):
            by_slot[slot] = admitted[key]
            if key in self.parts.closed:
                by_slot[slot] = run.parts
        return self._slots.take(count, issued_at, by_slot)

    # --- the batch ------------------------------------------------------------------------------------------------

    async def batch(self, stopping: asyncio.Event) -> StepBatch | None:
        """As `VerticalSource.batch`, of fewer parts where not enough come. None also if nothing can be closed: then it
        has waited for a moment, and the caller calls again."""
        means = self._means
        self.inbox.raise_failed()
        most = self._most()
        await self._make_parts(most, stopping)
        generated = means.clock()
        if not means.own_only:
            await self._wait(stopping)
        if stopping.is_set() or (most == 0 and self._lacking()):  # a listener takes whole batches only
            return None
        own, foreign = self._take(self._newcomers())
        if own or foreign:
            return StepBatch(own, foreign, wait=means.clock() - generated, key=key_of)
        if not means.flush.is_set():  # the epoch's rows are all answered and trained on
            means.waiting_for = "the rows of the next epoch"
            await self.inbox.arrival(stopping)
            means.waiting_for = ""
        return None

    async def _make_parts(self, most: int, stopping: asyncio.Event) -> None:
        """Make own parts, up to `most`, until enough groups can be closed; a few at a time, so that others' parts
        that arrive meanwhile count. What is not trained on in this step stays for the next."""
        at_a_time = math.ceil(self._means.batch_groups / 2)
        made = 0
        while not self.inbox.hurries(stopping) and made < most and self._lacking():
            parts = await self.maker.generate(min(most - made, at_a_time))
            made += len(parts)
            for one in parts:
                key = key_of(one.group)
                if key not in self.parts.closed:
                    self._mine[key] = one
            self._means.swarm.wake()
            if not parts:  # the epoch has no more rows
                break

    def _most(self) -> int:
        """The most own parts of a step: as many as fill a batch, or the share that the settings give."""
        share = self._means.settings.own_share
        if share is None:
            return self._whole
        return math.ceil(share * self._whole)

    def _lacking(self) -> int:
        """The parts that a batch would lack if every group that can be closed were in it; 0: it would be full."""
        waiting = self.parts.by_group()
        there = 0
        for key in self.parts.ready(self._mine, self._epoch()):
            there += len(waiting.get(key, ())) + (key in self._mine)
        return max(0, self._whole - there)

    async def _wait(self, stopping: asyncio.Event) -> None:
        """Wait for parts, at most as long as making the missing ones would take, or a node's share of a batch; a
        listener waits a quarter of a second, and is called again."""
        means = self._means
        patience = WAIT_SECONDS
        if means.settings.own_share != 0:
            share = min(self._lacking(), means.batch_groups)  # of each group one part
            patience = self.maker.patience(share)
        deadline = means.clock() + patience
        while not self.inbox.hurries(stopping) and self._lacking() and means.clock() < deadline:
            await self.inbox.arrival(stopping, deadline - means.clock())

    def _take(self, newcomers: Newcomers) -> tuple[list[Scored], list[Scored]]:
        """Close groups until a batch is full: those that are ready, then the fullest. A group without a signal counts
        if this node made a part of it, as in other runs. The last group may make it larger. newcomers: counted down."""
        ready = self.parts.ready(self._mine, self._epoch())
        own: list[Scored] = []
        foreign: list[Scored] = []
        for key in dict.fromkeys((*ready, *self.parts.fullest(self._mine))):
            if len(own) + len(foreign) >= self._whole:
                break
            mine = self._mine.pop(key, None)
            theirs = self.parts.close(key, newcomers)
            if mine is not None:
                own.append(mine)
            elif not _signal(theirs):
                self._means.store.settle([one.group.key for one in theirs], "no-signal")
                continue
            foreign += theirs
        return own, foreign


def _signal(parts: Sequence[Scored]) -> bool:
    """Whether the rewards of a group differ."""
    rewards = {reward for one in parts for reward in one.rewards}
    return len(rewards) > 1
