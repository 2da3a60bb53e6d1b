"""The batches of a vertical run: whole groups, each of one author."""

import asyncio
import math
import random

from ftis_node.node.demand import Demand, foreign, own_part, waiting_in
from ftis_node.node.inbox import Inbox
from ftis_node.node.maker import Maker
from ftis_node.node.means import Means
from ftis_node.node.step_batch import StepBatch
from ftis_node.swarm.pool import Newcomers, Pool, Scored, Want

RECENT_SECONDS = 30.0
PREFETCH_SECONDS = 10.0


class VerticalSource:
    """Own groups first, then those of others from the pool, and own ones again in place of those that do not come.

    pool: the foreign groups that wait. inbox: brings them there; maker: makes own ones. `Stepper` calls `batch` once a
    step, the swarm `want` whenever it may pull.
    """

    def __init__(self, means: Means, rng: random.Random | None) -> None:
        """
        Args:
            rng: draws from the pool.
        """
        self.pool = Pool(means.pooled_age, means.age_clock, rng, takes=means.takes)
        self.inbox = Inbox(means, lambda scored: self.pool.add(scored))  # of a round's own pool in lock step
        self.maker = Maker(means, self.slots)
        self._means = means
        self._demand = Demand()

    def slots(self, count: int, issued_at: int) -> list[int]:
        """The slots of a round of up to `count` own groups, at a unix time, which does not matter here: from 0 up, and
        no more than the run has, so more groups need more rounds."""
        return list(range(min(count, self._means.run.slots)))

    # --- demand ---------------------------------------------------------------------------------------------------

    def want(self) -> Want:
        """The further foreign groups to pull: for the next step, plus the smaller of 10 s and one step ahead; before
        the first step for two batches. 0 or negative: none. Waiting groups that are too old are dropped on the way."""
        means = self._means
        newcomers = means.newcomers()
        batches = 2.0
        seconds = means.pace.step_seconds()
        if seconds:
            batches = 1 + min(1.0, PREFETCH_SECONDS / seconds)
        waiting = waiting_in(self.pool, newcomers)
        waiting = waiting._replace(groups=waiting.groups + len(self.inbox.scoring))
        newcomers.room = max(0, waiting.left(batches))  # of newcomers' groups, those that wait are there already
        foreign_part = means.batch_groups - self._own_part()
        return Want(foreign(foreign_part, batches, waiting), newcomers, 2 * means.batch_groups)

    def own_quota(self) -> int:
        """The groups of the next batch that this node generates before it waits for foreign ones; 0 for a listener."""
        means = self._means
        part = self._own_part()
        if means.own_only or means.settings.own_share is not None:
            return part
        return self._demand.groups_to_make(means.batch_groups, part, waiting_in(self.pool, means.newcomers()))

    def _own_part(self) -> int:
        """This node's share of a batch, in groups, if peers supply theirs. Peers count that announced something in the
        last four steps, or the last half minute if that is longer."""
        means = self._means
        share = means.settings.own_share
        if means.own_only:
            share = 1.0
        recent = means.swarm.recent_authors(max(RECENT_SECONDS, 4 * means.pace.step_seconds()))
        return own_part(means.batch_groups, share, means.reputation.heads(list(filter(means.takes, recent))))

    # --- the batch ------------------------------------------------------------------------------------------------

    async def batch(self, stopping: asyncio.Event) -> StepBatch | None:
        """Make groups, wait for others, and take a batch. None if `stopping` came first, or `flush` left nothing.

        A batch has `Means.batch_groups` groups; fewer only with `flush`. After None or an error its own
        groups are lost for training, though peers have them; the foreign ones are back in the pool.

        Raises:
            WorkerDied, WorkerFault: the compute process failed.
            Exception: whatever `Inbox.raise_failed` raises.
        """
        means = self._means
        newcomers = means.newcomers()
        own = await self.maker.generate(self.own_quota())
        generated = means.clock()
        others = await self._gather(means.batch_groups - len(own), stopping, newcomers)
        waited = means.clock() - generated
        if stopping.is_set():
            self.pool.put_back(others)
            return None
        self.note_supply()
        try:
            self.inbox.raise_failed()
            if not means.flush.is_set() and means.settings.own_share != 0:
                own += await self.maker.generate(means.batch_groups - len(own) - len(others))
        except Exception:
            self.pool.put_back(others)  # a new compute process will repeat the step
            raise
        if not own and not others:
            return None
        return StepBatch(own, others, waited)

    def note_supply(self) -> None:
        """Note the groups that came since the latest batch; call it once a batch, when its foreign groups are taken."""
        self._demand.stepped(self.pool.added, waiting_in(self.pool, self._means.newcomers()))

    async def _gather(self, count: int, stopping: asyncio.Event, newcomers: Newcomers) -> list[Scored]:
        """Take up to `count` groups from the pool; wait for more as long as `Maker.patience` says. A node that
        generates nothing has no limit. newcomers: counted down."""
        means = self._means
        taken = self.pool.take(count, newcomers)
        means.swarm.wake()
        listens = means.settings.own_share == 0
        deadline = math.inf
        if not listens:
            deadline = means.clock() + self.maker.patience(count - len(taken))
        while len(taken) < count and means.clock() < deadline and not self.inbox.hurries(stopping):
            if listens:
                means.waiting_for = f"groups of others ({len(taken)} of {count})"
            await self.inbox.arrival(stopping, deadline - means.clock())
            taken += self.pool.take(count - len(taken), newcomers)
        means.waiting_for = ""
        return taken
