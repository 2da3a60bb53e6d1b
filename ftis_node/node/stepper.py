"""One node's steps: own generation, the rewards of foreign groups, the wait for them, and the optimiser step."""

import asyncio
import logging
import math
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol, TypeVar

from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.node.demand import WAIT_SECONDS, pooled_age
from ftis_node.node.horizontal import HorizontalSource
from ftis_node.node.progress import Progress, Totals
from ftis_node.node.step_batch import OwnGroup, Recent, StepBatch, describe, mean, step_groups, to_show
from ftis_node.node.vertical import VerticalSource
from ftis_node.packet import Group
from ftis_node.step_report import DeviceSeconds, StepReport, StepSeconds, TakenStep
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext, Rejection, admit
from ftis_node.swarm.announcement import PacketRef, right_of
from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.known import Arrival
from ftis_node.swarm.pool import Newcomers, Pool, Scored, Want
from ftis_node.swarm.reputation import Reputation
from ftis_node.tasks.rewards import PURE_RULES
from ftis_node.worker.client import WorkerDied, WorkerFault
from ftis_node.worker.messages import Answer, Generate, Request, ScoreGroup, Step

SIGNALS = 48  # own groups whose signal is remembered

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Exchange(Protocol):
    """The part of the swarm (or of the lab's exchange in memory) that a stepper uses."""

    interval: float

    def announce(self, round: int, policy_step: int, packets: Sequence[PacketRef], issued_at: int) -> None:
        """Announce packets that are in the store. issued_at: unix seconds, which decide common rows."""

    def wake(self) -> None:
        """Tell the swarm that the node wants more groups."""

    def recent_authors(self, seconds: float) -> set[bytes]:
        """Other authors that announced something within `seconds`."""

    def has_peers(self) -> bool:
        """Whether foreign groups can arrive at all."""


class Compute(Protocol):
    """The daemon's compute process, or an engine in this process."""

    async def call(self, request: Request[Answer]) -> Answer:
        """As `ftis_node.worker.client.Worker.call`."""


def exchange_interval(step_seconds: float) -> float:
    """Seconds between the exchanges of a hungry node whose steps take `step_seconds`."""
    return min(max(step_seconds / 4, 0.1), 15.0)


