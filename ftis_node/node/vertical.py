"""The batches of a vertical run: whole groups, each of one author."""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING

from ftis_node.node.demand import Demand, foreign, own_part, waiting_in
from ftis_node.node.step_batch import StepBatch
from ftis_node.swarm.pool import Newcomers, Pool, Scored, Want

if TYPE_CHECKING:
    from ftis_node.node.stepper import Stepper

RECENT_SECONDS = 30.0
PREFETCH_SECONDS = 10.0


class VerticalSource:
    """Own groups first, then those of others from the pool, and own ones again in place of those that do not come.

    pool: the foreign groups that wait.
    """

    def __init__(self, node: Stepper, rng: random.Random | None) -> None:
        self.pool = Pool(node.pooled_age, node.age_clock, rng, takes=node.takes)
        self._node = node
        self._demand = Demand()

    def add(self, scored: Scored) -> bool:
        """Add a foreign group to the pool; False if it is not for training."""
        return self.pool.add(scored)

    def slots(self, count: int, issued_at: int) -> list[int]:
        """The slots of a round of up to `count` own groups, at a unix time; none if there is nothing to make."""
        return list(range(min(count, self._node.run.slots)))

    # --- demand ---------------------------------------------------------------------------------------------------

    def want(self) -> Want:
        """The further foreign groups to pull: for the next step, plus the smaller of 10 s and one step ahead."""
        node = self._node
        batch = node.batch_groups
        seconds = node.step_seconds()
        newcomers = node.newcomers()
        ahead = 1 + min(1.0, PREFETCH_SECONDS / seconds if seconds else 1.0)
        part = batch - self._own_part()
        waiting = waiting_in(self.pool, newcomers)
        waiting = waiting._replace(groups=waiting.groups + len(node.scoring))
        if (room := waiting.left(ahead)) is not None:
            newcomers.room = max(0, room)
        return Want(foreign(part, ahead, waiting), newcomers, 2 * batch)

    def own_quota(self) -> int:
        """The groups of the next batch that this node generates before it waits for foreign ones."""
        node = self._node
        part = self._own_part()
        if node.own_only or node.settings.own_share is not None:
            return part
        return self._demand.own(node.batch_groups, part, waiting_in(self.pool, node.newcomers()))

    def _own_part(self) -> int:
        """This node's share of a batch, in groups, if peers supply theirs."""
        node = self._node
        share = 1.0 if node.own_only else node.settings.own_share
        recent = node.swarm.recent_authors(max(RECENT_SECONDS, 4 * node.step_seconds()))
        return own_part(node.batch_groups, share, node.reputation.heads(recent))

    # --- the batch ------------------------------------------------------------------------------------------------

    async def batch(self, stopping: asyncio.Event) -> StepBatch | None:
        """Make groups, wait for others, and take a batch. None if `stopping` came first, or `flush` left nothing."""
        node = self._node
        newcomers = self._node.newcomers()
        own = await node.generate(self.own_quota())
        generated = node.clock()
        others = await self._gather(node.batch_groups - len(own), stopping, newcomers)
        waited = node.clock() - generated
        if stopping.is_set():
            self.pool.put_back(others)
            return None
        self.note_supply()
        try:
            node.raise_failed()
            replaces = not node.flush.is_set() and node.settings.own_share != 0
            own += await node.generate(node.batch_groups - len(own) - len(others) if replaces else 0)
        except Exception:
            self.pool.put_back(others)  # a new compute process will repeat the step
            raise
        if own or others:
            return StepBatch(own, others, waited)
        return None

    def note_supply(self) -> None:
        """Note the groups that came since the latest batch; call it when the next one is assembled."""
        self._demand.stepped(self.pool.added, waiting_in(self.pool, self._node.newcomers()))

    async def _gather(self, count: int, stopping: asyncio.Event, newcomers: Newcomers) -> list[Scored]:
        """Take groups from the pool; wait for more as long as `Stepper.patience` says. A node that generates nothing
        has no limit."""
        node = self._node
        taken = self.pool.take(count, newcomers)
        node.swarm.wake()
        listens = node.settings.own_share == 0
        deadline = math.inf if listens else node.clock() + node.patience(count - len(taken))
        while len(taken) < count and node.clock() < deadline and not node.pressed(stopping):
            if listens:
                node.waiting_for = f"groups of others ({len(taken)} of {count})"
            await node.arrival(stopping, deadline - node.clock())
            taken += self.pool.take(count - len(taken), newcomers)
        node.waiting_for = ""
        return taken
