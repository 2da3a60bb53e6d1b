"""Messages between the two processes: msgpack over a socket pair, both ends ours.

A call is ``{"id", "op", "args"}``, its reply ``{"id", "result"}`` or ``{"id", "fault": {"kind", "what", "fix"}}``.
`args` is a `Request`, `result` the answer type that its class names. Completions travel as the bytes of their packet
(`ftis_node.packet`) in both directions.
"""

from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec
from pydantic import BaseModel

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.evaluate.evaluation import Evaluation
from ftis_node.fit.plan import Plan
from ftis_node.step_report import StepReport, Watched
from ftis_node.tasks import TextCaps

# A step's groups travel in one message: 4096 groups of 36 KB fit.
MAX_MESSAGE = 1 << 28
OWN_DATA = "own data"  # the name of the evaluation on rows of the owner's own

Answer = TypeVar("Answer")


def plan_row(plan: Plan) -> dict[str, Any]:
    """A plan in the form of `status --json`, `metrics.jsonl` and `join --dry-run --json`."""
    return asdict(plan) | {"engine": "native", "memory_bytes": plan.memory.total}


# --- answers --------------------------------------------------------------------------------------------------------


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a loaded model and task.

    tokenizer         its fingerprint, as a run names it; vocabulary: ids; eos: ids
    prefix            ids that the tokenizer puts in front of a text; ends: the model's own; names: tokens of both
    unwritable        characters of the prompts and of the tags that the tokenizer has no token for
    text              the task's caps of a text run; text_refusal: why the tokenizer can take no part in one, if so
    parameters        of the whole model; checkpoint_bytes: of one checkpoint
    kind              `lora` or `full`
    device            torch's name; threads: torch's number
    settings          completed by the plan
    task … completion_tokens, turns  as in a run; rows, held_out: numbers of examples
    own_rows          number of the owner's own to train on
    """

    tokenizer: str
    vocabulary: int
    eos: list[int]
    chat: str
    prefix: list[int]
    ends: list[int]
    names: dict[int, str]
    unwritable: str
    text: TextCaps
    text_refusal: str
    parameters: int
    checkpoint_bytes: int
    kind: str
    device: str
    threads: int
    settings: Settings
    task: str
    data: str
    template: str
    reward: str
    prompt_tokens: int
    completion_tokens: int
    turns: int
    rows: int
    held_out: int
    own_rows: int
    plan: Plan

    def shared(self) -> dict[str, object]:
        """All of them by name; a run must agree with some, see `config.run.run_for`."""
        return msgspec.structs.asdict(self)


class OpenedRun(msgspec.Struct, frozen=True):
    """An opened run. prompt_digests: 8 bytes per row. own_only: the objective trains on own samples only."""

    prompt_digests: bytes
    own_only: bool


class ScoredPacket(msgspec.Struct, frozen=True):
    """A group as the bytes of its packet, with its rewards [G]."""

    packet: bytes
    rewards: list[float]


class Generated(msgspec.Struct, frozen=True):
    """One group per row, the seconds they took, and the sequences that a device generated side by side."""

    groups: list[ScoredPacket]
    seconds: float
    generation_batch: int


class GroupText(msgspec.Struct, frozen=True):
    """A group as readable text; very long texts are cut. columns: of each completion's verdict, if it had any."""

    question: str
    answer: str
    completions: list[str]
    columns: list[dict[str, str | float]] = []


# --- requests -------------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, Generic[Answer], frozen=True, forbid_unknown_fields=True):
    """A request for `Answer`. `op` names a method of `worker.engine.Engine`; the fields are its arguments."""

    op: ClassVar[str]

    @classmethod
    def answer(cls) -> Any:
        """The type of the answer."""
        (base,) = cls.__orig_bases__  # type: ignore[attr-defined]
        return get_args(base)[0]

    def answered_by(self, engine: Any) -> Any:
        """Call the engine's method."""
        return getattr(engine, self.op)(**msgspec.structs.asdict(self))


class Load(Request[ModelFacts], frozen=True, kw_only=True):
    """Load a task and a model.

    caps                    prompt_tokens, completion_tokens and group of the run, if it is known already
    remembered              see `planning.settle` and `planning.starting_sizes`
    reward, template, code  see `tasks.load_task`
    must_fit                at a node's start: refuse a model that cannot be trained in the available memory, and a task
                            that rewards answers without skill
    own_data                a JSONL file of rows that only this node trains on; own_reward: their rule
    """

    op = "load"
    settings: Settings
    task: str
    data: str | None = None
    eval_data: str | None = None
    caps: dict[str, int] | None = None
    remembered: dict[str, bool | int | str] | None = None
    reward: str | None = None
    template: str | None = None
    code: bool = False
    must_fit: bool = False
    own_data: str | None = None
    own_reward: str = "integer"


class Open(Request[OpenedRun], frozen=True):
    """Open a run."""

    op = "open"
    run: Run


class InitProcessGroup(Request[None], frozen=True):
    """Be one of so many ranks that train together; see `learner.team`.

    place: of their file; sharded: each keeps a part of the weights, see `learner.fsdp`
    """

    op = "init_process_group"
    rank: int
    size: int
    place: str
    sharded: bool = False


