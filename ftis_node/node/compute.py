"""Supervision of the daemon's compute process: starts, failures and learned batch sizes."""

import asyncio
import contextlib
import logging
from collections import deque

import psutil

from ftis_node.config.run import RunFile
from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError, UserError, first_line
from ftis_node.fit.plan import MIN_TOKENS
from ftis_node.host.clocks import backoff, boot_seconds
from ftis_node.host.descriptors import OutOfFiles
from ftis_node.node.options import JoinOptions
from ftis_node.node.remembered import settled
from ftis_node.step_report import TakenStep, Watched
from ftis_node.tasks.task import told_if_few
from ftis_node.worker.client import Worker, WorkerDied, WorkerFault
from ftis_node.worker.messages import Interrupt, Load, ModelFacts, Watch

FAILURES_OF_NEWEST = 2  # in a row, before an older checkpoint is tried
FAILURES = 5  # in a row, without a checkpoint between them
FIRST_PAUSE = 2.0
LONGEST_PAUSE = 30.0
INTERRUPT_SECONDS = 4.0  # a step stops after its present token or micro-batch
WATCH_SECONDS = 1.0  # between two looks at the process
TOLD_SECONDS = 30.0  # between two log lines about work that takes long
UNWRITABLE = (
    "The tokenizer of %s has no token for some letters of the prompts or tags of %s, which get lost: %s. Use a model "
    "with another tokenizer, or a task in its letters."
)
OWN_ROWS = (
    "%d rows of your own are trained on. They and their samples stay in the compute process. But a model may say what "
    "it was trained on, and what it samples for the run's prompts goes to peers: leave out what nobody may ever read."
)

logger = logging.getLogger(__name__)


