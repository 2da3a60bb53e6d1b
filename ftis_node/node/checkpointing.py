"""The state that outlives a restart: checkpoints, returns to older ones, learned batch sizes and reputation."""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict

from ftis_node.config.consistency import by_a_person
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.fit.memory import Quantisation
from ftis_node.host.files import bytes_under, kept, removed_if_it_fails, replace_text
from ftis_node.node.progress import Progress
from ftis_node.observe.answers import CheckpointStatus
from ftis_node.observe.metrics import MetricsLog
from ftis_node.policy.names import lasting, same_model
from ftis_node.step_report import StepReport
from ftis_node.store.checkpoints import Checkpoints, Facts, labelled, newest_facts, parse_label
from ftis_node.store.home import Home
from ftis_node.swarm.reputation import Reputation
from ftis_node.text import GB, rounded
from ftis_node.worker.client import Worker
from ftis_node.worker.messages import Restore, Snapshot, Write

CHECKPOINT_SECONDS = 300.0  # between checkpoints, by default; of large ones more
LONGEST_SECONDS = 3600.0  # between large ones
CHECKPOINT_BYTES_AN_HOUR = 10 * GB  # larger models save less often: a disk rated for 600 TB then lasts 6.5 years
BOOKS_SECONDS = 60.0
SETBACKS = 2  # most returns to older checkpoints
RECOVERED_STEPS = 10  # good steps in a row after which the count of returns restarts

logger = logging.getLogger(__name__)

Layers = Mapping[str, int | tuple[str, ...]]
"""Settings of LoRA layers that a home keeps, by name: rank, alpha, targets."""


