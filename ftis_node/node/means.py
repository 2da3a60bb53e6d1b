"""The means of a node's steps: its run, settings, packets, compute process, peers and clocks."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.node.demand import pooled_age
from ftis_node.node.progress import Progress, Totals
from ftis_node.node.step_batch import mean
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.announcement import PacketRef
from ftis_node.swarm.pool import Newcomers
from ftis_node.swarm.reputation import Reputation
from ftis_node.worker.messages import Answer, Request

LATEST = 8  # durations that a mean is of


class Exchange(Protocol):
    """The part of the swarm (or of the lab's exchange in memory) that a node's steps use."""

    interval: float

    def announce(self, round: int, policy_step: int, packets: Sequence[PacketRef], issued_at: int) -> None:
        """Announce packets that are in the store, to be sent later. policy_step: steps that the sampling model had
        taken. issued_at: unix seconds, which decide common rows. Call it once for each round that
        `PacketStore.take_round` took: two announcements of one round are a reason for a ban."""

    def wake(self) -> None:
        """Tell the swarm that the node wants more groups; it asks `Stepper.want` how many. Cheap, so call it often."""

    def recent_authors(self, seconds: float) -> set[bytes]:
        """The 38-byte peer ids of other authors that announced something within `seconds`."""

    def has_peers(self) -> bool:
        """Whether foreign groups can arrive at all; if not, no step waits for any."""


class Compute(Protocol):
    """The daemon's compute process, or an engine in this process."""

    async def call(self, request: Request[Answer]) -> Answer:
        """As `ftis_node.worker.client.Worker.call`."""


@dataclass(eq=False)
class Pace:
    """Seconds of the latest steps, and of making one own group, or one part of a group; eight of each, of this start.

    began: when the present step began, by `Means.clock`; None between steps.
    """

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    groups: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    began: float | None = None

    def step_seconds(self) -> float:
        """The mean duration of the latest steps; 0 before the first."""
        return mean(self.steps) or 0.0

    def group_seconds(self) -> float:
        """The mean cost of making a group; 0 before the first."""
        return mean(self.groups) or 0.0


@dataclass(eq=False, kw_only=True)
class Means:
    """All that a node's steps work with.

    settings, worker   the present ones; they change while the node runs, so read them anew after each `await`
    own_only           the objective trains on own samples only
    author             this node's 38-byte peer id
    reputation         of authors; it receives the results of their groups
    clock              measures all durations in seconds; the event loop must keep the same time
    age_clock          measures the ages of groups, which also age while the machine sleeps
    unix               the time by which epochs of common rows go
    flush              set: a step neither waits for foreign groups nor replaces missing ones
    own_data           the compute process has rows of the owner's own, for a part of each batch
    welcomes           returns whether an author may take part; in a private run, whether it is a member
    progress           replaced by the checkpoint's at each start of the compute process
    resting            no compute process can score groups, so nothing is pulled
    waiting_for        what a step waits for, in words; empty while it does not wait
    """

    context: AdmissionContext
    own_only: bool
    author: bytes
    settings: Settings
    store: PacketStore
    worker: Compute
    reputation: Reputation
    swarm: Exchange
    clock: Callable[[], float] = time.monotonic
    age_clock: Callable[[], float] = boot_seconds
    unix: Callable[[], float] = unix_seconds
    flush: asyncio.Event = field(default_factory=asyncio.Event)
    own_data: bool = False
    welcomes: Callable[[bytes], bool] = lambda author: True
    progress: Progress = field(default_factory=Progress)
    totals: Totals = field(default_factory=Totals)
    pace: Pace = field(default_factory=Pace)
    resting: bool = False
    waiting_for: str = ""

    def until_evaluation(self) -> float:
        """About how many seconds it is to the first step after which the model may be evaluated again; 0: after the
        latest, or before the first step of this start."""
        step = self.progress.pass_at_1_step + self.settings.eval_every
        return self.pace.step_seconds() * max(0, step - self.progress.step)

    @property
    def run(self) -> Run:
        return self.context.run

    @property
    def own_data_groups(self) -> int:
        """The groups of a batch on rows of the owner's own, rounded up; one at least is left for the run's rows."""
        if not self.own_data:
            return 0
        batch = self.settings.batch_groups
        return min(batch - 1, math.ceil(self.settings.own_data_share * batch))

    @property
    def batch_groups(self) -> int:
        """The other groups of a batch: those on the run's rows, own and foreign; at least one."""
        return self.settings.batch_groups - self.own_data_groups

    def takes(self, author: bytes) -> bool:
        """Whether this node trains on groups of an author: it is not banned, and may take part in the run."""
        return self.welcomes(author) and not self.reputation.banned(author)

    def newcomers(self) -> Newcomers:
        """The room in a batch that all authors without a record share, in groups. Whoever takes groups counts it down,
        so each use needs a new one."""
        room = self.reputation.newcomers_room(self.batch_groups)
        return Newcomers(lambda author: not self.reputation.established(author), room, self.reputation.record)

    def pooled_age(self) -> float:
        """Seconds for which foreign groups wait.

        A step that takes longer than those before it counts already, and so does the pace of before a restart. The pool
        asks for it whenever it drops old groups.
        """
        present = 0.0
        if self.pace.began is not None:
            present = self.clock() - self.pace.began
        return pooled_age(self.settings.max_age, max(self.progress.step_seconds, present))