class ComputeProcess:
    """The compute process. `worker` is the present one; there is one at a time. `options` may change before a start.

    loaded    what the latest load said of model and task; None before the first, and kept while no process runs
    restarts  failures since the node started
    """

    def __init__(self, options: JoinOptions) -> None:
        self.worker = Worker()
        self.loaded: ModelFacts | None = None
        self.watched = Watched()  # the latest look at it
        self.restarts = 0
        self.options = options
        self._failures = self._written = 0
        self._faults: deque[tuple[float, str]] = deque(maxlen=FAILURES)  # times and messages
        self._learned: dict[str, int] = {}  # batch sizes below the plan, at which memory was enough
        self._watching: asyncio.Task[None] | None = None

    async def start(self, settings: Settings, run_file: RunFile | None) -> None:
        """Spawn the process and load the task and the model in it; after that it needs `Open`. Call `stop` before a
        second start. A large model takes minutes, a download longer.

        Args:
            run_file: None: the run is not known yet, and is made from what is loaded.

        Raises:
            UserError: the task or the model cannot be loaded.
            WorkerDied, WorkerFault: the process failed while it loaded.
        """
        self.worker = Worker()
        output = self.options.output
        if output is None:
            self.worker.start(nice=settings.nice)
        else:
            with output.open("ab") as log:
                self.worker.start(log, nice=settings.nice)
        self._watching = asyncio.create_task(self._watch(self.worker))
        if settings.engine == "vllm" and settings.vllm_folder is None:
            settings = settings.model_copy(update={"vllm_folder": str(self.options.home.vllm)})
        facts = await self.worker.call(self._load(settings, run_file))
        self.loaded = facts
        if facts.unwritable:
            logger.warning(UNWRITABLE, settings.model, facts.task, facts.unwritable)
        few = told_if_few(facts.held_out)
        if few:
            logger.warning("%s", few)
        if facts.own_rows:
            logger.warning(OWN_ROWS, facts.own_rows)
        for reason in facts.plan.reasons:
            logger.log(logging.INFO if facts.plan.fits else logging.WARNING, "%s", reason)

    def _load(self, settings: Settings, run_file: RunFile | None) -> Load:
        """The request to load the task and the model. Template and token caps are the run's if it is known, whatever
        the options say."""
        options = self.options
        source = options.source(run_file)
        caps: dict[str, int] = {}
        if run_file is not None:
            caps = run_file.run.caps
        own_data = None
        if options.own_data is not None:
            own_data = str(options.own_data.resolve())
        return Load(
            settings=settings,
            task=source.name,
            **options.files(),
            reward=source.reward,
            template=source.template,
            code=source.code,
            own_data=own_data,
            own_reward=options.own_reward or "integer",
            caps=caps,
            remembered=self._learned | settled(self.options.home.checkpoints, settings.model),
            must_fit=self.loaded is None,  # only the first: other users of the GPU may free memory soon
        )

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model and task that were loaded last.

        Raises:
            FtisError: nothing was loaded yet.
        """
        if self.loaded is None:
            raise FtisError("The compute process has not loaded a model yet.")
        return self.loaded

    def gpu_pids(self) -> frozenset[int]:
        """The ids of this node's processes that may use a GPU now; empty if there is none, or on a CPU."""
        pid = self.worker.pid
        loaded = self.loaded
        if pid is None or loaded is None or not loaded.device.startswith("cuda"):
            return frozenset()
        with contextlib.suppress(psutil.Error):  # further devices have processes of their own
            return frozenset({pid, *(child.pid for child in psutil.Process(pid).children())})
        return frozenset({pid})

    async def stop(self) -> None:
        """End the process at once and free its memory. Save first what must last. Its open requests raise WorkerDied.
        Without a process nothing happens; `loaded` stays."""
        watching = self._watching
        self._watching = None
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})
        self.watched = Watched()
        await self.worker.stop()

    async def interrupt(self, work: asyncio.Task[None]) -> bool:
        """Interrupt generation or a step; return whether `work` ended by it, so that the process is still usable.

        It takes four seconds at most. After False `work` may still run: cancel it, and stop the process.

        Args:
            work: the task that waits for the process's answer.
        """
        asking = asyncio.create_task(self.worker.call(Interrupt()))
        await asyncio.wait({work}, timeout=INTERRUPT_SECONDS)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return work.done() and isinstance(work.exception(), (WorkerFault, type(None)))

    async def _watch(self, worker: Worker) -> None:
        """Look at the process once a second, from its start to its end; log what it does every 30 s where that takes
        long. `watched` is empty again when the process has ended."""
        told = boot_seconds()
        with contextlib.suppress(WorkerDied, WorkerFault):
            while True:
                self.watched = await worker.call(Watch())
                work = self.watched.doing
                now = boot_seconds()
                if work is not None and min(work.seconds, now - told) >= TOLD_SECONDS:
                    told = now
                    logger.info("%s", work.sentence())
                await asyncio.sleep(WATCH_SECONDS)
        self.watched = Watched()

    def stepped(self, last: TakenStep, generation_batch: int) -> None:
        """Note a successful step: remember the batch sizes that are below the plan, forget those that grew back. The
        next compute process begins with them; the next node does not.

        Args:
            generation_batch: see `Maker`.
        """
        sizes = {"micro_batch_tokens": last.report.micro_batch_tokens, "generation_batch": generation_batch}
        self._learned = {name: size for name, size in sizes.items() if size < getattr(self.facts.plan, name)}

    async def failed(self, fault: FtisError, written: int) -> bool:
        """End what is left of the process and pause for 2 to 30 s, longer each time; return whether to try an older
        checkpoint. Call it once for each failure, before the next `start`. A death for want of memory halves the next
        one's micro-batches. Too many open files are no failure of the process: no pause, and not counted.

        Args:
            written: checkpoints since the node started. Only failures without a new one between them are in a row.

        Raises:
            UserError: it failed six times in a row without a checkpoint between them.
        """
        if isinstance(fault, OutOfFiles):  # the network process ran out of file descriptors
            await self.stop()
            return False
        if isinstance(fault, WorkerDied) and fault.no_room:
            planned = self.facts.settings.micro_batch_tokens or 0
            size = self._learned.get("micro_batch_tokens", planned)  # each such death halves it again
            self._learned["micro_batch_tokens"] = max(MIN_TOKENS, size // 2)
        if written > self._written:
            self._written = written
            self._failures = 0
        self.restarts += 1
        self._failures += 1
        self._faults.append((boot_seconds(), first_line(fault).rstrip(".")))
        if self._failures > FAILURES:
            what = f"The compute process failed {self._failures} times in a row, at last with: {fault}"
            fix = f"Look into {self.options.home.log}; if it was out of memory, set a smaller micro_batch_tokens."
            if str(fault).startswith("DivergedError"):
                fix = "Set a smaller learning_rate, and begin again from the model or an older checkpoint."
            raise UserError(what, fix)
        logger.error("The compute process failed (%s); starting a new one.", fault)
        await self.stop()
        await asyncio.sleep(backoff(self._failures, FIRST_PAUSE, LONGEST_PAUSE))
        return self._failures > FAILURES_OF_NEWEST

    def faults(self, seconds: float) -> tuple[str, ...]:
        """Its failures in the last so many seconds, in words, the latest last; at most five."""
        return tuple(what for when, what in self._faults if boot_seconds() - when < seconds)
