"""One node's steps: own generation, foreign groups from the pool, the wait for them, and the optimiser step."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Protocol, TypeVar

from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.node.progress import Progress, Totals
from ftis_node.node.step_batch import OwnGroup, describe, mean, step_groups, to_show, without_dead
from ftis_node.observe.recent import Recent
from ftis_node.packet import Group
from ftis_node.step_report import DeviceSeconds, StepReport, StepSeconds, TakenStep
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext, Rejection, admit
from ftis_node.swarm.announcement import PacketRef
from ftis_node.swarm.common_rows import OwnSlots
from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.needs import right_of
from ftis_node.swarm.pool import Newcomers, Pool, Scored, Want
from ftis_node.swarm.standing import Standing
from ftis_node.swarm.table import Arrival
from ftis_node.tasks.rewards import PURE_RULES
from ftis_node.worker.client import WorkerDied, WorkerFault
from ftis_node.worker.messages import Answer, Generate, Request, ScoreGroup, Step, TryRows

# A node generates at least this part of its batch itself; otherwise many strangers could control it.
OWN_SHARE_FLOOR = 0.25
RECENT_SECONDS = 30.0
PREFETCH_SECONDS = 10.0
WAIT_SECONDS = 0.25
TRIED_ROWS = 64  # at an evaluation, of those learned from others
SUPPLY_MEMORY = 0.2  # weight of the latest step in the mean of foreign groups per step

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Exchange(Protocol):
    """The part of the swarm (or of the lab's exchange in memory) that a stepper uses."""

    interval: float

    def announce(self, round: int, policy_step: int, packets: Sequence[PacketRef], issued_at: int) -> None:
        """Announce packets that are in the store. issued_at: unix seconds, which decide the rows of common slots."""

    def poke(self) -> None:
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
    """Assembles batches and takes steps. It uses the pool and the worker; the swarm brings it groups."""

    def __init__(
        self,
        *,
        context: AdmissionContext,
        own_only: bool,
        identity: Identity,
        settings: Settings,
        store: PacketStore,
        worker: Compute,
        standing: Standing,
        clock: Callable[[], float] | None = None,
        unix: Callable[[], float] = unix_seconds,
        pool: Pool | None = None,
        own_data: bool = False,
    ) -> None:
        """
        Args:
            standing: the reputation of authors; it receives the results of their groups.
            clock: measures the ages of groups and all durations in seconds; the event loop must keep the same time. By
                default groups age while the machine sleeps, and steps count only the time that it is awake.
            unix: the time by which epochs of common rows go.
            pool: by default one that drops groups without a signal.
            own_data: the compute process has rows of the owner's own, for a part of each batch.
        """
        self.progress = Progress()
        self.totals = Totals()
        self.by_need = settings.by_need and not own_only and context.run.parts == 1
        if pool is None:
            pool = Pool(settings.max_age, clock or boot_seconds, needed=self._needed, needed_age=settings.needed_age)
        self.pool = pool
        self.worker = worker
        self.standing = standing
        standing.banned_author.append(lambda author: self.pool.drop(author))
        self.waiting_for = ""
        self.last: TakenStep | None = None
        self.recent = Recent()  # groups to show to people
        self._dead = 0  # own groups without a signal in the latest batch
        self.swarm: Exchange
        self.own_only = own_only  # the objective trains on own samples only
        self.own_refused = 0
        self.own_unsound = False  # admission refused an own group of the latest round
        self.hurry = asyncio.Event()  # set: a step neither waits for foreign groups nor replaces missing ones
        self.resting = False  # no compute process can score groups, so nothing is pulled
        self.idle_steps = 0  # steps in a row that changed nothing
        self.generation_batch = sys.maxsize  # sequences that the compute process has room to generate side by side
        self._clock, self._age_clock, self._unix = clock or time.monotonic, clock or boot_seconds, unix
        self._slots = OwnSlots(context.run, identity.author)
        self._context = context
        self.run = context.run
        self._identity = identity
        self.settings = settings
        self._own_data = own_data
        self._store = store
        self._pool_grew = asyncio.Event()
        self._scoring: dict[asyncio.Task[None], int] = {}  # with the rows of their groups
        self._failed: BaseException | None = None  # of scoring
        self._supply: float | None = None  # mean groups that enter the pool per step; None before the first
        self._counted = 0  # `pool.added` at the latest batch
        self._left = 0  # groups that the latest batch had no room for
        self._step_seconds: deque[float] = deque(maxlen=8)
        self._device: deque[DeviceSeconds] = deque(maxlen=8)  # of the latest steps
        self._group_seconds: deque[float] = deque(maxlen=8)  # cost of generating one own group, or part of one

    @property
    def own_data_groups(self) -> int:
        """The groups of a batch on rows of the owner's own."""
        batch = self.settings.batch_groups
        return min(batch - 1, math.ceil(self.settings.own_data_share * batch)) if self._own_data else 0

    @property
    def batch_groups(self) -> int:
        """The other groups of a batch: those on the run's rows."""
        return self.settings.batch_groups - self.own_data_groups

    # --- foreign groups -------------------------------------------------------------------------------------------

    def want(self) -> Want:
        """The further foreign groups to pull: for the next step, plus the smaller of 10 s and one step ahead."""
        if self.own_only or self.resting:
            return Want(0, Newcomers(), 0)
        batch, step_seconds = self.batch_groups, self.step_seconds()
        ahead = 1 + min(1.0, PREFETCH_SECONDS / step_seconds if step_seconds else 1.0)
        newcomers, waiting = self._newcomers(), self.pool.waiting()
        part = batch - self._own_part()
        answered = set(filter(self._needed, self.pool.rows().union(self._scoring.values())))
        usable = sum(waiting.values()) + len(self._scoring) - len(answered)
        if newcomers.room is not None:
            theirs = self._of_newcomers(waiting)
            most = math.ceil(newcomers.room * ahead)
            usable -= max(0, theirs - most)  # groups that no batch has room for must not block other pulls
            newcomers.room = max(0, most - theirs)
        most = batch // 2 if self.settings.answers_only else part  # else at most half of what is pulled
        answers = min(self._dead, most) - len(answered)
        rows = (row for row in self.progress.needs if row not in answered)
        return Want(math.ceil(part * ahead) - usable, newcomers, 2 * batch, answers, rows)

    def take(self, count: int) -> list[Scored]:
        """Take groups for one batch from the pool."""
        return self.pool.take(count, self._newcomers())

    def _newcomers(self) -> Newcomers:
        """The room in a batch that all authors without a record share."""
        room = self.standing.newcomers_room(self.batch_groups)
        return Newcomers(lambda author: not self.standing.established(author), room, self.standing.record)

    def _of_newcomers(self, waiting: Mapping[bytes, int]) -> int:
        return sum(count for author, count in waiting.items() if not self.standing.established(author))

    async def on_groups(self, arrived: Sequence[Arrival]) -> None:
        """Store admitted groups and have them scored; each enters the pool when its rewards are known."""
        now = self._age_clock()
        self._store.add([(one.group, one.body) for one in arrived], own=False, ages=[now - one.born for one in arrived])
        for one in arrived:
            self.score_later(one.group, one.born, one.right)

    def score_later(self, group: Group, born: float, right: int | None = None) -> None:
        """Score a group and put it into the pool if it may teach. right: its author's hint, if known."""
        task = asyncio.create_task(self._score(group, born, right))
        self._scoring[task] = group.row
        task.add_done_callback(self._end_scoring)

    def _end_scoring(self, task: asyncio.Task[None]) -> None:
        """An unexpected error, such as a full disk, ends the step that waits, or the next: the node deals with it."""
        del self._scoring[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = error
            self._pool_grew.set()

    def _raise_failed(self) -> None:
        error, self._failed = self._failed, None
        if error is not None:
            raise error

    async def scored(self) -> None:
        """Wait until every received group has its rewards."""
        while self._scoring:
            await asyncio.gather(*self._scoring)

    def _needed(self, row: int) -> bool:
        return row in self.progress.needs

    async def _score(self, group: Group, born: float, right: int | None) -> None:
        try:
            rewards = await self.worker.call(ScoreGroup(group.row, group.data))
        except WorkerDied:
            return  # the store keeps it as admitted; the next worker scores it
        except (WorkerFault, UserError) as fault:
            logger.error("A group of %s could not be scored: %s", peer_id(group.author), fault)
            self._store.settle([group.key], "unscored")
            return
        scored = Scored(group, tuple(rewards), born)
        self.standing.scored(group.author, rewards, signal=scored.has_signal)
        told = right is not None and bool(rewards) and self.run.reward in PURE_RULES
        if told and right != right_of(rewards):  # a group that this node cannot read says nothing about its author
            self.standing.refused(group.author, "wrong hint")
        if self.standing.banned(group.author) is not None:
            return
        if self.pool.add(scored):
            self._pool_grew.set()
        elif not scored.has_signal:
            self._store.settle([group.key], "no-signal")

    # --- the step -------------------------------------------------------------------------------------------------

    def own_quota(self) -> int:
        """The groups of the next batch that this node generates before it waits for foreign ones.

        Its share plus the expected shortfall. The estimate uses waiting and recently arrived groups, not announcements;
        otherwise a peer could make others wait with empty announcements.
        """
        part, batch = self._own_part(), self.batch_groups
        if self._supply is None or self.own_only or self.settings.own_share is not None:
            return part
        return min(batch, max(part, batch - max(int(self._left + self._supply), self._takeable())))

    def _own_part(self) -> int:
        """This node's share of a batch, in groups, if peers supply theirs."""
        share = 1.0 if self.own_only or self.settings.answers_only else self.settings.own_share
        if share is None:
            recent = self.swarm.recent_authors(max(RECENT_SECONDS, 4 * self.step_seconds()))
            share = max(1 / (1 + self.standing.heads(recent)), OWN_SHARE_FLOOR)
        return math.ceil(share * self.batch_groups)

    def _takeable(self) -> int:
        """Waiting groups that a batch has room for."""
        waiting, room = self.pool.waiting(), self._newcomers().room
        return sum(waiting.values()) - (0 if room is None else max(0, self._of_newcomers(waiting) - room))

    def note_supply(self) -> None:
        """Update the mean supply with the groups since the latest batch; call it when the next one is assembled."""
        came, self._counted = self.pool.added - self._counted, self.pool.added
        self._supply = came if self._supply is None else self._supply + SUPPLY_MEMORY * (came - self._supply)
        self._left = self._takeable()

    def step_seconds(self) -> float:
        """Mean duration of the latest steps in seconds; 0 before the first."""
        return sum(self._step_seconds) / len(self._step_seconds) if self._step_seconds else 0.0

    def idle_share(self) -> float | None:
        """The part of the latest steps' time in which the compute device had no work."""
        total = sum(spent.total for spent in self._device)
        return sum(spent.idle for spent in self._device) / total if total else None

    async def step(self, stopping: asyncio.Event) -> TakenStep | None:
        """Take one step and return its report. None if `stopping` was set before the batch was complete, or if `hurry`
        left nothing to train on."""
        began = self._clock()
        newcomers = self._newcomers()
        own = await self.generate(self.own_quota())
        generated = self._clock()
        answers = self._answers(own, newcomers)
        foreign = await self._gather(self.batch_groups - len(own), stopping, newcomers)
        waited = self._clock() - generated
        if stopping.is_set():
            self.pool.put_back([*answers, *foreign])
            return None
        self.note_supply()
        try:
            self._raise_failed()
            own += await self.generate(0 if self.hurry.is_set() else self._missing(len(own) + len(foreign)))
        except Exception:
            self.pool.put_back([*answers, *foreign])  # a new compute process will repeat the step
            raise
        if not own and not foreign:
            return None
        answers += self._answers(own, newcomers, answers)
        self.swarm.poke()
        kept, replaced = without_dead(own, answers, drop=self.settings.dead_groups == "drop")
        return await self.train(kept, [*answers, *foreign], replaced=replaced, began=began, wait=waited)

    def _answers(self, own: Sequence[OwnGroup], newcomers: Newcomers, already: Sequence[Scored] = ()) -> list[Scored]:
        """Take groups that answer needed rows from the pool, one for each own group without a signal.

        Args:
            already: the answers that the batch has.
        """
        if not self.by_need:
            return []
        dead = {one.group.row for one in own if not one.has_signal}
        self._dead = sum(not one.has_signal for one in own)
        needed = set(filter(self._needed, self.pool.rows())) - {one.group.row for one in already}
        return self.pool.answers(dead, needed, self._dead - len(already), newcomers)

    async def try_learned(self) -> float:
        """Let the model answer the latest rows that it learned from others; note those it can do. Returns seconds."""
        began, needs = self._clock(), self.progress.needs
        if rows := needs.learned(TRIED_ROWS):
            verdicts = await self.worker.call(TryRows(rows))
            for row in (row for row, right in zip(rows, verdicts, strict=True) if right):
                needs.could(row)
        return self._clock() - began

    async def train(
        self,
        own: Sequence[OwnGroup],
        foreign: Sequence[Scored],
        *,
        replaced: Sequence[OwnGroup] = (),
        began: float,
        wait: float = 0.0,
    ) -> TakenStep:
        """Take the step on these groups and return its report.

        Args:
            replaced: own groups that are not trained on. began: start of the generation, by the clock.
        """
        trained = self._clock()
        weights = {author: self.standing.weight(author) for author in {one.group.author for one in foreign}}
        groups = step_groups(own, foreign, weights, self.run)
        # Mark the groups as used beside the step and before its checkpoint. A crash may lose a group this way, but no
        # group is trained on twice.
        report = await self._beside(
            self.worker.call(Step(groups, own_data=self.own_data_groups)),
            lambda: self._store.settle([scored.group.key for scored in foreign], "trained"),
        )
        ended = self._clock()
        self.progress.needs.trained(one.group.row for one in foreign)
        self._judge(foreign, report)
        self._step_seconds.append(ended - began)
        self._device.append(report.device)
        self.swarm.interval = exchange_interval(self.step_seconds())
        spent = StepSeconds(trained - began - wait, wait, ended - trained, ended - began)
        unequal = any(weight != 1.0 for weight in weights.values())
        unequal_weights = {peer_id(author): weight for author, weight in weights.items()} if unequal else None
        last = self._account(own, foreign, replaced, report, spent, unequal_weights)
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
                self.standing.trained(author, groups, figures)

    def _missing(self, have: int) -> int:
        return 0 if self.settings.own_share == 0 else max(0, self.batch_groups - have)

    async def _gather(self, count: int, stopping: asyncio.Event, newcomers: Newcomers) -> list[Scored]:
        """Take groups from the pool; wait for more at most as long as the node would need to generate them.

        This costs at most twice the best choice (the ski-rental rule). A node that generates nothing has no limit.
        """
        taken = self.pool.take(count, newcomers)
        self.swarm.poke()
        deadline = self._clock() + self._patience(count - len(taken))
        while len(taken) < count and not (stopping.is_set() or self.hurry.is_set() or self._failed):
            if self.settings.own_share == 0:
                self.waiting_for = f"groups of others ({len(taken)} of {count})"
            elif self._clock() >= deadline:
                break
            left = WAIT_SECONDS if self.settings.own_share == 0 else max(deadline - self._clock(), 0.01)
            await first_of(self._pool_grew, stopping, self.hurry, seconds=min(left, WAIT_SECONDS))
            self._pool_grew.clear()
            taken += self.pool.take(count - len(taken), newcomers)
        self.waiting_for = ""
        return taken

    def _patience(self, missing: int) -> float:
        if missing <= 0 or not self.swarm.has_peers():
            return 0.0
        cost = sum(self._group_seconds) / len(self._group_seconds) if self._group_seconds else 0.0
        return min(self.settings.wait, missing * cost)

    async def generate(self, count: int) -> list[OwnGroup]:
        """Generate, store and announce `count` groups, in as many rounds as their slots need."""
        groups: list[OwnGroup] = []
        while len(groups) < count:
            made = await self._generate_round(min(count - len(groups), self._slots.most))
            if not made:
                break
            groups += made
        return groups

    def _take_slots(self, count: int, unix: int) -> list[int]:
        """The slots of a round."""
        return self._slots.take(count, unix)

    async def _generate_round(self, count: int) -> list[OwnGroup]:
        began = self._clock()
        number = self._store.upcoming_round()
        author = self._identity.author
        issued_at = int(self._unix())
        slots = self._take_slots(count, issued_at)
        if not slots:
            return []
        rows = [self._context.row_of(author, number, slot, issued_at) for slot in slots]
        request = Generate(rows, author, number, self.progress.step, slots)
        answer = await self._beside(self.worker.call(request), lambda: self._store.take_round(number))
        self.generation_batch = answer.generation_batch
        self._group_seconds.append((self._clock() - began) / len(slots))
        groups: list[OwnGroup] = []
        for slot, made in zip(slots, answer.groups, strict=True):
            verdict = admit(self._context, author, made.packet, announced=(number, slot), issued_at=issued_at)
            if isinstance(verdict, Rejection):  # peers would refuse it, so it is neither sent nor trained on
                self.own_refused += 1
                logger.error("A group of this node's own is unsound: %s (%s)", verdict.reason, verdict.detail)
                continue
            groups.append(OwnGroup(verdict, made.rewards))
            if self.by_need:
                self.progress.needs.tried(verdict.row, made.rewards)
        self.own_unsound = len(groups) < len(answer.groups)
        if not groups:
            raise WorkerFault("Every group that this node generated is unsound; its model may have diverged.")
        self.totals.add_round([one.group for one in groups])
        self._store.add([(one.group, one.group.data) for one in groups], own=True)
        refs = [
            PacketRef(one.group.packet.slot, one.group.digest, len(one.group.data), right_of(one.rewards))
            for one in groups
        ]
        self.swarm.announce(number, self.progress.step, refs, issued_at)
        return groups

    def _account(
        self,
        own: Sequence[OwnGroup],
        foreign: Sequence[Scored],
        replaced: Sequence[OwnGroup],
        report: StepReport,
        seconds: StepSeconds,
        weights: dict[str, float] | None,
    ) -> TakenStep:
        batch, now = describe(own, foreign, replaced), self._age_clock()
        self.progress.add_step(len(own), batch.authors, report)
        self.idle_steps = 0 if report.skipped is None else self.idle_steps + 1
        age = mean([now - scored.born for scored in foreign])
        self.last = TakenStep(self.progress.step, batch, age, report, seconds, weights)
        self.totals.add_step(self.last)
        return self.last


async def first_of(*events: asyncio.Event, seconds: float) -> None:
    """Wait until one of the events is set, at most for so many seconds."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
