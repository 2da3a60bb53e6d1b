"""A node's training, from its first step to its last checkpoint: pauses, and new compute processes after failures."""

import asyncio
import contextlib
import logging
import math
import sqlite3
import time
from collections.abc import Coroutine
from typing import TypeVar

from ftis_node.config.settings import LIVE_CONSTANTS, Settings
from ftis_node.errors import FtisError
from ftis_node.host.clocks import boot_seconds
from ftis_node.host.descriptors import wait_for_room
from ftis_node.node import assembly
from ftis_node.node.assembly import Components
from ftis_node.node.commands import Commands
from ftis_node.node.compute import ComputeProcess
from ftis_node.node.condition import Telling
from ftis_node.node.evaluation_schedule import EvaluationSchedule
from ftis_node.node.progress import Progress
from ftis_node.observe.answers import State
from ftis_node.step_report import TakenStep
from ftis_node.text import duration, number
from ftis_node.worker.client import WorkerDied, WorkerFault
from ftis_node.worker.messages import Change, Open

GRACE_SECONDS = 12.0  # for the running step, after a request to stop
FINISH_SECONDS = 13.0  # then for the last checkpoint and evaluation
STEP_SECONDS = 10.0  # between two log lines about steps

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class StepLog:
    """Logs a line about a step; only some of quick steps."""

    def __init__(self) -> None:
        self._written = -math.inf

    def write(self, last: TakenStep) -> None:
        """Log the latest step, unless the last line is newer than ten seconds."""
        if time.monotonic() < self._written + STEP_SECONDS:
            return
        self._written = time.monotonic()
        batch = last.batch
        logger.info(
            "Step %d: own groups %d (reward %s), foreign %d (%s), %.1f s",
            last.step,
            batch.own_groups,
            number(batch.own_reward, ".2f"),
            batch.foreign_groups,
            number(batch.foreign_reward, ".2f"),
            last.seconds.total,
        )


