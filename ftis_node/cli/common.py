"""Options that several commands share."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node.config.profiles import TASK_KINDS
from ftis_node.errors import UsageError
from ftis_node.host.doing import doing
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.text import further_lines, in_json, say

if TYPE_CHECKING:
    from ftis_node.config.settings import Settings
    from ftis_node.preflight.case import Finding
    from ftis_node.worker.restore import Checkpoint

KINDS = f"{TASK_KINDS}."  # what --task takes
HomeOption = Annotated[Path, typer.Option("--home", envvar="FTIS_HOME", help="The node's directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
QuestionOption = Annotated[str | None, typer.Option("--question", help="Of an hf: task, the column of questions.")]
AnswerOption = Annotated[str | None, typer.Option("--answer", help="Of an hf: task, the column of gold answers.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set KEY=VALUE, repeatable.")]
DataOption = Annotated[Path | None, typer.Option("--data", help="A local training file of the task.")]
EvalDataOption = Annotated[Path | None, typer.Option("--eval-data", help="A local file of held-out examples.")]
TokensOption = Annotated[
    int | None, typer.Option(min=1, help="Longest; default: the task's, in a chat by `boxed` 512.")
]
CheckpointOption = Annotated[
    str, typer.Option(help="A checkpoint, a node's home (its newest one), or a model: short name, hub id, folder.")
]
BaseOption = Annotated[str | None, typer.Option("--model", help="Where the model of a checkpoint is now.")]
RewardOption = Annotated[
    str | None,
    typer.Option("--reward", help="The rule: integer (default), exact, regex, math, tests; integer-boxed, …"),
]
TemplateOption = Annotated[
    str | None, typer.Option("--template", help="Around a question: a name (paper, boxed, …), or a text.")
]


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on stdout."""
    print(in_json(value))


def print_answer(value: Mapping[str, object], *lines: object, json: bool) -> None:
    """An answer: one JSON object for programs, or lines for people."""
    if json:
        print_json(value)
    else:
        say(*lines)


def print_facts(facts: Mapping[str, str | Sequence[str]]) -> None:
    """Print each name with its value, and further values below it."""
    for name, values in facts.items():
        if isinstance(values, str):
            values = [values]
        for value in values:
            say(f"{name:10} {value}")
            name = ""


def parse_pairs(pairs: Sequence[str] | None) -> dict[str, str]:
    """``--set key=value`` options as text; the settings know their types.

    Raises:
        UsageError: there is no ``=``.
    """
    values = {}
    for pair in pairs or ():
        key, separator, text = pair.partition("=")
        if not separator:
            raise UsageError(f"The setting {pair} has no value.", f"Write {pair}=VALUE.")
        values[key] = text
    return values


def note(text: str) -> None:
    """Print a note on stderr."""
    say(f"note: {text}", error=True)


def tell_choice(found: Checkpoint | None, settings: Settings, origins: Mapping[str, str]) -> None:
    """Print notes on damaged checkpoints and on a LoRA alpha that the checkpoint lacks."""
    if found is not None:
        for path in found.skipped:
            note(f"{path} is damaged; an older checkpoint is used.")
    if settings.lora and origins["lora_alpha"] not in ("checkpoint", "flags"):
        alpha = f"{settings.lora_alpha} is taken ({origins['lora_alpha']}); for another: --set lora_alpha=…"
        note(f"The checkpoint does not say LoRA's alpha: {alpha}")


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr what the block does; on a terminal also for how long, once that takes long."""
    from ftis_node.observe.terminal import shown_work

    say(f"{what}.", error=True, flush=True)
    with shown_work(), doing(what):
        yield


_UNITS = {"m": 60, "h": 3600, "d": 86400}


def seconds_in(text: str) -> int:
    """The seconds in a time such as 30m, 12h or 7d. Raises UsageError if it is none, or 2^31 seconds or more."""
    found = re.fullmatch("([0-9]{1,9})([mhd])", text)
    if found is not None:
        seconds = int(found[1]) * _UNITS[found[2]]
        if 0 < seconds < 1 << 31:
            return seconds
    raise UsageError(f"{text!r} is no time.", "Write minutes, hours or days: 30m, 12h, 7d.")


def addresses_in(text: str) -> tuple[str, ...]:
    """The parts between commas, without spaces; empty ones are left out."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def nobody_to_ask() -> bool:
    """Whether no person is at the other end."""
    return not sys.stdin.isatty()


def say_finding(finding: Finding, *, error: bool = False) -> None:
    """Print a finding of the doctor with its advice; error: on stderr."""
    first, *rest = further_lines(finding.text)
    say(f"{finding.verdict:5}{finding.subject}: {first}", *rest, error=error, flush=True)
    if finding.advice:
        say(f"     → {finding.advice}", error=error, flush=True)


def held_checkpoint(stack: ExitStack, name: str) -> Checkpoint | None:
    """The checkpoint that a name means, readable within the stack although a running node removes it; None: a model.

    Its weights are compared with their checksum, which takes seconds for a large one: look once.

    Raises:
        UserError: as `find_checkpoint` and `hold`.
    """
    from ftis_node.observe.terminal import shown_work
    from ftis_node.store.checkpoints import under

    path = Path(name).expanduser()
    if path == DEFAULT_HOME.expanduser():
        Home(path).refuse_missing()
    if path.is_dir():
        under(path)  # so that a home without one is refused before torch is imported
    with shown_work(), doing("reading the checkpoint"):
        from ftis_node.worker.restore import find_checkpoint, hold

        found = find_checkpoint(name)
    if found is None:
        return None
    return stack.enter_context(hold(found))
