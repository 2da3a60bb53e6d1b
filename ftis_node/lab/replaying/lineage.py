"""From a daemon's event log to the steps that led to its present weights; what was lost on the way is left out."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ftis_node.config.settings import Settings, recorded
from ftis_node.errors import UserError, raise_all
from ftis_node.methods.removed import refusals

EVENTS = ("started", "changed", "resumed", "restored", "step")


class _Line(BaseModel):
    """A line of `metrics.jsonl`; what else it has is ignored. The daemon writes the names, see `step_report`."""

    model_config = ConfigDict(frozen=True)


class Start(_Line):
    """The start of a compute process. `fresh`: with the model's own weights, not a checkpoint's.

    `branch`: of the checkpoints that it writes, see `store.checkpoints`; 0 where the log does not say.
    """

    step: int = Field(ge=0)
    fresh: bool
    branch: int = 0
    directory: str
    task: str
    data: str | None
    eval_data: str | None
    run: str
    kind: str
    settings: Settings
    device: str
    threads: int = Field(ge=1)
    versions: dict[str, str]

    @field_validator("settings", mode="before")
    @classmethod
    def _known(cls, settings: Any) -> Any:
        """Settings of earlier versions as this one has them. Raises UserError for an objective that was removed."""
        if not isinstance(settings, dict):
            return settings
        raise_all(refusals(settings, "recorded in metrics.jsonl"))
        return recorded(settings)


class Resumed(_Line):
    """The weights of a checkpoint came back, and so did its count of steps. `branch`: that it was written in."""

    step: int = Field(ge=0)
    branch: int | None = None


class Changed(_Line):
    """Constants of the objective changed; the next step has the new ones."""

    step: int = Field(ge=0)
    settings: dict[str, float | str | None]


class Restored(_Line):
    """The weights of an older step came back; the count of steps went on."""

    step: int = Field(ge=0)
    weights_of_step: int = Field(ge=0)


class Batch(_Line):
    """Digests (hex) of a step's packets, in the order in which they were trained on.

    replaced: own groups that earlier versions left out of a step, and counted in its mean own reward.
    """

    own: tuple[str, ...]
    foreign: tuple[str, ...]
    replaced: tuple[str, ...] = ()

    @property
    def digests(self) -> list[bytes]:
        """Raises ValueError for what is no hex."""
        return [bytes.fromhex(digest) for digest in (*self.own, *self.foreign, *self.replaced)]


class LoggedStep(_Line):
    """A step's line, as far as a replay needs it."""

    event: Literal["step"]
    step: int = Field(ge=1)
    batch: Batch
    micro_batch_tokens: int = Field(ge=1)
    weights: dict[str, float] = {}  # of authors (by peer id), where any is not 1
    loss: float
    gradient_norm: float
    own_reward: float | None
    foreign_reward: float | None
    skipped: str | None
    own_data_groups: int = 0
    threads: int | None = Field(None, ge=1)  # None: an earlier version's, which kept those of its start


_NEEDED = LoggedStep.model_fields.keys()  # of a line; most of the rest are diagnostics, which would fill the memory


@dataclass(frozen=True)
class Link:
    """What made the weights at `step` out of those at `after`, both counts of steps.

    logged: the step that was taken. None: none was; only the count, the process or its settings changed.
    start: the process and settings of from then on.
    """

    step: int
    after: int
    start: Start
    logged: LoggedStep | None = None


@dataclass(frozen=True)
class Lineage:
    """links: the first is a fresh start, and each begins where the one before ends. void: how many steps were logged
    whose weights were lost."""

    links: Sequence[Link]
    void: int


def lineage(events: Iterable[Mapping[str, Any]]) -> Lineage:
    """The chain from a fresh start to the latest weights.

    Args:
        events: those of the kinds `EVENTS`, in their order.

    Raises:
        UserError: the log is of a version that did not write down what a replay needs, or lacks a step.
    """
    history = _History()
    for event in events:
        history.follow(event)
    chain = history.chain()
    begun_anew = bool(chain) and chain[0].start.fresh
    if not begun_anew or any(entry.line and "batch" not in entry.line for entry in chain):
        what = "This home was written by a version that kept no step log."
        raise UserError(what, "Homes that were begun with this version, or a later one, can be replayed.")
    for before, entry in itertools.pairwise(chain):
        if entry.after != before.step:
            what = f"The log has no line for step {before.step + 1}."
            fix = "Without it nothing after that step can be replayed; restore metrics.jsonl as the daemon wrote it."
            raise UserError(what, fix)
    links = []
    void = history.logged
    for entry in chain:
        logged = None
        if entry.line:
            logged = _read(LoggedStep, entry.line)
            void -= 1
        links.append(Link(entry.step, entry.after, entry.start, logged))
    return Lineage(links, void)


