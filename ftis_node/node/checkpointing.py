"""When checkpoints are written, and returns to older ones."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from ftis_node.errors import UsageError, UserError
from ftis_node.host.files import bytes_under, removed_if_it_fails
from ftis_node.node.progress import Progress
from ftis_node.node.remembered import refuse_other_model
from ftis_node.observe.answers import CheckpointStatus
from ftis_node.observe.metrics import MetricsLog
from ftis_node.step_report import StepReport
from ftis_node.store.checkpoints import Checkpoints, Facts
from ftis_node.text import GB, rounded
from ftis_node.worker.client import Worker
from ftis_node.worker.messages import Restore, Snapshot, Write

CHECKPOINT_SECONDS = 300.0  # between checkpoints, by default; of large ones more
LONGEST_SECONDS = 3600.0  # between large ones
CHECKPOINT_BYTES_AN_HOUR = 10 * GB  # larger models save less often: a disk rated for 600 TB then lasts 6.5 years
SETBACKS = 2  # most returns to older checkpoints
RECOVERED_STEPS = 10  # good steps in a row after which the count of returns restarts

logger = logging.getLogger(__name__)


def checkpoint_seconds(minutes: float | None, size: int) -> float:
    """Seconds between checkpoints of `size` bytes.

    Args:
        minutes: the setting; 0: after every good step. None: five, longer if that would write more than 10 GB an hour,
            an hour at most.
    """
    if minutes is not None:
        return 60 * minutes
    return min(max(CHECKPOINT_SECONDS, 3600 * size / CHECKPOINT_BYTES_AN_HOUR), LONGEST_SECONDS)


def wear(minutes: float | None, size: int) -> str:
    """A phrase for people: the interval of checkpoints of `size` bytes, and the bytes written per day."""
    seconds = checkpoint_seconds(minutes, size)
    if not seconds:
        return f"a checkpoint of {rounded(size)} after every step"
    return f"a checkpoint of {rounded(size)} every {seconds / 60:.3g} min, {rounded(size * 86400 / seconds)} a day"


class Saving:
    """Writes checkpoints beside the training, and returns to an older one when the training diverges.

    A checkpoint is due after the first good step of every start and of every return: that step shows that the weights
    can be trained. Later ones follow the interval of `checkpoint_seconds`. A start may repeat some steps, but it trains
    on none of their groups again: the store marks them as used on disk before the checkpoint of their step.

    saved_step  of the newest whole checkpoint; 0 without one
    written     checkpoints that this process has written
    next_bytes  of the next checkpoint on disk: as the latest one took, 0 before any. An older one is removed after it
    branch      the number of the branch since the latest start or return, see `Checkpoints`
    """

    def __init__(
        self,
        path: Path,
        facts: Facts,
        metrics: MetricsLog,
        minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            path: the directory of checkpoints, which is made here; it is one node's alone.
            facts: of each checkpoint beside branch and progress, see `facts_of`. One to go on from must have the same
                model, trained part and quantisation.
            minutes: between checkpoints, see `checkpoint_seconds`. clock: seconds.
        """
        self.minutes = minutes
        self._metrics = metrics
        self._clock = clock
        self._path = path
        self._checkpoints = Checkpoints(path)
        self._facts = facts
        self.branch = 1

        # The newest whole checkpoint.
        self.saved_step = 0
        self._saved_at: float | None = None  # the time of its state
        self.written = 0
        self.next_bytes = 0

        # The next one.
        self._writing: asyncio.Task[None] | None = None
        self._interval_began: float | None = None  # None: the first good step is saved at once
        self._unsaved = False  # there was a good step since the latest copy
        self._asked: int | None = None  # the step that the owner wants saved

        # Good steps, and returns to older checkpoints.
        self._good_step = 0  # the last step with a finite gradient
        self._good_steps = 0  # in a row
        self._setbacks = 0

    async def restore(self, worker: Worker, *, older: bool = False) -> Progress | None:
        """Continue from the newest sound checkpoint; return None if there is none. It begins a new branch, and writes
        `resumed` into the log. Call it at each start of a compute process, before its first step.

        Args:
            older: use an older checkpoint if there is one, because the compute process keeps failing with the newest.
                If it fails with the older one too, the weights are not the cause, and the newest is used again.

        Raises:
            UsageError: the checkpoint is of another model, or of other quantised weights.
            UserError: a newer version wrote it.
            WorkerDied, WorkerFault: the compute process failed with it.
        """
        checkpoints = self._checkpoints
        if older and await asyncio.to_thread(checkpoints.take_back):
            older = False  # it failed with the older one too
        found = None
        if older:
            found = await asyncio.to_thread(checkpoints.latest, self.saved_step)
        if found is None:
            found = await asyncio.to_thread(checkpoints.latest)
        self.branch = await asyncio.to_thread(checkpoints.next_branch)
        if found is None:
            return None
        directory, facts = found
        self._refuse_other(facts)
        progress = Progress.from_facts(facts["progress"])
        if older:
            await asyncio.to_thread(checkpoints.set_aside, progress.step, "doubted")
        await self._load(worker, directory, progress.step)
        self.saved_step = progress.step
        self._good_step = progress.step
        logger.info("Going on from step %d", progress.step)
        self._metrics.write("resumed", step=progress.step, branch=facts.get("branch", 0))
        return progress

    def _refuse_other(self, facts: Facts) -> None:
        """Raise UsageError for a checkpoint of another model, or of layers beside other weights."""
        refuse_other_model(self._path, facts["model"], self._facts["model"])
        theirs = facts.get("quantisation", "none")
        if theirs != self._facts.get("quantisation", "none"):
            raise UsageError(
                f"The LoRA layers under {self._path} were trained with quantisation={theirs}.",
                "Leave out quantisation, which the home knows, or use a fresh --home.",
            )

    async def _load(self, worker: Worker, directory: Path, step: int) -> None:
        """Let the compute process take up a checkpoint's weights; the next good step is saved at once."""
        await worker.call(Restore(str(directory), step))
        self._unsaved = False
        self._interval_began = None
        self._saved_at = self._clock()

    async def after_step(self, worker: Worker, progress: Progress, report: StepReport) -> None:
        """Write a checkpoint if one is due; after too many bad steps in a row, return to an older one. Call it after
        each step, with the progress that counts it.

        It waits for the copy into main memory; the files are written beside the next step. A failure of that is raised
        here after the next step, or by `flush`.

        Raises:
            UserError: earlier returns did not help.
            WorkerDied, WorkerFault, OSError: a checkpoint could not be written; the previous one remains.
        """
        if self._writing is not None and self._writing.done():
            await self.flush()  # raises a failure now instead of at the next checkpoint
        if report.bad_steps == 0:
            self._good_step = progress.step
            self._good_steps += 1
            if self._good_steps >= RECOVERED_STEPS:
                self._setbacks = 0
            self._unsaved = True
            if self._asked is not None or self._due_in() <= 0:
                await self.checkpoint(worker, progress)
                self._interval_began = self._clock()
        elif report.diverged:  # bad steps are not saved: the same weights again would push out older checkpoints
            await self._go_back(worker, progress)

    def _due_in(self) -> float:
        """Seconds until the next checkpoint; 0 or less if it is due."""
        if self._interval_began is None:
            return 0.0
        return self._interval_began + checkpoint_seconds(self.minutes, self.next_bytes) - self._clock()

    async def save(self, worker: Worker, progress: Progress) -> None:
        """Write a checkpoint at once if a good step is unsaved; `flush` waits until it is on disk.

        Bad steps do not change the weights, so they need no checkpoint.
        """
        await self.flush()
        if self._unsaved:
            await self.checkpoint(worker, progress)

    async def checkpoint(self, worker: Worker, progress: Progress) -> None:
        """Copy the worker's state into main memory, due or not. The files, checksums, fsync and rename follow beside
        the next step. The one before must be on disk first, which this waits for, and whose failure it raises."""
        await self.flush()
        directory = await asyncio.to_thread(self._checkpoints.begin, progress.step)
        with removed_if_it_fails(directory):
            await worker.call(Snapshot(str(directory)))
        copied_at = self._clock()
        self._unsaved = False
        facts = {**self._facts, "branch": self.branch, "progress": progress.facts()}
        self._writing = asyncio.create_task(self._write(worker, directory, progress.step, facts, copied_at))

    async def _write(self, worker: Worker, directory: Path, step: int, facts: Facts, copied_at: float) -> None:
        """Write what was copied into main memory, and make it the newest whole checkpoint. A task beside the training;
        `flush` raises its errors. An error removes what is there of it. A cancel does not: an unfinished directory
        stays until the next start (`Checkpoints`), and a `commit` that has begun goes on in its thread."""
        with removed_if_it_fails(directory):
            await worker.call(Write(str(directory)))
            self.next_bytes = await asyncio.to_thread(bytes_under, directory)
            await asyncio.to_thread(self._checkpoints.commit, directory, facts)
        self.saved_step = step
        self._saved_at = copied_at
        self.written += 1
        if self._asked is not None and step >= self._asked:
            self._asked = None

    def ask(self, step: int) -> None:
        """Let the owner have what was learned up to `step`, the last finished one, in a checkpoint.

        If no checkpoint has it yet, one is written after the next good step, due or not; a bad step saves nothing. One
        that is being written and has it is enough if it is on disk before that. If there is nothing to save, nothing
        happens. It returns at once; `status` says `asked` until the checkpoint is on disk.

        Raises:
            UsageError: the disk has no room for another checkpoint. To begin it all the same would end the node: with
                the error of the full disk, which `after_step` raises one step later, or `flush`.
        """
        free = shutil.disk_usage(self._path).free
        if free < self.next_bytes:
            raise UsageError(
                f"The home's disk has {rounded(free)} left, and a checkpoint takes {rounded(self.next_bytes)}.",
                "Make room on it, and ask again.",
            )
        if self._unsaved or self.writing:
            self._asked = step

    def status(self) -> CheckpointStatus:
        """The status of the newest checkpoint: its step, the bytes of the next, the seconds since its state was copied,
        the seconds until the next is due, and whether the owner waits for one. Step and age are None without one, the
        seconds until the next if no good step is unsaved."""
        age = None
        step = None
        if self._saved_at is not None:
            age = self._clock() - self._saved_at
            step = self.saved_step
        due = None
        if self._unsaved:
            due = max(0.0, self._due_in())
        return CheckpointStatus(step, self.next_bytes or None, age, due, self._asked is not None)

    @property
    def last(self) -> str:
        """The newest checkpoint, in words that continue a log line."""
        if self._saved_at is None:
            return "there was nothing to save yet"
        return f"step {self.saved_step} was saved last"

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._writing is not None and not self._writing.done()

    async def wait(self, seconds: float) -> None:
        """Wait at most so long for the checkpoint in progress, which continues; `flush` raises its failure."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=seconds)

    async def flush(self) -> None:
        """Wait until the latest checkpoint is on disk.

        Raises:
            WorkerDied, WorkerFault, OSError: it could not be written (raised once); the previous one remains.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            await writing

    def abandon(self) -> None:
        """Give up the checkpoint in progress because the node ends; log a failure."""
        writing = self._writing
        self._writing = None
        if writing is None or writing.cancel() or writing.cancelled():
            return
        error = writing.exception()
        if error is not None:
            logger.warning("A checkpoint was not written (%s); %s.", error, self.last)

    async def _go_back(self, worker: Worker, progress: Progress) -> None:
        """Load weights and optimiser of a checkpoint from which a step succeeded; the count of steps continues. Later
        checkpoints are set aside for good. Raises UserError for the third return in a row, or without such a
        checkpoint."""
        self._good_steps = 0
        self._setbacks += 1
        if self._setbacks > SETBACKS:
            raise self._hopeless()
        await self.flush()
        found = await asyncio.to_thread(self._checkpoints.latest, self._good_step)
        if found is None:
            raise self._hopeless()
        directory, facts = found
        self._good_step = facts["progress"]["step"]
        self.saved_step = self._good_step
        await asyncio.to_thread(self._checkpoints.set_aside, self._good_step)
        await self._load(worker, directory, progress.step)
        logger.error("Too many steps without a finite gradient: back to the weights of step %d.", self._good_step)
        self._metrics.write("restored", step=progress.step, weights_of_step=self._good_step)

    def _hopeless(self) -> UserError:
        """The error that ends the training; the caller raises it."""
        return UserError(
            "The training gives no finite numbers any more, and older checkpoints did not help.",
            f"Start again with a smaller learning_rate; the checkpoints under {self._path} remain.",
        )