class Stepper:
    """Takes steps on the batches of its source. The swarm brings it foreign groups."""

    def __init__(
        self,
        *,
        context: AdmissionContext,
        own_only: bool,
        identity: Identity,
        settings: Settings,
        store: PacketStore,
        worker: Compute,
        reputation: Reputation,
        swarm: Exchange,
        clock: Callable[[], float] | None = None,
        unix: Callable[[], float] = unix_seconds,
        rng: random.Random | None = None,
        flush: asyncio.Event | None = None,
        own_data: bool = False,
        welcomes: Callable[[bytes], bool] = lambda author: True,
    ) -> None:
        """
        Args:
            reputation: the reputation of authors; it receives the results of their groups.
            clock: measures the ages of groups and all durations in seconds; the event loop must keep the same time. By
                default groups age while the machine sleeps, and steps count only the time that it is awake.
            unix: the time by which epochs of common rows go.
            rng: draws from the pool. flush: set: a step neither waits for foreign groups nor replaces missing ones.
            own_data: the compute process has rows of the owner's own, for a part of each batch.
            welcomes: returns whether an author may take part; in a private run, whether it is a member.
        """
        self.progress = Progress()
        self.totals = Totals()
        self.worker = worker
        self.reputation = reputation
        self.swarm = swarm
        self.waiting_for = ""
        self.last: TakenStep | None = None
        self.recent = Recent()  # groups to show to people
        self.own_only = own_only  # the objective trains on own samples only
        self.own_refused = 0
        self.own_unsound = False  # admission refused an own group of the latest round
        self.flush = flush or asyncio.Event()
        self.resting = False  # no compute process can score groups, so nothing is pulled
        self.idle_steps = 0  # steps in a row that changed nothing
        self.signals: deque[bool] = deque(maxlen=SIGNALS)  # of the latest own groups: whether their rewards differ
        self.generation_batch = sys.maxsize  # sequences that the compute process has room to generate side by side
        self.clock = clock or time.monotonic
        self.age_clock = clock or boot_seconds
        self.unix = unix
        self.context = context
        self.run = context.run
        self.author = identity.author
        self.settings = settings
        self.store = store
        self.scoring: set[asyncio.Task[None]] = set()
        self._own_data = own_data
        self._welcomes = welcomes
        self._grew = asyncio.Event()  # the pool did, or scoring failed
        self._failed: BaseException | None = None  # of scoring
        self._step_seconds: deque[float] = deque(maxlen=8)
        self._began: float | None = None  # the present step, by the clock
        self._device: deque[DeviceSeconds] = deque(maxlen=8)  # of the latest steps
        self._group_seconds: deque[float] = deque(maxlen=8)  # cost of generating one own group, or part of one
        horizontal = self.run.parts > 1 and self.run.common > 0
        # decides what the node makes itself, what it pulls, and what a batch is made of
        self.source: VerticalSource | HorizontalSource = (HorizontalSource if horizontal else VerticalSource)(self, rng)

    @property
    def pool(self) -> Pool:
        """The foreign groups that wait."""
        return self.source.pool

    @property
    def own_data_groups(self) -> int:
        """The groups of a batch on rows of the owner's own."""
        batch = self.settings.batch_groups
        if self._own_data:
            return min(batch - 1, math.ceil(self.settings.own_data_share * batch))
        return 0

    @property
    def batch_groups(self) -> int:
        """The other groups of a batch: those on the run's rows."""
        return self.settings.batch_groups - self.own_data_groups

    # --- foreign groups -------------------------------------------------------------------------------------------

    def want(self) -> Want:
        """The further foreign groups to pull."""
        if self.own_only or self.resting:
            return Want()
        return self.source.want()

    def takes(self, author: bytes) -> bool:
        """Whether this node trains on groups of an author: it is not banned, and may take part in the run."""
        return self._welcomes(author) and self.reputation.banned(author) is None

    def newcomers(self) -> Newcomers:
        """The room in a batch that all authors without a record share."""
        room = self.reputation.newcomers_room(self.batch_groups)
        return Newcomers(lambda author: not self.reputation.established(author), room, self.reputation.record)

    async def on_groups(self, arrived: Sequence[Arrival]) -> None:
        """Store admitted groups and have them scored; each enters the pool when its rewards are known."""
        now = self.age_clock()
        self.store.add([(one.group, one.body) for one in arrived], own=False, ages=[now - one.born for one in arrived])
        for one in arrived:
            self.score_later(one.group, one.born, one.right)

    def score_later(self, group: Group, born: float, right: int | None = None) -> None:
        """Score a group and put it into the pool if it may teach. right: its author's hint, if known."""
        task = asyncio.create_task(self._score(group, born, right))
        self.scoring.add(task)
        task.add_done_callback(self._end_scoring)

    def _end_scoring(self, task: asyncio.Task[None]) -> None:
        """An unexpected error, such as a full disk, ends the step that waits, or the next: the node deals with it."""
        self.scoring.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = error
            self._grew.set()

    def raise_failed(self) -> None:
        """Raise an unexpected error of scoring, once."""
        error = self._failed
        self._failed = None
        if error is not None:
            raise error

    async def scored(self) -> None:
        """Wait until every received group has its rewards."""
        while self.scoring:
            await asyncio.gather(*self.scoring)

    async def _score(self, group: Group, born: float, right: int | None) -> None:
        try:
            rewards = await self.worker.call(ScoreGroup(group.row, group.data))
        except WorkerDied:
            return  # the store keeps it as admitted; the next worker scores it
        except (WorkerFault, UserError) as fault:
            logger.error("A group of %s could not be scored: %s", peer_id(group.author), fault)
            self.store.settle([group.key], "unscored")
            return
        scored = Scored(group, tuple(rewards), born)
        self.reputation.scored(group.author, rewards, signal=scored.has_signal)
        told = right is not None and bool(rewards) and self.run.reward in PURE_RULES
        if told and right != right_of(rewards):  # a group that this node cannot read says nothing about its author
            self.reputation.refused(group.author, "wrong hint")
        if not self.takes(group.author):
            return
        if self.source.add(scored):
            self._grew.set()
        elif not scored.has_signal:
            self.store.settle([group.key], "no-signal")

    # --- the step -------------------------------------------------------------------------------------------------

    def step_seconds(self) -> float:
        """Mean duration of the latest steps in seconds; 0 before the first."""
        if self._step_seconds:
            return sum(self._step_seconds) / len(self._step_seconds)
        return 0.0

    def pooled_age(self) -> float:
        """Seconds for which foreign groups wait. A step that takes longer than those before it counts already, and so
        does the pace of before a restart."""
        present = 0.0 if self._began is None else self.clock() - self._began
        return pooled_age(self.settings.max_age, max(self.progress.step_seconds, present))

    def idle_share(self) -> float | None:
        """The part of the latest steps' time in which the compute device had no work."""
        total = sum(spent.total for spent in self._device)
        if total:
            return sum(spent.idle for spent in self._device) / total
        return None

    async def step(self, stopping: asyncio.Event) -> TakenStep | None:
        """Take one step and return its report. None if `stopping` was set before the batch was complete, or if there is
        nothing to train on."""
        self._began = began = self.clock()
        try:
            batch = await self.source.batch(stopping)
            if batch is None:
                return None
            self.swarm.wake()
            return await self.train(batch, began)
        finally:
            self._began = None

    def pressed(self, stopping: asyncio.Event) -> bool:
        """Whether a step has to wait for nothing any more."""
        return stopping.is_set() or self.flush.is_set() or self._failed is not None

    async def arrival(self, stopping: asyncio.Event, seconds: float = WAIT_SECONDS) -> None:
        """Wait until the pool grows or the node has to hurry, at most for so many seconds, and never long."""
        await first_of(self._grew, stopping, self.flush, seconds=min(max(seconds, 0.01), WAIT_SECONDS))
        self._grew.clear()

    def patience(self, missing: int) -> float:
        """The seconds to wait for so many groups: at most those that the node would need to generate them.

        This costs at most twice the best choice (the ski-rental rule).
        """
        if missing <= 0 or not self.swarm.has_peers():
            return 0.0
        cost = 0.0
        if self._group_seconds:
            cost = sum(self._group_seconds) / len(self._group_seconds)
        return min(self.settings.wait, missing * cost)

    async def train(self, batch: StepBatch, began: float) -> TakenStep:
        """Take the step on a batch and return its report.

        Args:
            began: start of the generation, by the clock.
        """
        own = batch.own
        foreign = batch.foreign
        trained = self.clock()
        weights = {author: self.reputation.weight(author) for author in {one.group.author for one in foreign}}
        groups = step_groups(own, foreign, weights, self.run)
        # Mark the groups as used beside the step and before its checkpoint. A crash may lose a group this way, but no
        # group is trained on twice.
        report = await self._beside(
            self.worker.call(Step(groups, own_data=self.own_data_groups)),
            lambda: self.store.settle([scored.group.key for scored in foreign], "trained"),
        )
        ended = self.clock()
        self._judge(foreign, report)
        self._step_seconds.append(ended - began)
        self.progress.step_seconds = self.step_seconds()
        self._device.append(report.device)
        self.swarm.interval = exchange_interval(self.step_seconds())
        spent = StepSeconds(trained - began - batch.wait, batch.wait, ended - trained, ended - began)
        unequal = any(weight != 1.0 for weight in weights.values())
        unequal_weights = {peer_id(author): weight for author, weight in weights.items()} if unequal else None
        last = self._account(batch, report, spent, unequal_weights)
        self.recent.add(to_show(last.step, own, foreign))
        return last

    async def _beside(self, call: Coroutine[None, None, Result], write: Callable[[], None]) -> Result:
        """Call the worker and write to disk while it works; return its answer."""
        answer = asyncio.create_task(call)
        try:
            await asyncio.sleep(0)  # the request goes out first
            write()
            return await answer
        finally:
            answer.cancel()  # has an effect only if `write` failed or the step is given up

    def _judge(self, foreign: Sequence[Scored], report: StepReport) -> None:
        """Add the step's evidence to the reputation of its groups' authors."""
        sources = {} if report.skipped else report.diagnostics.sources
        for author, groups in Counter(one.group.author for one in foreign).items():
            if (figures := sources.get(peer_id(author))) is not None:
                self.reputation.trained(author, groups, figures)

    async def generate(self, count: int) -> list[OwnGroup]:
        """Generate, store and announce `count` groups, in as many rounds as their slots need."""
        groups: list[OwnGroup] = []
        while len(groups) < count:
            made = await self._generate_round(count - len(groups))
            if not made:
                break
            groups += made
        return groups

    async def _generate_round(self, count: int) -> list[OwnGroup]:
        began = self.clock()
        number = self.store.upcoming_round()
        author = self.author
        issued_at = int(self.unix())
        slots = self.source.slots(count, issued_at)
        if not slots:
            return []
        rows = [self.context.row_of(author, number, slot, issued_at) for slot in slots]
        request = Generate(rows, author, number, self.progress.step, slots)
        answer = await self._beside(self.worker.call(request), lambda: self.store.take_round(number))
        self.generation_batch = answer.generation_batch
        self._group_seconds.append((self.clock() - began) / len(slots))
        groups: list[OwnGroup] = []
        for slot, made in zip(slots, answer.groups, strict=True):
            verdict = admit(self.context, author, made.packet, announced=(number, slot), issued_at=issued_at)
            if isinstance(verdict, Rejection):  # peers would refuse it, so it is neither sent nor trained on
                self.own_refused += 1
                logger.error("A group of this node's own is unsound: %s (%s)", verdict.reason, verdict.detail)
                continue
            groups.append(OwnGroup(verdict, made.rewards))
            self.signals.append(len(set(made.rewards)) > 1)
        self.own_unsound = len(groups) < len(answer.groups)
        if not groups:
            raise WorkerFault("Every group that this node generated is unsound; its model may have diverged.")
        self.totals.add_round([one.group for one in groups])
        self.store.add([(one.group, one.group.data) for one in groups], own=True)
        refs = [
            PacketRef(one.group.packet.slot, one.group.digest, len(one.group.data), right_of(one.rewards))
            for one in groups
        ]
        self.swarm.announce(number, self.progress.step, refs, issued_at)
        return groups

    def _account(
        self, batch: StepBatch, report: StepReport, seconds: StepSeconds, weights: dict[str, float] | None
    ) -> TakenStep:
        told = describe(batch.own, batch.foreign)
        now = self.age_clock()
        self.progress.add_step(len(batch.own), told.authors, report)
        self.idle_steps = 0 if report.skipped is None else self.idle_steps + 1
        age = mean([now - scored.born for scored in batch.foreign])
        self.last = TakenStep(self.progress.step, told, age, report, seconds, weights)
        self.totals.add_step(self.last)
        return self.last


async def first_of(*events: asyncio.Event, seconds: float) -> None:
    """Wait until one of the events is set, at most for so many seconds."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
