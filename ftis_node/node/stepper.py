"""One node's steps: a batch from its source, and the optimiser step on it."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

from ftis_node.node.horizontal import HorizontalSource
from ftis_node.node.maker import beside
from ftis_node.node.means import LATEST, Means
from ftis_node.node.progress import Progress
from ftis_node.node.step_batch import Recent, StepBatch, describe, mean, step_groups
from ftis_node.node.vertical import VerticalSource
from ftis_node.step_report import DeviceSeconds, StepReport, StepSeconds, TakenStep
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.pool import Pool, Scored, Want
from ftis_node.worker.messages import Step

Source = VerticalSource | HorizontalSource
"""Decides what a node makes itself, what it pulls, and what a batch is made of."""


def source_for(means: Means, rng: random.Random | None = None) -> Source:
    """The source of batches for the means' run. rng: draws from the pool; None: other draws at each start."""
    if means.run.common:
        return HorizontalSource(means, rng)
    return VerticalSource(means, rng)


def exchange_interval(step_seconds: float) -> float:
    """Seconds between the gossip exchanges of a node that wants more groups, and whose steps take `step_seconds`: a
    quarter of a step, 0.1 to 15 s."""
    return min(max(step_seconds / 4, 0.1), 15.0)


class Stepper:
    """Takes steps on the batches of its source, one at a time, in the event loop of the network process.

    last        the latest step; None before the first of this start
    recent      groups to show to people
    idle_steps  steps in a row that changed nothing, of this start
    """

    def __init__(self, means: Means, source: Source) -> None:
        self.means = means
        self.source = source
        self.last: TakenStep | None = None
        self.recent = Recent()
        self.idle_steps = 0
        self.device: deque[DeviceSeconds] = deque(maxlen=LATEST)  # of the latest steps

    @property
    def progress(self) -> Progress:
        return self.means.progress

    @property
    def pool(self) -> Pool:
        """The foreign groups that wait."""
        return self.source.pool

    def want(self) -> Want:
        """The further foreign groups to pull; the swarm asks whenever it may pull. Nothing if the objective trains on
        own samples only, or no compute process could score them."""
        if self.means.own_only or self.means.resting:
            return Want()
        return self.source.want()

    def idle_share(self) -> float | None:
        """The part of the latest eight steps' time in which the compute device had no work; None before any."""
        total = sum(spent.total for spent in self.device)
        if not total:
            return None
        return sum(spent.idle for spent in self.device) / total

    async def step(
        self, stopping: asyncio.Event, before_training: Callable[[], Awaitable[None]] | None = None
    ) -> TakenStep | None:
        """Take one step and return its report. None if `stopping` was set before the batch was complete, or if there is
        nothing to train on.

        Args:
            before_training: awaited when the batch is complete; its time is no part of the step's.

        Raises:
            WorkerDied, WorkerFault: the compute process failed, and the step did not happen. Foreign groups of a batch
                that was complete may be marked as used by then.
            OSError, sqlite3.Error: the store could not be written.
        """
        pace = self.means.pace
        began = self.means.clock()
        pace.began = began
        try:
            batch = await self.source.batch(stopping)
            if batch is None:
                return None
            self.means.swarm.wake()
            if before_training is not None:
                generated = self.means.clock()
                await before_training()
                began += self.means.clock() - generated
            return await self.train(batch, began)
        finally:
            pace.began = None

    async def train(self, batch: StepBatch, began: float) -> TakenStep:
        """Take the step on a batch and return its report. It counts the step in `progress`, `totals`, pace and
        reputation, but writes no checkpoint. A trial of the lab in lock step calls it with batches of its own.

        Args:
            began: start of the generation, by `Means.clock`.
        """
        means = self.means
        trained = means.clock()
        authors = {one.group.author for one in batch.foreign}
        weights = {author: means.reputation.weight(author) for author in authors}
        groups = step_groups(batch, weights)
        # Mark the groups as used beside the step and before its checkpoint. A crash may lose a group this way, but no
        # group is trained on twice.
        used = [scored.group.key for scored in batch.foreign]
        report = await beside(
            means.worker.call(Step(groups, own_data=means.own_data_groups)),
            lambda: means.store.settle(used, "trained"),
        )
        ended = means.clock()
        self._judge(batch.foreign, report)
        means.pace.steps.append(ended - began)
        means.progress.step_seconds = means.pace.step_seconds()
        self.device.append(report.device)
        means.swarm.interval = exchange_interval(means.progress.step_seconds)
        seconds = StepSeconds(trained - began - batch.wait, batch.wait, ended - trained, ended - began)
        last = self._account(batch, report, seconds, weights)
        self.recent.add(last.step, batch)
        return last

    def _judge(self, foreign: Sequence[Scored], report: StepReport) -> None:
        """Add the step's evidence to the reputation of its groups' authors; a step that changed nothing has none."""
        if report.skipped:
            return
        for author, groups in Counter(one.group.author for one in foreign).items():
            figures = report.diagnostics.sources.get(peer_id(author))
            if figures is not None:
                self.means.reputation.trained(author, groups, figures)

    def _account(
        self, batch: StepBatch, report: StepReport, seconds: StepSeconds, weights: dict[bytes, float]
    ) -> TakenStep:
        """Count a step, and make it the latest. weights: what its foreign authors' samples counted in the loss."""
        contents = describe(batch.own, batch.foreign)
        progress = self.means.progress
        progress.add_step(len(batch.own), contents.authors, report)
        self.idle_steps += 1
        if report.skipped is None:
            self.idle_steps = 0
        now = self.means.age_clock()
        age = mean([now - scored.born for scored in batch.foreign])
        unequal = None
        if any(weight != 1.0 for weight in weights.values()):
            unequal = {peer_id(author): weight for author, weight in weights.items()}
        last = TakenStep(progress.step, contents, age, report, seconds, unequal)
        self.last = last
        self.means.totals.add_step(last)
        return last