class Training:
    """The training of a node that has a run and a model. `go_on_from` comes first, then `run`, once.

    sought       the number of peers that the first step waits for; 0 if it does not wait
    evaluations  the results so far, and when the next one is due
    """

    def __init__(
        self,
        components: Components,
        compute: ComputeProcess,
        commands: Commands,
        telling: Telling,
        started: float,
    ) -> None:
        """
        Args:
            started: when the node was started, by `boot_seconds`.
        """
        self.components = components
        self.sought = 0
        self.evaluations = EvaluationSchedule()
        self.evaluations.recall(components.home.metrics)
        self._means = components.stepper.means
        self._saving = components.saving
        self.compute = compute
        self._commands = commands
        self._telling = telling
        self._started = started
        self._changed: set[str] = set()  # constants of the objective that the compute process has not got yet
        self._steps = StepLog()

    @property
    def settings(self) -> Settings:
        """The node's present settings."""
        return self._means.settings

    @property
    def progress(self) -> Progress:
        return self._means.progress

    @property
    def _goes_on(self) -> bool:
        """Whether another step follows: nobody asked the node to end, and the setting `steps` is not reached."""
        return not self._commands.ending and self.progress.step < (self.settings.steps or math.inf)

    def change(self, settings: Settings, names: set[str]) -> None:
        """Go by these settings, of which the named ones are new, at once. The compute process gets constants of the
        objective before the next step; a pause keeps them for later."""
        self._changed |= names & set(LIVE_CONSTANTS)
        self.components.go_by(settings)

    async def go_on_from(self, *, older: bool = False) -> None:
        """Continue from the newest checkpoint, or an older one; without any, from the model's own weights. Call it
        after each start of a compute process, when it has its run. See `Saving.restore` for errors."""
        restored = await self._saving.restore(self.compute.worker, older=older)
        assembly.go_on_from(self.components, restored, self.compute)

    async def run(self) -> None:
        """Train until a request to end or the last step, then save and evaluate. When it returns, the compute process
        has ended; the swarm and the files are the caller's.

        Raises:
            UserError: a person has to mend it: the compute process fails again and again, or the training diverges.
            OSError, sqlite3.Error: a file of the home cannot be written, as on a full disk.
        """
        self._telling.trains()
        while self._goes_on:
            try:
                if self._commands.pausing:
                    await self._rest()
                else:
                    await self._unless_stopped(self._go_on())
            except (WorkerDied, WorkerFault) as fault:
                await self._recover(fault)
            except (OSError, sqlite3.Error) as error:
                await self._recover(await wait_for_room(error, self._commands.stopping))
        await self._finish()
        self.components.reputation_file.write()
        await self.compute.stop()  # before its files are closed: it may be scoring still

    async def _unless_stopped(self, work: Coroutine[None, None, None]) -> None:
        """Run the work to its end, and raise what it raises. It then returns, too, if the work was given up.

        After a request to stop it has the grace period. Then the compute process is asked to interrupt it, and goes on;
        or else it is stopped, and what was trained since the last checkpoint is lost.
        """
        task = await until_stopped(work, self._commands)
        if not task.done():
            await asyncio.wait({task}, timeout=GRACE_SECONDS)
        if task.done():
            return task.result()
        logger.warning("The compute process is busy for longer than %.0f s; its work is given up.", GRACE_SECONDS)
        if await self.compute.interrupt(task):
            return  # unsaved training is saved afterwards
        task.cancel()
        await asyncio.wait({task})
        await self._saving.wait(self._commands.deadline - time.monotonic())
        await self.compute.stop()

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _go_on(self) -> None:
        """Take the next step. Before the first one is trained comes the first evaluation: peers have this node's groups
        by then."""
        self._telling.note()
        if self._changed:
            await self._take_over()
        evaluate_first = None
        if self.progress.pass_at_1 is None:
            await self._wait_for_peers()
            if self._commands.flush.is_set():
                return
            if self.settings.own_share == 0:  # it makes no groups that others could use meanwhile
                return await self._evaluate_first()
            evaluate_first = self._evaluate_first
        last = await self.components.stepper.step(self._commands.stopping, evaluate_first)
        if last is not None:
            await self._after_step(last)

    async def _evaluate_first(self) -> None:
        """Evaluate the untrained model, and save the result, so that no later start evaluates it again."""
        await self._evaluate()
        await self._saving.checkpoint(self.compute.worker, self.progress)

    async def _take_over(self) -> None:
        """Give changed constants to the compute process, and write them down for a replay."""
        new = {name: getattr(self.settings, name) for name in self._changed}
        self._changed = set()
        await self.compute.worker.call(Change(self.settings))
        self.components.metrics.write("changed", step=self.progress.step, settings=new)

    async def _wait_for_peers(self) -> None:
        """Wait for `min_peers` peers before the first step (useful if all nodes of a swarm start at once), without a
        time limit, until the node is to pause or to end."""
        self.sought = self.settings.min_peers
        view = self.components.swarm.membership.active_view
        flush = self._commands.flush
        while len(view) < self.sought and not flush.is_set():
            self._telling.note()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(flush.wait(), 0.2)
        self.sought = 0

    async def _after_step(self, last: TakenStep) -> None:
        """Log a step, then save and evaluate if they are due. The log line comes first: a replay needs the line of each
        step that a checkpoint has."""
        components = self.components
        for warning in last.report.warnings:
            logger.info("%s", warning)
        self.compute.stepped(last, components.stepper.source.maker.generation_batch)
        components.metrics.write(
            "step",
            state=self._telling.condition().state,
            peers=len(components.swarm.membership.active_view),
            pool=len(components.stepper.pool),
            bytes_in=components.swarm.traffic.bytes_in,
            bytes_out=components.swarm.traffic.bytes_out,
            **last.row(),
        )
        self._steps.write(last)
        await self._saving.after_step(self.compute.worker, self.progress, last.report)
        components.reputation_file.after_step()
        if not self.evaluations.due_seconds(self._means.until_evaluation()):
            await self._evaluate()

    async def _evaluate(self) -> None:
        """Evaluate now, whether it is due or not; the training waits for it."""
        since = boot_seconds() - self._started
        rewards = [reward for reward, _ in self.components.stepper.source.maker.latest]
        await self.evaluations.evaluate(self._means, self.components.metrics, since, rewards)
        due = self.evaluations.due_seconds(self._means.until_evaluation())
        if self._goes_on and due:
            logger.info("The next evaluation is due in %s.", duration(due))

    # --- pauses and the end ---------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Pause: end the compute process, which frees its memory, and only serve peers until a request comes."""
        try:
            await self._unless_stopped(self._save_last())
        except (WorkerDied, WorkerFault) as fault:
            logger.warning("Pausing unsaved (%s); %s.", fault, self._saving.last)
        await self.compute.stop()
        self._means.resting = True
        flag = self.components.home.flag
        while self._commands.pausing and not self._commands.ending:
            reason = f"Paused at step {self.progress.step}: it only serves its peers."
            advice = f"`ftis-node resume{flag}` goes on."
            why = self._commands.why
            if why:
                reason = f"{reason} {why}"
                advice = f"`ftis-node resume{flag}` goes on now."
            self._telling.set_apart(State.PAUSED, reason, advice)
            await self._commands.next()
        if not self._commands.ending:
            await self._unless_stopped(self._renew())

    async def _save_last(self) -> None:
        """Write a checkpoint if a good step is unsaved, and wait until it is on disk. See `Saving.flush` for errors."""
        await self._saving.save(self.compute.worker, self.progress)
        await self._saving.flush()

    async def _finish(self) -> None:
        """Take the last checkpoint and evaluation; after a request to stop, only in the time that is left."""
        if self._means.resting:
            return
        self._telling.set_apart(State.STOPPING, "Saving, and evaluating for the last time.")
        ending = await until_stopped(self._end(), self._commands)
        if not ending.done():
            await asyncio.wait({ending}, timeout=max(0.0, self._commands.deadline - time.monotonic()))
        ending.cancel()
        await asyncio.wait({ending})
        try:
            ending.result()
        except (asyncio.CancelledError, WorkerDied, WorkerFault) as fault:
            logger.warning("The end was cut short (%s); %s.", str(fault) or "out of time", self._saving.last)
        else:
            if self._commands.ending:
                logger.info("The node ends: %s. The same command goes on.", self._saving.last)

    async def _end(self) -> None:
        """Save first: if time runs out, only the evaluation is lost. No evaluation if the latest step has one."""
        await self._save_last()
        if self.progress.pass_at_1_step != self.progress.step:
            await self._evaluate()

    # --- failures -------------------------------------------------------------------------------------------------

    async def _recover(self, fault: FtisError) -> None:
        """Continue from the last checkpoint, and wait again if there are too many open files. For errors see `run`."""
        try:
            await self._unless_stopped(self._revive(fault))
        except (OSError, sqlite3.Error) as error:
            await self._recover(await wait_for_room(error, self._commands.stopping))

    async def _revive(self, fault: FtisError) -> None:
        """Start a new compute process from the last checkpoint, after a GPU fault or an out-of-memory kill, until one
        works or the node is to stop. A checkpoint that is being written is completed first, if the old process still
        can."""
        self._telling.set_apart(State.LOADING, "The compute process failed and is being started again.")
        while not self._commands.stopping.is_set():
            with contextlib.suppress(WorkerDied, WorkerFault):
                await self._saving.flush()
            older = await self.compute.failed(fault, self._saving.written)
            try:
                return await self._renew(older=older)
            except (WorkerDied, WorkerFault) as error:
                fault = error
        await self.compute.stop()  # a failed process saves nothing

    async def _renew(self, *, older: bool = False) -> None:
        """Start another compute process with the newest checkpoint (or an older one), after a failure or a pause.
        Groups that were not scored are scored now. Raises WorkerDied, WorkerFault: this one failed too."""
        self._telling.set_apart(State.LOADING, f"Loading {self.settings.model}.")
        run_file = self.components.run_file
        await self.compute.start(self.settings, run_file)
        await self.compute.worker.call(Open(run_file.run))
        await self.go_on_from(older=older)
        self.evaluations.went_back(self.progress.step)
        self._means.worker = self.compute.worker  # only now: an engine without a run cannot score
        self._means.resting = False
        assembly.refill_pool(self.components.stepper)
        if not self._commands.stopping.is_set():
            self._telling.trains()


async def until_stopped(work: Coroutine[None, None, Result], commands: Commands) -> asyncio.Task[Result]:
    """Run the work; the returned task is not done if a request to stop came first. It goes on then: the caller waits
    for it or cancels it."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(commands.stopping.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return task