def checkpoint_seconds(minutes: float | None, size: int) -> float:
    """Seconds between checkpoints of `size` bytes.

    Args:
        minutes: the setting. None: five, longer if that would write more than 10 GB an hour, an hour at most.
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
    """

    def __init__(
        self,
        path: Path,
        model: str,
        optimiser: str,
        metrics: MetricsLog,
        minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        quantisation: Quantisation = "none",
        layers: Layers | None = None,
    ) -> None:
        """
        Args:
            model: the label that a checkpoint must have: the model's name and the trained part of it.
            optimiser: the optimiser whose state it must hold.
            minutes: between checkpoints, see `checkpoint_seconds`. clock: seconds.
            quantisation: of the frozen weights beside which the checkpoint's were trained.
            layers: the settings of the LoRA layers, if it trains any.
        """
        self.saved_step = 0
        self.written = 0  # checkpoints written by this process
        self.branch = 1  # number of the branch since the latest start or return, see `Checkpoints`
        self._path = path
        self._model = model
        self._of = facts_of(model, optimiser, quantisation, layers)
        self._metrics = metrics
        self.minutes = minutes
        self._clock = clock
        self._checkpoints = Checkpoints(path)
        self._writing: asyncio.Task[None] | None = None
        self._saved_at: float | None = None  # time of the state in the newest checkpoint
        self._begun_at = 0.0  # time of the latest one, which may not be complete yet
        self.next_bytes = 0  # of the next checkpoint on disk, as far as known; an older one is removed only after it
        self._unsaved = False  # a good step is in no checkpoint
        self._tried = False  # a step from these weights was good, and was saved
        self._good_step = 0  # the last step with a finite gradient
        self._good_steps = 0  # in a row
        self._setbacks = 0
        self._asked: int | None = None  # the step that the owner wants saved

    async def restore(self, worker: Worker, *, older: bool = False) -> Progress | None:
        """Continue from the newest sound checkpoint; return None if there is none.

        Args:
            older: use an older checkpoint if there is one, because the compute process keeps failing with the newest.
                If it fails with the older one too, the weights are not the cause, and the newest is used again.

        Raises:
            UsageError: the checkpoint is of another model, or of other quantised weights.
        """
        if older and await asyncio.to_thread(self._checkpoints.take_back):
            older = False
        known_damaged = self._checkpoints.damaged()
        found = None
        if older:
            found = await asyncio.to_thread(self._checkpoints.latest, self.saved_step)
        if found is None:
            found = await asyncio.to_thread(self._checkpoints.latest)
        self.branch = await asyncio.to_thread(self._checkpoints.next_branch)
        for path in set(self._checkpoints.damaged()) - set(known_damaged):
            logger.error("A checkpoint is damaged and set aside as %s; an older one is used, if there is one.", path)
        if found is None:
            return None
        directory, facts = found
        refuse_other_model(self._path, facts["model"], self._model)
        theirs = facts.get("quantisation", "none")
        if theirs != self._of.get("quantisation", "none"):
            what = f"The LoRA layers under {self._path} were trained with quantisation={theirs}."
            raise UsageError(what, "Leave out quantisation, which the home knows, or use a fresh --home.")
        progress = Progress.from_facts(facts["progress"])
        if older:
            await asyncio.to_thread(self._checkpoints.set_aside, progress.step, "doubted")
        await self._load(worker, directory, progress.step)
        self.saved_step = progress.step
        self._good_step = progress.step
        logger.info("Going on from step %d", progress.step)
        self._metrics.write("resumed", step=progress.step, branch=facts.get("branch", 0))
        return progress

    async def _load(self, worker: Worker, directory: Path, step: int) -> None:
        await worker.call(Restore(str(directory), step))
        self._unsaved = False
        self._tried = False
        self._saved_at = self._clock()

    async def after_step(self, worker: Worker, progress: Progress, report: StepReport) -> None:
        """Write a checkpoint if one is due; after too many bad steps in a row, return to an older one.

        Raises:
            UserError: earlier returns did not help.
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
                self._tried = True
        elif report.diverged:  # bad steps are not saved: the same weights again would push out older checkpoints
            await self._go_back(worker, progress)

    def _due_in(self) -> float:
        """Seconds until the next checkpoint; 0 or less if it is due."""
        if not self._tried:
            return 0.0
        return self._begun_at + checkpoint_seconds(self.minutes, self.next_bytes) - self._clock()

    async def save(self, worker: Worker, progress: Progress) -> None:
        """Write a checkpoint at once if a good step is unsaved; `flush` waits until it is on disk.

        Bad steps do not change the weights, so they need no checkpoint.
        """
        await self.flush()
        if self._unsaved:
            await self.checkpoint(worker, progress)

    async def checkpoint(self, worker: Worker, progress: Progress) -> None:
        """Copy the worker's state into main memory. The files, checksums, fsync and rename follow beside the next
        step."""
        await self.flush()
        directory = await asyncio.to_thread(self._checkpoints.begin, progress.step)
        with removed_if_it_fails(directory):
            await worker.call(Snapshot(str(directory)))
        self._begun_at = self._clock()
        self._unsaved = False
        facts = {**self._of, "branch": self.branch, "progress": progress.facts()}
        self._writing = asyncio.create_task(self._write(worker, directory, progress.step, facts))

    async def _write(self, worker: Worker, directory: Path, step: int, facts: Facts) -> None:
        with removed_if_it_fails(directory):
            await worker.call(Write(str(directory)))
            self.next_bytes = await asyncio.to_thread(bytes_under, directory)
            await asyncio.to_thread(self._checkpoints.commit, directory, facts)
        self.saved_step = step
        self._saved_at = self._begun_at
        self.written += 1
        if self._asked is not None and step >= self._asked:
            self._asked = None

    def ask(self, step: int) -> None:
        """Let the owner have `step` in a checkpoint after the running one, unless it is in one already.

        Raises:
            UsageError: the disk has no room for another checkpoint; one that fails ends the node.
        """
        free = shutil.disk_usage(self._path).free
        if free < self.next_bytes:
            what = f"The home's disk has {rounded(free)} left, and a checkpoint takes {rounded(self.next_bytes)}."
            raise UsageError(what, "Make room on it, and ask again.")
        if self._unsaved or self.writing:
            self._asked = step

    def status(self) -> CheckpointStatus:
        """The status of the newest checkpoint."""
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
    def writing(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._writing is not None and not self._writing.done()

    async def wait(self, seconds: float) -> None:
        """Wait so long for the checkpoint in progress; `flush` raises its failure."""
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
            logger.warning("A checkpoint was not written (%s); step %d was saved last.", error, self.saved_step)

    async def _go_back(self, worker: Worker, progress: Progress) -> None:
        """Load weights and optimiser of a checkpoint from which a step succeeded; the count of steps continues."""
        self._good_steps = 0
        self._setbacks += 1
        if self._setbacks > SETBACKS:
            raise self._hopeless()
        await self.flush()
        found = await asyncio.to_thread(self._checkpoints.latest, self._good_step)
        if found is None:
            raise self._hopeless()
        directory, facts = found
        self.saved_step = self._good_step = facts["progress"]["step"]
        await asyncio.to_thread(self._checkpoints.set_aside, self._good_step)
        await self._load(worker, directory, progress.step)
        logger.error("Too many steps without a finite gradient: back to the weights of step %d.", self._good_step)
        self._metrics.write("restored", step=progress.step, weights_of_step=self._good_step)

    def _hopeless(self) -> UserError:
        what = "The training gives no finite numbers any more, and older checkpoints did not help."
        return UserError(what, f"Start again with a smaller learning_rate; the checkpoints under {self._path} remain.")


def refuse_other_model(checkpoints: Path, theirs: str, ours: str) -> None:
    """Raise UsageError unless both labels name the same model, trained in the same way."""
    of = parse_label(theirs)
    to = parse_label(ours)
    if theirs == ours:
        return
    if of is not None and to is not None and of[1] == to[1] and same_model(of[0], to[0]):
        return
    what = f"The checkpoints in {checkpoints} are of another model, or trained otherwise: {theirs}, not {ours}."
    raise UsageError(what, "Use the model and --lora/--full of the first start, or a fresh --home.")


def refuse_other_settings(checkpoints: Path, settings: Settings) -> None:
    """Raise UsageError if the newest checkpoint has another model than the settings, or was trained otherwise."""
    _, of = _begun(checkpoints)
    if of is not None:
        model, kind = of
        ours = kind
        if settings.lora is not None:
            ours = "lora" if settings.lora else "full"
        refuse_other_model(checkpoints, labelled(model, kind), labelled(settings.model, ours))


def _begun(checkpoints: Path) -> tuple[Facts, tuple[str, str] | None]:
    """The facts of the newest checkpoint, and its model with the trained part of it; None if there is none."""
    facts: Facts = {}
    if checkpoints.is_dir():
        facts = newest_facts(checkpoints) or {}
    return facts, parse_label(facts.get("model"))


def facts_of(
    model: str, optimiser: str | None, quantisation: Quantisation | None, layers: Layers | None = None
) -> Facts:
    """The facts by which a start knows whether, and with which settings, a checkpoint is its own."""
    facts: Facts = {"model": model, "optimiser": optimiser}
    if quantisation == "nf4":
        facts["quantisation"] = "nf4"
    if layers is not None:
        facts["layers"] = dict(layers)
    return facts


def layers_of(settings: Settings) -> Layers | None:
    """The settings that fix the LoRA layers of a home; None if it has none."""
    if not settings.lora:
        return None
    return {"lora_rank": settings.lora_rank, "lora_alpha": settings.lora_alpha, "lora_targets": settings.lora_targets}


def settled(checkpoints: Path, model: str) -> dict[str, bool | str]:
    """The settings that the newest checkpoint of `model` fixes: LoRA or not, the optimiser, quantised weights."""
    facts, of = _begun(checkpoints)
    if of is None or not same_model(of[0], model):
        return {}
    return {
        "lora": of[1] == "lora",
        "optimiser": facts["optimiser"],
        "quantisation": facts.get("quantisation", "none"),
    }


def with_begun(home: Home, settings: Settings, origins: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """The settings with the newest checkpoint's model and LoRA layers if the owner names none, and their origins.

    Raises:
        UsageError: the owner names other LoRA layers, or another quantisation, than the checkpoint was trained with.
    """
    facts, of = _begun(home.checkpoints)
    if of is None:
        return settings, dict(origins)
    if origins["model"] == "default":
        settings = settings.model_copy(update={"model": of[0]})
        origins = {**origins, "model": "home"}
    if of[1] != "lora" or settings.lora is False or not same_model(of[0], settings.model):
        return settings, dict(origins)  # what differs is refused later
    fixed: dict[str, Any] = {**facts.get("layers", {}), "quantisation": facts.get("quantisation", "none")}
    if "lora_targets" in fixed:
        fixed["lora_targets"] = tuple(fixed["lora_targets"])
    for name, theirs in fixed.items():
        ours = getattr(settings, name)
        if ours not in (None, theirs) and by_a_person(origins[name]):
            raise UsageError(
                f"The LoRA layers under {home.checkpoints} were trained with {name}={_as_text(theirs)}, "
                f"not {_as_text(ours)}.",
                f"Leave out {name}, which the home knows, or use a fresh --home.",
            )
    taken = {name: value for name, value in fixed.items() if name != "quantisation"}
    return settings.model_copy(update=taken), {**origins, **dict.fromkeys(taken, "home")}


def _as_text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)


def recalled(home: Home, settings: Settings, origins: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """The settings with the home's values where the owner names none, and the origin of each setting.

    Imports PyTorch if the home has learned sizes, because they are valid only for the same amount of memory.
    """
    settings, origins = with_begun(home, settings, origins)
    port = home.last_port()
    if port and not settings.port and origins["port"] == "default":
        settings = settings.model_copy(update={"port": port})
        origins = {**origins, "port": "home"}
    learned = LearnedSizes(home.plan, settings.model).sizes
    kept = settled(home.checkpoints, settings.model)
    found = {key: value for key, value in kept.items() if getattr(settings, key) is None}
    if learned:
        from ftis_node.worker import planning

        budget = planning.smallest_budget(settings)
        found |= planning.recalled(settings, learned, budget)
    return settings.model_copy(update=found), {**origins, **dict.fromkeys(found, "home")}


_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]


class _KeptSizes(msgspec.Struct, forbid_unknown_fields=True):
    """The file of `LearnedSizes`."""

    model: str
    budget: _Size | None = None
    micro_batch_tokens: _Size | None = None
    generation_batch: _Size | None = None


class LearnedSizes:
    """Batch sizes that fitted into memory, with the memory budget at that time; kept for the next start."""

    def __init__(self, path: Path, model: str) -> None:
        self._path = path
        self._model = model
        found = kept(path, msgspec.json.Decoder(_KeptSizes).decode, "it is made anew.")
        self.sizes: dict[str, int] = {}
        if found is not None and same_model(found.model, model):
            self.sizes = {name: size for name, size in asdict(found).items() if size and name != "model"}

    def learn(self, budget: int, **sizes: int) -> None:
        """Keep the largest sizes that fit into `budget` bytes, and forget others."""
        learned = {}
        if sizes:
            learned = {"budget": budget, **sizes}
        if learned != self.sizes:
            self.sizes = learned
            replace_text(self._path, json.dumps({"model": lasting(self._model), **learned}))


class ReputationFile:
    """The reputation of other peers on disk: bans and records must outlive the process."""

    def __init__(self, path: Path, reputation: Reputation) -> None:
        """Load the file; a damaged one is ignored, which makes every peer a newcomer."""
        self._path = path
        self._reputation = reputation
        self._written = time.monotonic()
        kept(path, lambda data: reputation.take_up(json.loads(data)), "everybody is a newcomer again.")

    def after_step(self) -> None:
        """Write the file, at most once a minute."""
        if time.monotonic() - self._written >= BOOKS_SECONDS:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        replace_text(self._path, json.dumps(self._reputation.facts()))