class _Entry(NamedTuple):
    """As `Link`, with a line that was not read yet. before: the place of the one that it followed from, -1 for none."""

    step: int
    after: int
    start: Start
    line: Mapping[str, Any] | None
    before: int


_Model = TypeVar("_Model", bound=_Line)


class _History:
    """All that a log tells of, as a tree: weights that were given up may come back with a checkpoint of theirs."""

    def __init__(self) -> None:
        self.logged = 0  # steps
        self._start: Start | None = None
        self._entries: list[_Entry] = []
        self._latest: dict[tuple[int, int], int] = {}  # by branch and step, which is how a checkpoint names its own
        self._head = -1

    def follow(self, event: Mapping[str, Any]) -> None:
        """The next line of the log. Raises UserError if it cannot be used."""
        kind = event["event"]
        self.logged += kind == "step"
        if kind == "started":
            start = _read(Start, event)
            self._start = start
            self._go_back(-1 if start.fresh else start.step)  # fresh: nothing of before leads to its weights
            self._add(start, start.step, start.step)
        elif self._start is None:
            return  # nothing can follow from what the log does not tell
        elif kind == "step":
            count = _count(event)
            line = {name: event[name] for name in _NEEDED & event.keys()}
            self._add(self._start, count, count - 1, line)
        elif kind == "changed":
            change = _read(Changed, event)
            settings = self._start.settings.model_copy(update=change.settings)
            self._start = self._start.model_copy(update={"settings": settings})
            self._add(self._start, change.step, change.step)
        elif kind == "resumed":
            resumed = _read(Resumed, event)
            if resumed.branch is not None:
                written = (resumed.branch, resumed.step)
                self._head = self._latest.get(written, self._head)  # it may have been given up before
            self._go_back(resumed.step)
            self._add(self._start, resumed.step, resumed.step)
        else:
            restored = _read(Restored, event)
            self._go_back(restored.weights_of_step)
            self._add(self._start, restored.step, restored.weights_of_step)

    def chain(self) -> list[_Entry]:
        """The way from the first to the present weights; empty for a log without a start."""
        found = []
        place = self._head
        while place >= 0:
            entry = self._entries[place]
            found.append(entry)
            place = entry.before
        return found[::-1]

    def _add(self, start: Start, step: int, after: int, line: Mapping[str, Any] | None = None) -> None:
        """Adds something that followed from the present weights, and makes what came of it the present ones."""
        self._entries.append(_Entry(step, after, start, line, self._head))
        self._head = len(self._entries) - 1
        self._latest[start.branch, step] = self._head

    def _go_back(self, step: int) -> None:
        """The present weights are the latest of count `step` or less on the way here; −1: there are none."""
        while self._head >= 0 and self._entries[self._head].step > step:
            self._head = self._entries[self._head].before


def _count(event: Mapping[str, Any]) -> int:
    """The number in a step's line; the rest is read only if it is needed. Raises UserError without a number."""
    count = event.get("step")
    if not isinstance(count, int):
        raise _damaged(event, f"its step is {count!r}")
    return count


def _read(model: type[_Model], event: Mapping[str, Any]) -> _Model:
    """A line of the log. Raises UserError if it is damaged."""
    try:
        line = model.model_validate(event)
        if isinstance(line, LoggedStep):
            _ = line.batch.digests
    except (ValidationError, ValueError) as error:
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{first['loc']}: {first['msg']}"
        raise _damaged(event, why) from error
    return line


def _damaged(event: Mapping[str, Any], why: str) -> UserError:
    """The error to raise for a line of the log."""
    what = f"The log's line {event['event']!r} of step {event.get('step')} cannot be used ({why})."
    return UserError(what, "Restore metrics.jsonl as the daemon wrote it.")
