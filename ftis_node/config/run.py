"""The run: what nodes must share to make sense of one another's tokens, and nothing else.

A run file is TOML on disk, and JSON where a peer sends it. Its ``[run]`` table is the contract and gives the run id.
Its ``[hints]`` table (where to dial, whom to ask) is not part of the id. Run files from peers are bounded in length and
depth. Every message about a run file is plain text.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from ftis_node.config.reading import parse_toml, read_text
from ftis_node.errors import UsageError, raise_all
from ftis_node.installed import to_install
from ftis_node.methods.removed import refusals
from ftis_node.packet import MAX_GROUP, MAX_PACKET_BYTES, PIECE_BYTES_MAX, TURNS_MAX
from ftis_node.text import in_toml

RUN_FILE_CHARACTERS_MAX = 1 << 16


class RunDefaults(TypedDict):
    """Values of a `Run` that nobody chose."""

    group: int
    slots: int
    temperature: float


# Defaults of a run; the group size is the paper's.
RUN_DEFAULTS: RunDefaults = {"group": 12, "slots": 32, "temperature": 1.0}

CODE = "code:"
"""Prefix of a run's `reward` where that is its owners' code; 40 hex digits of its sha256 follow."""

_ANOTHER_TASK = "For another task, begin a run of your own, in a fresh --home."
# A round of more groups is several rounds. Announcements, and what is remembered of who holds what, grow with it.
SLOTS_MAX = 256
EPOCH = 900  # seconds
TOKENS_MAX = 1 << 17  # of a prompt, of a completion
BYTES_MAX = 1 << 20  # of a prompt, of a completion, in a text run
ANY = "any"
"""The `tokenizer` of a text run."""
_ONLY_TOKENS = ("prompt_tokens", "eos", "vocabulary", "prefix")
_ONLY_COMMON = ("common", "epoch")
_ONLY_TEXT = ("prompt_bytes", "completion_bytes", "logprob_min")
# Beyond these, logits over temperature overflow, or no token is likelier than another: the compute process fails.
TEMPERATURE_MIN = 0.01
TEMPERATURE_MAX = 100.0

_ANEW = (
    "Begin a run with this model (`ftis-node run new --model …`), in a fresh --home; or use another model in this one."
)
_FAMILY = "Use another model, or join a run for the tokenizer of this one."

_Task = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/+,@*-]*$", max_length=256)]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/+-]*$", max_length=64)]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Run(BaseModel):
    """The contract of a swarm. Two runs are the same exactly if their ids are.

    task, reward: names. data: sha256 of the task's data, lower-case hex. template: the prompt's text, with
    ``{question}`` once. group: completions a prompt. slots: groups an author may announce a round. completion_tokens:
    cap, in tokens of the completion's author. collaboration: whether a node makes the whole group of a prompt; in a
    horizontal run it makes one of `parts` of equal size, each by another author. common: in a horizontal run all
    slots have the rows of the epoch, in lock step none; epoch: its length in seconds; see `swarm.common_rows`. founder:
    of a private run, the peer id that signs its members' certificates, or their inviters'; see `swarm.certificates`.

    A token run is for one tokenizer (packet 1, or 3 with turns). tokenizer: its fingerprint, lower-case hex. eos: ids
    that end a completion, ascending. vocabulary: how many token ids are valid, 0 … vocabulary − 1. prompt_tokens: cap.
    prefix: ids in front of each prompt, as the tokenizer puts them there (a BOS), where it is plain text.
    chat: of a run whose questions are messages of a chat, the digest of the texts around them; see `tokenizer.chat`.
    turns: most answers in an episode; what its environment says between them counts for completion_tokens, too.

    A text run is for models of any tokenizer (packet 2): `tokenizer` is ``any``. prompt_bytes, completion_bytes: caps
    in UTF-8. logprob_min: the lowest log-prob that an author may claim, nats.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    packet: Literal[1, 2, 3] = 1
    task: _Task
    data: _Sha256
    template: str = Field(max_length=1 << 14)
    reward: _Name
    group: int = Field(ge=2, le=MAX_GROUP)
    slots: int = Field(ge=1, le=SLOTS_MAX)
    prompt_tokens: int = Field(default=0, ge=1, le=TOKENS_MAX)
    completion_tokens: int = Field(ge=1, le=TOKENS_MAX)
    temperature: float = Field(ge=TEMPERATURE_MIN, le=TEMPERATURE_MAX, allow_inf_nan=False)
    eos: tuple[pydantic.StrictInt, ...] = Field(default=(), strict=False, min_length=1, max_length=64)
    prefix: tuple[pydantic.StrictInt, ...] = Field(default=(), strict=False, max_length=8)
    chat: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = ""
    tokenizer: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64}|any)$")]
    vocabulary: int = Field(default=0, ge=2, le=1 << 32)
    turns: int = Field(default=1, ge=1, le=TURNS_MAX)
    prompt_bytes: int = Field(default=0, ge=1, le=BYTES_MAX)
    completion_bytes: int = Field(default=0, ge=1, le=BYTES_MAX)
    logprob_min: float = Field(default=-32.0, ge=-1000.0, le=-1.0, allow_inf_nan=False)
    collaboration: Literal["vertical", "horizontal"] = "vertical"
    parts: int = Field(default=1, ge=1, le=MAX_GROUP)
    common: int = Field(default=0, ge=0, le=SLOTS_MAX)
    epoch: int = Field(default=EPOCH, ge=60, le=3600)
    founder: Annotated[str, StringConstraints(pattern=r"^(12D3KooW[1-9A-HJ-NP-Za-km-z]{44})?$")] = ""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Run:
        if self.template.count("{question}") != 1:
            raise ValueError("template must contain {question} exactly once")
        self._check_kind()
        if list(self.eos) != sorted(set(self.eos)):
            raise ValueError("eos must be in ascending order, each id once")
        for what, ids in (("eos", self.eos), ("id of prefix", self.prefix)):
            if any(not 0 <= index < self.vocabulary for index in ids):
                raise ValueError(f"every {what} must be from 0 to {self.vocabulary - 1}, below vocabulary")
        if (self.parts > 1) != (self.collaboration == "horizontal"):
            raise ValueError("a horizontal run has 2 parts or more, a vertical one has 1")
        if self.group % self.parts:
            raise ValueError(f"group must be a multiple of the {self.parts} parts")
        if self.parts > 1 and self.common not in (0, self.slots):
            raise ValueError("in a horizontal run all slots are common, or in lock step none")
        if self.parts == 1 and self.common:
            raise ValueError("a vertical run has no common rows any more; make another with `ftis-node run new`")
        if self.packet_bytes_max > MAX_PACKET_BYTES:
            raise ValueError(
                f"group × completion_tokens makes packets of up to {self.packet_bytes_max} bytes, "
                f"above the {MAX_PACKET_BYTES} allowed"
            )
        return self

    def _check_kind(self) -> None:
        """Raise ValueError unless the fields are those of a token run, or those of a text run."""
        if self.text != (self.tokenizer == ANY):
            raise ValueError('packet is 2 exactly if tokenizer is "any"')
        needed: tuple[str, ...] = _ONLY_TOKENS
        other: tuple[str, ...] = _ONLY_TEXT
        kind = "of one tokenizer"
        if self.text:
            needed, other = other, needed
            kind = "of any tokenizer"
        for name in needed:
            if name != "prefix" and not getattr(self, name):
                raise ValueError(f"{name} is missing: a run {kind} needs it")
        for name in other:
            if name in self.model_fields_set:
                raise ValueError(f"{name} does not belong in a run {kind}")
        if self.text and self.chat:
            raise ValueError("chat does not belong in a run of any tokenizer, where each model is asked in its own way")
        if self.prefix and self.chat:
            raise ValueError("prefix does not belong in a run that asks in a chat, whose template writes its own")
        if (self.packet == 3) != (self.turns > 1):
            raise ValueError("packet is 3 exactly if a run has 2 turns or more")
        if self.packet != 1 and self.parts > 1:
            raise ValueError("a run of any tokenizer, or of several turns, is vertical")

    @pydantic.model_serializer(mode="wrap")
    def _fields_that_it_has(self, write: pydantic.SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what this run does not have, so that ids of runs from before these fields stand."""
        other = [name for name in ("founder", "chat", "prefix") if not getattr(self, name)]
        other += [name for name in ("parts", "turns") if getattr(self, name) == 1]
        if self.text:
            other += _ONLY_TOKENS
        else:
            other += _ONLY_TEXT
        if not self.common:
            other += _ONLY_COMMON
        return {name: value for name, value in write(self).items() if name not in other}

    def canonical_json(self) -> bytes:
        """UTF-8 JSON of all fields, defaults included: sorted keys, no spaces, no ASCII escapes.

        A vertical run has no field `parts`, one of single answers no `turns`, one without common rows neither `common`
        nor `epoch`, an open one no `founder`, one of plain text no `chat`, one that puts nothing in front no `prefix`,
        and neither kind has the fields that only the other needs. The temperature is written as Python's repr: the
        shortest digits that read back to the same double, with ``.0`` if integral.
        """
        fields = self.model_dump(mode="json")
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()

    @property
    @functools.lru_cache(maxsize=64)  # noqa: B019 - every handshake asks for it; the cache keeps 64 runs
    def id(self) -> bytes:
        """The first 16 bytes of the sha256 of `canonical_json`."""
        return hashlib.sha256(self.canonical_json()).digest()[:16]

    @property
    def text(self) -> bool:
        """Whether nodes exchange text, which models of any tokenizer read."""
        return self.packet == 2

    @property
    def completions(self) -> int:
        """Completions a packet: a group, or in a horizontal run one author's part of it."""
        return self.group // self.parts

    def epoch_at(self, unix: float) -> int:
        """The epoch of common rows at a unix time, in seconds."""
        return int(unix) // self.epoch

    @property
    def caps(self) -> dict[str, int]:
        """The sizes that memory is planned for: prompt_tokens, completion_tokens, group.

        In a text run the prompts' tokens are estimated, at 3 bytes each.
        """
        prompt = self.prompt_tokens
        if self.text:
            prompt = math.ceil(self.prompt_bytes / 3)
        return {"prompt_tokens": prompt, "completion_tokens": self.completion_tokens, "group": self.group}

    @property
    def packet_bytes_max(self) -> int:
        """No packet of this run is larger.

        A token run: 80 bytes, 6 a completion and 8 a token; with turns 20 more, and 8 a turn of each completion. A text
        run: 100 bytes, 10 a completion, whose end has a log-prob, 5 a piece, and the text with a last piece.
        """
        if self.text:
            text = self.completion_bytes + PIECE_BYTES_MAX
            return 100 + self.completions * (10 + 5 * self.completion_tokens + text)
        most = 80 + self.completions * (6 + 8 * self.completion_tokens)
        if self.turns > 1:
            most += 20 + 8 * self.completions * self.turns
        return most


def in_short(run: Run) -> str:
    """Describe to people what is trained on, and how much of it."""
    models = f"for models of {'any' if run.text else 'one'} tokenizer"
    if run.parts > 1:
        models += f"; a group is made of {run.parts} nodes' parts"
    if run.common:
        models += f"; {run.common} rows common to all every {run.epoch} s"
    if run.chat:
        models += "; asked in a chat"
    if run.turns > 1:
        models += f"; episodes of up to {run.turns} answers"
    if run.founder:
        models += f"; private, founded by {run.founder}"
    size = f"{run.group} completions a prompt, of up to {run.completion_tokens} tokens"
    return f"{run.task}, judged by {run.reward}; {size}, at temperature {run.temperature:g}; {models}"


Address = Annotated[str, StringConstraints(max_length=400)]


class Hints(BaseModel):
    """Where to find the swarm. Not part of the run id, so anyone may change it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(default="", max_length=200)
    bootstraps: tuple[Address, ...] = Field(default=(), strict=False, max_length=64)
    contact: str = Field(default="", max_length=400)


class RunFile(BaseModel):
    """A run and hints about where to find it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Run
    hints: Hints = Hints()


def make_run(**fields: Any) -> Run:
    """A run of these fields. Raises UsageError where they do not make one."""
    try:
        return Run(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the combination"
        told = f"These values make no run: {key}: {first['msg']}."
        if key == "task":
            raise UsageError(told, "Rename the file: English letters, digits and ._+-@ only.") from None
        raise UsageError(told, "Change that value.") from None


LoadedFacts = Mapping[str, Any]  # of a loaded model and task, see `worker.messages.ModelFacts`


def make_hints(**fields: Any) -> Hints:
    """Hints of these fields. Raises UsageError where they are too long, or too many."""
    try:
        return Hints(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"The hint {first['loc'][0]!r} is wrong: {first['msg']}.", "Shorten it.") from None


def run_for(facts: LoadedFacts, *, any_tokenizer: bool = False, **fields: Any) -> Run:
    """A run for the task and the tokenizer that a loaded model told of (`Engine.load`), and with these fields.

    Args:
        any_tokenizer: a text run, for models of any tokenizer.

    Raises:
        UsageError: the fields make no run.
    """
    shared = ("task", "data", "template", "reward", "turns")
    known = {key: facts[key] for key in shared}
    if any_tokenizer:
        if facts["turns"] > 1:
            raise UsageError(
                f"Episodes of {facts['task']} have up to {facts['turns']} turns, and such a run is for one tokenizer.",
                "Leave out --any-tokenizer, and name a --model of the family that is to take part.",
            )
        known |= {"packet": 2, "tokenizer": ANY, **asdict(facts["text"])}
    else:
        own = ("prompt_tokens", "completion_tokens", "tokenizer", "vocabulary", "chat")
        known |= {key: facts[key] for key in own} | {"eos": tuple(facts["eos"]), "packet": 1}
        if not facts["chat"]:
            known["prefix"] = tuple(facts["prefix"])
        if facts["turns"] > 1:
            known["packet"] = 3
    return make_run(**{**known, **RUN_DEFAULTS, **fields})


def check_fit(run: Run, facts: LoadedFacts, model: str, *, begun: bool = False) -> None:
    """Refuse a model or data that would misread the run's tokens, before anything is sent.

    Args:
        facts: tokenizer, vocabulary, prefix, ends, names, text_refusal, and what `check_task` takes.
        begun: the home is in the run already, so the model's ends are no longer asked about.

    Raises:
        UsageError: they are not the run's, in whichever way; all of it.
    """
    raise_all([*_tokenizer(run, facts, model, begun=begun), *check_task(run, facts)])


def _tokenizer(run: Run, facts: LoadedFacts, model: str, *, begun: bool) -> Iterator[UsageError]:
    if run.text:
        if facts["text_refusal"]:
            yield UsageError(f"{model} can take no part in a run of any tokenizer: {facts['text_refusal']}.", _FAMILY)
    elif run.tokenizer != facts["tokenizer"] or run.vocabulary != facts["vocabulary"]:
        what = f"The tokenizer of {model} is not the run's: its token ids would mean something else."
        any_ = "a run for any tokenizer (`ftis-node run new --any-tokenizer`)"
        yield UsageError(
            what, f"Use a model of the family that the run was made for (`ftis-node run show`), or {any_}."
        )
    else:
        yield from _asking(run, facts, model, begun=begun)


def _asking(run: Run, facts: LoadedFacts, model: str, *, begun: bool) -> Iterator[UsageError]:
    """A model of the run's tokenizer that would be asked, or would end, in another way than its own."""

    def named(ids: Sequence[int]) -> str:
        return ", ".join(f"{facts['names'].get(index, 'a token')} (id {index})" for index in ids)

    short = f"The run {run.id.hex()}"
    if facts["prefix"] and not run.chat and list(run.prefix) != list(facts["prefix"]):
        what = f"{short} puts {named(run.prefix) or 'nothing'} in front of its questions, and {model} wants "
        yield UsageError(f"{what}{named(facts['prefix'])} there: it would answer them badly.", _ANEW)
    lacking = [index for index in facts["ends"] if index not in run.eos]
    if lacking and not begun:
        ends = f"where {model} ends its own: they would be cut off"
        yield UsageError(f"{short} does not end a completion at {named(lacking)}, {ends}.", _ANEW)


def check_task(run: Run, facts: LoadedFacts) -> Iterator[UsageError]:
    """The parts of a task that are not the run's.

    Args:
        facts: task, data, reward and turns as a run has them; of data, reward and turns None: not known.
    """
    if facts["turns"] is not None and run.turns != facts["turns"]:
        what = f"An episode of {facts['task']} has up to {facts['turns']} turns, and one of the run {run.turns}."
        yield UsageError(what, f"Use the very same task as the others in the run. {_ANOTHER_TASK}")
    if facts["data"] is not None and run.data != facts["data"]:
        of = ""
        if facts["task"] != run.task:
            of = f", which is of {run.task}"
        yield UsageError(
            f"The data of {facts['task']} is not the run's{of}: sha256 {facts['data'][:16]}…, not {run.data[:16]}….",
            "Pass the very same file with --task or --data: its rows in the same order, its line ends as they were "
            f"(an editor, git or Windows may change them). {_ANOTHER_TASK}",
        )
        if facts["task"] != run.task:  # all that differs follows from that
            return
    if facts["reward"] is not None and run.reward != facts["reward"]:
        package, colon, version = run.reward.partition(":")
        told = "reward rule"
        same = "Use the very same files as the others in the run."
        if run.reward.startswith(CODE):
            told = "code that judges answers"
        elif colon:
            same = f"Run: {to_install(f'{package}=={version}')}."
        what = f"The {told} of {facts['task']} is not the run's: {facts['reward']!a}, not {run.reward!a}."
        yield UsageError(what, f"{same} {_ANOTHER_TASK}")


def refuse_horizontal(run: Run) -> None:
    """Raise UsageError for a run of a kind that only the lab can do."""
    if run.parts > 1 and not run.common:
        raise UsageError(
            "The run is horizontal in lock step, where all nodes wait for one another; a daemon does not.",
            "Make another (`ftis-node run new --collaboration horizontal`), or use it in `ftis-node lab run`.",
        )


def load_run_file(path: Path) -> RunFile:
    """Read a run file. Raises UsageError."""
    return parse_run_file(read_text(path, "run file", RUN_FILE_CHARACTERS_MAX + 1))


def parse_run_file(text: str) -> RunFile:
    """Read the TOML text of a run file. Raises UsageError."""
    _refuse_long(text)
    document = parse_toml(text, "run file")
    for table in document.values():
        if isinstance(table, dict):
            raise_all(refusals(table, "the run file"))
    return _checked(lambda: RunFile.model_validate(document))


def run_file_from_json(text: str) -> RunFile:
    """Read a run file as a peer sends it: one JSON object. Raises UsageError."""
    _refuse_long(text)
    return _checked(lambda: RunFile.model_validate_json(text))  # whose parser refuses deep nesting


def run_file_as_json(run_file: RunFile) -> str:
    """One JSON object for a peer, which reads back to the same run and hints."""
    return run_file.model_dump_json()


def dump_run_file(run_file: RunFile) -> str:
    """TOML that reads back to the same run and hints. Texts of several lines are written as such."""
    parts = []
    for table, model in (("run", run_file.run), ("hints", run_file.hints)):
        values = model.model_dump(mode="json")
        lines = [f"{key} = {in_toml(value, lines=True)}" for key, value in values.items()]
        parts.append("\n".join([f"[{table}]", *lines]) + "\n")
    return "\n".join(parts)


def _refuse_long(text: str) -> None:
    if len(text) > RUN_FILE_CHARACTERS_MAX:
        raise UsageError(f"The run file has over {RUN_FILE_CHARACTERS_MAX} characters.", "Ask for the right file.")


def _checked(read: Callable[[], RunFile]) -> RunFile:
    """The run file that `read` makes, unless it is wrong or peers would refuse its length."""
    try:
        run_file = read()
    except ValidationError as error:
        raise _as_usage_error(error) from error
    if max(len(dump_run_file(run_file)), len(run_file_as_json(run_file))) > RUN_FILE_CHARACTERS_MAX:
        raise UsageError("The run file is too long with its characters escaped.", "Shorten its template or its hints.")
    return run_file


def _as_usage_error(error: ValidationError) -> UsageError:
    """One complaint only, an unknown key before all else: the others often follow from it."""
    complaints = error.errors(include_url=False, include_input=False)
    first = next((each for each in complaints if each["type"] == "extra_forbidden"), complaints[0])
    message = first["msg"].removeprefix("Value error, ")
    tables: dict[str, type[BaseModel]] = {"run": Run, "hints": Hints}
    table, *keys = (str(part) for part in first["loc"] or ("",))
    where = "the run file"
    key = table
    if keys:
        key = keys[0]
        if table in tables:
            where = f"[{table}] of the run file"
    match first["type"]:
        case "extra_forbidden":
            known = list(tables[table].model_fields if keys else tables)
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            fix = f"Did you mean `{nearest[0]}`?" if nearest else f"It may hold: {', '.join(known)}."
            return UsageError(f"{where[0].upper()}{where[1:]} has an unknown key {key[:40]!a}.", fix)
        case "missing" if not keys:
            return UsageError("The run file has no [run] table.", "Write one with `ftis-node run new`.")
        case "missing":
            return UsageError(f"`{key}` is missing from {where}.", f"Add `{key} = …`.")
        case "model_type" if table:
            return UsageError(f"In the run file, {table} is not a table.", f"Write [{table}] on a line of its own.")
    name = where
    if keys:
        name = f"`{'.'.join(keys)}` in {where}"
    elif table:
        name = f"[{table}] of {where}"
    return UsageError(f"{name[0].upper()}{name[1:]} is wrong: {message}.", "Correct it, or ask for the right file.")
