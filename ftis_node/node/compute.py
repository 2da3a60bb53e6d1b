"""The daemon's compute process: started, counted when it fails, and told what memory turned out to allow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

from ftis_node.config.run import RunFile
from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError, UserError
from ftis_node.host.clocks import boot_seconds
from ftis_node.host.descriptors import OutOfFiles
from ftis_node.node.checkpointing import LearnedSizes, settled
from ftis_node.node.options import JoinOptions
from ftis_node.node.status import ComputeStatus, resident_bytes
from ftis_node.step_report import TakenStep
from ftis_node.store.home import Home
from ftis_node.worker.client import Worker, WorkerDied, WorkerFault
from ftis_node.worker.messages import Gpu, GpuFigures, Interrupt, Load, ModelFacts

FAILURES_OF_NEWEST = 2  # in a row, before an older checkpoint is tried
FAILURES = 5  # in a row, without a checkpoint between them
LONGEST_PAUSE = 30.0
INTERRUPT_SECONDS = 4.0  # of which a step needs those of a token or a micro-batch
GPU_SECONDS = 2.0  # between looks at what it is at
UNWRITABLE = (
    "The tokenizer of %s has nothing for some letters of the prompts and tags of %s, which get lost: %s. It "
    "cannot answer in the form that is asked for; take a model with another tokenizer, or a task in its letters."
)

logger = logging.getLogger(__name__)


class ComputeProcess:
    """One at a time; `worker` is the present one. `options` may change before it is started."""

    def __init__(self, options: JoinOptions, home: Home, started: Callable[[], None]) -> None:
        """
        Args:
            started: called when there is another process.
        """
        self.worker = Worker()
        self.loaded: ModelFacts | None = None
        self.gpu: GpuFigures | None = None  # None where there is none, or it does not tell
        self.restarts = 0
        self.options = options
        self._home = home
        self._started = started
        self._failures = self._written = 0
        self._faults: deque[tuple[float, str]] = deque(maxlen=FAILURES)  # when, and what was wrong
        self._learned: LearnedSizes
        self._watching: asyncio.Task[None] | None = None

    async def start(self, settings: Settings, run_file: RunFile | None) -> None:
        """Spawns it and loads task and model in it.

        Raises:
            UserError: they cannot be loaded.
        """
        self._learned = LearnedSizes(self._home.plan, settings.model)
        self.worker = Worker()
        with contextlib.ExitStack() as stack:
            output = self.options.output
            await self.worker.start(stack.enter_context(output.open("ab")) if output is not None else None)
        self._started()
        run = run_file.run if run_file is not None else None
        self.loaded = facts = await self.worker.call(
            Load(
                settings=settings,
                task=self.options.task_of(run_file),
                **self.options.files(),
                reward=self.options.reward_of(run_file),
                code=self.options.task is not None,
                caps=run.caps if run is not None else {},
                remembered=self._learned.sizes | settled(self._home.checkpoints, settings.model),
                must_fit=self.loaded is None,  # later ones go on: what others take of a GPU may be gone in a minute
            )
        )
        if facts.device.startswith("cuda"):
            self._watching = asyncio.create_task(self._watch(self.worker))
        if facts.unwritable:
            logger.warning(UNWRITABLE, settings.model, facts.task, facts.unwritable)
        for reason in facts.plan.reasons:
            (logger.info if facts.plan.fits else logger.warning)("%s", reason)

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model and task that were loaded last.

        Raises:
            FtisError: nothing was loaded yet.
        """
        if self.loaded is None:
            raise FtisError("The compute process has not loaded a model yet.")
        return self.loaded

    async def stop(self) -> None:
        """Ends it now, which frees its memory. What should last must have been saved before."""
        await self._unwatch()
        await self.worker.stop()

    async def interrupt(self, work: asyncio.Task[None]) -> bool:
        """Has generation or a step given up; returns whether `work` has ended by that, and all that it had is there."""
        asking = asyncio.create_task(self.worker.call(Interrupt()))
        await asyncio.wait({work}, timeout=INTERRUPT_SECONDS)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return work.done() and isinstance(work.exception(), (WorkerFault, type(None)))

    async def _watch(self, worker: Worker) -> None:
        with contextlib.suppress(WorkerDied, WorkerFault):
            while True:
                self.gpu = await worker.call(Gpu())
                await asyncio.sleep(GPU_SECONDS)
        self.gpu = None

    async def _unwatch(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})
        self.gpu = None

    def saved(self, written: int) -> None:
        """So many checkpoints were written: if there is a new one, what failed before it is forgiven."""
        if written > self._written:
            self._written, self._failures = written, 0

    def stepped(self, last: TakenStep, generation_batch: int) -> None:
        """A step succeeded; what is smaller than the plan wanted it is remembered, and what has grown again is not."""
        sizes = {"micro_batch_tokens": last.report.micro_batch_tokens, "generation_batch": generation_batch}
        smaller = {name: size for name, size in sizes.items() if size < getattr(self.facts.sizes, name)}
        self._learned.learn(self.facts.plan.budget, **smaller)

    async def failed(self, fault: FtisError) -> bool:
        """Ends what is left of it and lets some time pass; returns whether an older checkpoint should be tried.

        Raises:
            UserError: it failed too often in a row.
        """
        if isinstance(fault, OutOfFiles):  # which is not its doing
            await self.stop()
            return False
        self.restarts += 1
        self._failures += 1
        self._faults.append((boot_seconds(), _one_line(fault)))
        if self._failures > FAILURES:
            raise UserError(
                f"The compute process failed {self._failures} times in a row, at last with: {fault}",
                f"Look into {self._home.log}; if it was out of memory, give a smaller micro_batch_tokens.",
            )
        logger.error("The compute process failed (%s); starting a new one.", fault)
        await self.stop()
        await asyncio.sleep(min(2.0**self._failures, LONGEST_PAUSE))
        return self._failures > FAILURES_OF_NEWEST

    def status(self) -> ComputeStatus:
        """What it is doing."""
        return ComputeStatus(self.loaded, self.restarts, resident_bytes(self.worker.pid), self.gpu)

    def owing(self, limit: float) -> float:
        """Seconds for which it has owed an answer, 0 if they are no more than `limit`."""
        owed = self.worker.owing_seconds()
        return owed if owed > limit else 0.0

    def faults(self, seconds: float) -> tuple[str, ...]:
        """What it failed with in the last so many seconds, the latest last."""
        return tuple(what for when, what in self._faults if boot_seconds() - when < seconds)


def _one_line(error: BaseException) -> str:
    """The first line of what is wrong, cut, without the full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
