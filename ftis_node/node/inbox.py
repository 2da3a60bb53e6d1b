"""Foreign groups on their way from the swarm to the pool: they are stored and scored here."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from ftis_node.errors import UserError
from ftis_node.node.demand import WAIT_SECONDS
from ftis_node.node.means import Means
from ftis_node.packet import Group
from ftis_node.swarm.announcement import right_of
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.known import Arrival
from ftis_node.swarm.pool import Scored
from ftis_node.tasks.rewards import PURE_RULES
from ftis_node.worker.client import WorkerDied, WorkerFault
from ftis_node.worker.messages import ScoreGroup

logger = logging.getLogger(__name__)


class Inbox:
    """Stores admitted groups, has them scored, and hands them on. All of it runs in the event loop of the network
    process.

    scoring: a task for each group whose rewards are not known yet. Nothing bounds them here: a source counts them when
    it says what to pull (`want`).
    """

    def __init__(self, means: Means, add: Callable[[Scored], bool]) -> None:
        """
        Args:
            add: takes a scored group into the pool; returns False if it is not for training.
        """
        self.scoring: set[asyncio.Task[None]] = set()
        self._means = means
        self._add = add
        self._grew = asyncio.Event()  # a group was handed on, or scoring failed
        self._failed: BaseException | None = None  # of scoring

    async def on_groups(self, arrived: Sequence[Arrival]) -> None:
        """Store admitted groups and begin to score them; each is handed on when its rewards are known, in any order.

        A pull awaits this for up to 16 groups at a time, and pulls them again if it raises. They are in the store when
        it returns, so the next start scores those that have no rewards by then (`assembly.refill_pool`).

        Raises:
            OSError, sqlite3.Error: they could not be stored.
        """
        now = self._means.age_clock()
        groups = [one.group for one in arrived]
        self._means.store.add(groups, own=False, ages=[now - one.born for one in arrived])
        for one in arrived:
            self.score_later(one.group, one.born, one.right)

    def score_later(self, group: Group, born: float, right: int | None = None) -> None:
        """Begin to score a group that the store has; it is handed on if it has a signal and its author may teach.

        Args:
            born: when its author made it, by `Means.age_clock`. right: its author's hint; None where it is not known,
                as after a restart.
        """
        task = asyncio.create_task(self._score(group, born, right))
        self.scoring.add(task)
        task.add_done_callback(self._end_scoring)

    async def scored(self) -> None:
        """Wait until every received group has its rewards. The lab calls it between steps; a daemon never waits so."""
        while self.scoring:
            await asyncio.gather(*self.scoring)

    def raise_failed(self) -> None:
        """Raise an unexpected error of scoring, once. A source calls it in each step, so that the step fails by it."""
        error = self._failed
        self._failed = None
        if error is not None:
            raise error

    def hurries(self, stopping: asyncio.Event) -> bool:
        """Whether a step has to wait for nothing any more: the node stops, pauses or ends, or scoring failed."""
        return stopping.is_set() or self._means.flush.is_set() or self._failed is not None

    async def arrival(self, stopping: asyncio.Event, seconds: float = WAIT_SECONDS) -> None:
        """Wait until a group is handed on or the node has to hurry, for `seconds` at most. The limit is kept between
        0.01 and 0.25 s, so a caller looks again, in a loop."""
        limit = min(max(seconds, 0.01), WAIT_SECONDS)
        await _first_of(self._grew, stopping, self._means.flush, seconds=limit)
        self._grew.clear()

    def _end_scoring(self, task: asyncio.Task[None]) -> None:
        """An unexpected error, such as a full disk, ends the step that waits, or the next: the node deals with it."""
        self.scoring.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._failed = error
            self._grew.set()

    async def _score(self, group: Group, born: float, right: int | None) -> None:
        """Have a group scored, judge its author by it, and hand it on. A hint counts against the author only where the
        rule gives every reader the same rewards (`PURE_RULES`)."""
        means = self._means
        try:
            rewards = await means.worker.call(ScoreGroup(group.row, group.data))
        except WorkerDied:
            return  # the store keeps it as admitted; the next worker scores it
        except (WorkerFault, UserError) as fault:
            logger.error("A group of %s could not be scored: %s", peer_id(group.author), fault)
            means.store.settle([group.key], "unscored")
            return
        scored = Scored(group, tuple(rewards), born)
        means.reputation.scored(group.author, rewards, signal=scored.has_signal)
        # A group that this node cannot read has no rewards, and says nothing about its author.
        comparable = right is not None and bool(rewards) and means.run.reward in PURE_RULES
        if comparable and right != right_of(rewards):
            means.reputation.refused(group.author, "wrong hint")
        if not means.takes(group.author):
            return
        if self._add(scored):
            self._grew.set()
        elif not scored.has_signal:
            means.store.settle([group.key], "no-signal")


async def _first_of(*events: asyncio.Event, seconds: float) -> None:
    """Wait until one of the events is set, at most for so many seconds; clear none."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