class Gather(Request[None], frozen=True):
    """Give the first rank this one's parts of a checkpoint."""

    op = "gather"


class Generate(Request[Generated], frozen=True):
    """Sample a group for each row, as packets of one round of `author` (38 bytes).

    slots  empty: from 0
    seeds  of each row's random numbers; empty: new ones
    own    the rows are the owner's own data
    """

    op = "generate"
    rows: Sequence[int]
    author: bytes = b""
    round: int = 0
    policy_step: int = 0
    slots: Sequence[int] = ()
    seeds: Sequence[int] = ()
    own: bool = False


class ScoreGroup(Request[list[float]], frozen=True):
    """Score a foreign group; the answer is its rewards [G], none if this node can train on none of its completions."""

    op = "score"
    row: int
    packet: bytes


class ReadableGroup(msgspec.Struct, frozen=True):
    """A group to decode: its row, its packet, and the number of completions to decode."""

    row: int
    packet: bytes
    completions: int


class Texts(Request[list[GroupText]], frozen=True):
    """Decode groups into readable text."""

    op = "texts"
    groups: Sequence[ReadableGroup]


class GroupPart(msgspec.Struct, frozen=True):
    """Completions of one source with their rewards [n] and the weight of each in the loss."""

    source: str
    packet: bytes
    rewards: Sequence[float]
    weight: float = 1.0


class StepGroup(msgspec.Struct, frozen=True):
    """All completions of one row to train on: one part, or in a horizontal run one part per author.

    own: the row is of the owner's own data.
    """

    row: int
    parts: list[GroupPart]
    own: bool = False


class Step(Request[StepReport], frozen=True):
    """Take an optimiser step. micro_batch_tokens: replaces the settings' value from now on. own_data: so many groups
    besides, on rows of the owner's that the compute process alone has."""

    op = "step"
    groups: Sequence[StepGroup]
    micro_batch_tokens: int | None = None
    own_data: int = 0


class Change(Request[None], frozen=True):
    """Take over the constants of the objective from these settings, from the next step on."""

    op = "change"
    settings: Settings


class Evaluate(Request[Evaluation], frozen=True):
    """Evaluate on held-out prompts, or on the task that `AddEvaluation` added under the name `also`.

    part, parts: only so much of them, every `parts`-th from `part` on.
    """

    op = "evaluate"
    also: str | None = None
    part: int = 0
    parts: int = 1


class AddEvaluation(Request[int], frozen=True):
    """Load another task for evaluation only; the answer is its number of prompts."""

    op = "add_evaluation"
    name: str
    task: str
    data: str | None
    prompts: int | None


class Interrupt(Request[None], frozen=True):
    """Interrupt the running generation or step."""

    op = "interrupt"


class Forget(Request[None], frozen=True):
    """Take back an interrupt: what it was for has ended."""

    op = "forget"


class Watch(Request[Watched], frozen=True):
    """Look at the process: its GPU, and what it is doing."""

    op = "watch"


class Save(Request[None], frozen=True):
    """Write a checkpoint's files into an existing directory, while training waits."""

    op = "save"
    directory: str


class Snapshot(Request[None], frozen=True):
    """Copy a checkpoint into main memory."""

    op = "snapshot"
    directory: str


class Write(Request[None], frozen=True):
    """Write the latest snapshot into an existing directory."""

    op = "write"
    directory: str


class Restore(Request[None], frozen=True):
    """Restore the files of `Save` or `Write`, and set the count of steps to `steps`."""

    op = "restore"
    directory: str
    steps: int


REQUESTS: dict[str, type[Request[Any]]] = {request.op: request for request in Request.__subclasses__()}


# --- bytes ----------------------------------------------------------------------------------------------------------


class Call(msgspec.Struct, frozen=True):
    """A request as sent; the thread that answers it decodes `args`."""

    id: int
    op: str
    args: msgspec.Raw


class Fault(msgspec.Struct, frozen=True):
    """An exception: its class, its text, and advice if a person can fix it."""

    kind: str
    what: str
    fix: str = ""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a call, or the fault."""

    id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    fault: Fault | None = None


Message = TypeVar("Message")


def pack(message: Any) -> bytes:
    """The bytes of a message. Raises ValueError if they are too many."""
    body = bytes(encoded(message))
    size = len(body)
    if size > MAX_MESSAGE:
        raise ValueError(f"A message of {size} bytes is over the limit of {MAX_MESSAGE}.")
    return body


def encoded(value: Any) -> msgspec.Raw:
    """The msgpack of structs, dataclasses and pydantic models. Raises TypeError for any other type."""
    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=_plain))


def decoded(body: bytes | msgspec.Raw, kind: type[Message]) -> Message:
    """Decode a value of this type. Raises msgspec.ValidationError for another type."""
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_model)


def receive(connection: Connection, kind: type[Message]) -> Message | None:
    """Read one message, blocking; None at the end of the stream, also within a message."""
    try:
        body = connection.recv_bytes()
    except (EOFError, OSError):
        return None
    return decoded(body, kind)


def _plain(value: Any) -> Any:
    """Settings and the like as plain values. Raises NotImplementedError for any other type."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _model(kind: type, value: Any) -> Any:
    return kind(**value)
