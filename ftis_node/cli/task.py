"""``ftis-node task``: a task's rows, before a run is made of them, and what a model can learn from them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ftis_node.cli.common import (
    KINDS,
    JsonOption,
    RewardOption,
    SetOption,
    TemplateOption,
    TokensOption,
    held_checkpoint,
    parse_pairs,
    print_json,
)
from ftis_node.errors import UsageError
from ftis_node.export.record import run_of
from ftis_node.host.doing import doing
from ftis_node.host.files import replace_text
from ftis_node.observe.metrics import MetricsLog, read_events
from ftis_node.observe.terminal import shown_work
from ftis_node.packet import MAX_GROUP
from ftis_node.preflight.task_rows import checked
from ftis_node.tasks import Example, Task, source_of
from ftis_node.tasks.task import spread, told_if_few
from ftis_node.tasks.templates import PLAIN, as_trained, known_as, shown, usual
from ftis_node.text import counted, duration, in_lines, say

if TYPE_CHECKING:
    from ftis_node.evaluate.learnable import Learnable, Subject, TriedRow
    from ftis_node.worker.restore import Checkpoint

app = typer.Typer(no_args_is_help=True)

TaskArgument = Annotated[str, typer.Argument(help=KINDS)]
SamplesOption = Annotated[int, typer.Option(min=2, max=MAX_GROUP, help="Completions a row.")]


@app.command("check")
def check(
    task: TaskArgument,
    reward: RewardOption = None,
    template: TemplateOption = None,
    model: Annotated[str | None, typer.Option(help="Also sample: what could this model, or home, learn here?")] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --model: how many rows are sampled.")] = 8,
    samples: SamplesOption = 8,
    seconds: Annotated[float, typer.Option(min=1, help="With --model: no other rows are begun after these.")] = 120.0,
    completion_tokens: TokensOption = None,
    set_: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Try every row: whether the rule takes its gold answer for right, and its prompt fits; the exit code is 1 if not.

    A dataset of a hub is downloaded, and a Python task is imported. Nothing is trained.
    """
    source = source_of(task, reward=reward, template=template, code=True)
    loaded = source.load()
    learnable = None
    with ExitStack() as stack:
        checkpoint = None
        flags = {}
        if model is not None:
            checkpoint = held_checkpoint(stack, model)
            flags["model"] = checkpoint.model if checkpoint else model
        loaded = as_trained(loaded, run_of(checkpoint), reward, template)
        with shown_work(), doing("checking", len(loaded.train) + len(loaded.held_out), "rows"):
            found = checked(source, loaded, flags)
        if model is not None:
            chosen = spread(len(loaded.train), rows)
            with opened(loaded, chosen, model, checkpoint, set_, completion_tokens) as subject:
                learnable = _learnable(subject, chosen, samples, seconds)
                asked = f"{model}, asked by {shown(subject.task.template)}, judged by {subject.task.reward}"
                asked += f", at most {subject.sampling.max_new_tokens} tokens"
    if learnable is not None:
        found["learnable"] = msgspec.to_builtins(learnable) | {"advice": learnable.advice()}
    if json:
        print_json(found)
    else:
        there = f"{counted(found['rows'], 'row')} to train on, {found['held_out']} held out"
        say(f"{found['task']}: {there}, judged by {found['reward']}")
        say(f"  gold answers  {found['accepted']} right, {found['refused']} wrong, {found['undecided']} not checked")
        doubles = counted(found["duplicates"], "row")
        say(f"  questions     {doubles} asked before, {found['contradictions']} with two answers")
        say(f"  empty rows    {found['empty']}")
        fits = "not checked"
        if found["longest"] is not None:
            fits = f"{found['longest']} tokens of {found['model']} at most"
        say(f"  prompts       {fits}, and {found['prompt_tokens']} are allowed")
        few = told_if_few(found["held_out"])
        if few:
            say(f"warning: {few}")
        for what in found["unchecked"]:
            say(f"not checked: {what}")
        for what in found["notes"]:
            say(f"note: the package's own rows: {what}")
        for one in found["troubles"]:
            say(*in_lines(one["what"]), f"       {one['fix']}")
        if learnable is not None:
            _say_learnable(asked, len(chosen), learnable)
    if found["troubles"]:
        raise typer.Exit(1)


@app.command("filter")
def filter_rows(
    task: TaskArgument,
    model: Annotated[str, typer.Option(help="The model, or home, whose pass rate decides.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .jsonl file for the rows that are kept.")],
    reward: RewardOption = None,
    template: TemplateOption = None,
    low: Annotated[float, typer.Option(min=0.0, max=1.0, help="Keep rows with this pass rate or more,")] = 0.1,
    high: Annotated[float, typer.Option(min=0.0, max=1.0, help="and with this one or less.")] = 0.9,
    samples: SamplesOption = 8,
    rows: Annotated[int | None, typer.Option(min=1, help="Try only so many rows, evenly spread.")] = None,
    completion_tokens: TokensOption = None,
    set_: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Keep the rows that a model solves at times, which it can learn from. Ctrl-C keeps those found until then.

    The same command goes on where it was.
    OUTPUT.heldout.jsonl gets the task's held-out rows, unfiltered. OUTPUT.tried keeps what was sampled, so that other
    bounds need no new samples. These samples say nothing about rows that were kept: measure on the held-out ones.
    """
    if output.suffix != ".jsonl":
        raise UsageError(f"{output} is no name for a task's file.", "Let it end in .jsonl.")
    if low > high:
        raise UsageError(f"No pass rate is from {low} to {high}.", "Name a --low below --high.")
    loaded = source_of(task, reward=reward, template=template, code=True).load()
    with ExitStack() as stack:
        checkpoint = held_checkpoint(stack, model)
        loaded = as_trained(loaded, run_of(checkpoint), reward, template)
        field = _field(loaded, template)
        chosen = spread(len(loaded.train), rows)
        notes = output.with_name(f"{output.name}.tried")
        of = {
            "task": loaded.name,
            "data": loaded.data,
            "reward": loaded.reward,
            "model": model,
            "samples": samples,
            "completion_tokens": completion_tokens,
            "template": loaded.template,
        }
        done = _tried_before(notes, of)
        if output.exists() and not done:
            raise UsageError(f"{output} exists already, and this command did not make it.", "Name another --output.")
        left = [row for row in chosen if row not in done]
        with suppress(KeyboardInterrupt):  # the rows until then are of use
            if left:
                subject = stack.enter_context(opened(loaded, left, model, checkpoint, set_, completion_tokens))
                log = stack.enter_context(closing(MetricsLog(notes)))
                if not done:
                    log.write("filtering", of=of)
                work = stack.enter_context(doing("filtering", samples * len(left), "completions"))
                for one in subject.tried(left, samples):
                    log.write("row", **msgspec.to_builtins(one))
                    done[one.row] = one
                    there = sum(low <= each.pass_rate <= high for each in done.values())
                    work.what = f"{there} of {counted(len(done), 'row')} kept so far"
    tried = [done[row] for row in chosen if row in done]
    if not tried:
        raise KeyboardInterrupt
    kept = [loaded.train[one.row] for one in tried if low <= one.pass_rate <= high]
    below = sum(one.pass_rate < low for one in tried)
    if not kept:
        raise UsageError(
            f"Of {counted(len(tried), 'row')} none has a pass rate from {low} to {high}; {below} are below.",
            "Take other bounds, easier rows, or another model; `ftis-node task check --model` says why.",
        )
    held_out = output.with_name(f"{output.stem}.heldout.jsonl")
    replace_text(output, _lines(kept, field))
    replace_text(held_out, _lines(loaded.held_out, field))
    above = sum(one.pass_rate > high for one in tried)
    if json:
        print_json(
            {
                "file": str(output),
                "held_out": str(held_out),
                "rows": len(kept),
                "tried": len(tried),
                "below": below,
                "above": above,
            }
        )
        return
    say(f"{output}: {len(kept)} of {counted(len(tried), 'row')}; {below} are too hard, {above} too easy")
    if len(tried) < len(chosen):
        say(f"Stopped: {len(chosen) - len(tried)} rows are not tried yet; the same command goes on with them.")
    say(f"{held_out}: {counted(len(loaded.held_out), 'row')} held out, unfiltered")
    how = ""
    if loaded.reward != "integer":
        how = f" --reward {loaded.reward}"
    if field == "question" and loaded.template != usual(loaded.reward):
        how += f" --template {shlex.quote(known_as(loaded.template) or loaded.template)}"
    line = f"--task {output} --eval-data {held_out}{how} --model {model}"
    if completion_tokens is None:
        say(f"ftis-node join {line}")
    else:
        say(f"ftis-node run new {line} --completion-tokens {completion_tokens} -o run.toml")


@contextmanager
def opened(
    task: Task,
    rows: Sequence[int],
    model: str,
    checkpoint: Checkpoint | None,
    pairs: Sequence[str] | None,
    completion_tokens: int | None,
) -> Iterator[Subject]:
    """Load a model by its name, or its checkpoint, and ask it these rows; on a terminal its work is shown.

    Raises:
        UserError: it cannot be loaded, or has no room for a prompt and its answer.
        UsageError: the task has episodes of several answers.
    """
    if task.turns > 1:
        raise UsageError(f"Episodes of {task.name} have several answers.", "Name a task of single answers.")
    from ftis_node.evaluate.greedy import batch_that_fits, tokenised
    from ftis_node.evaluate.learnable import Subject
    from ftis_node.policy.generate.stream import Sampling
    from ftis_node.policy.room import Room
    from ftis_node.worker.formats import asked_in
    from ftis_node.worker.planning import memory_budget
    from ftis_node.worker.restore import load_trained, settings_for

    flags = parse_pairs(pairs)
    run = None
    if "chat" not in flags:
        run = run_of(checkpoint)
    with shown_work():
        settings, _ = settings_for(checkpoint, checkpoint.model if checkpoint else model, flags, task.name)
        policy = load_trained(settings, checkpoint)
        chat, prefix, ends = asked_in(run, policy.tokenizer, task.template, settings)
        if run is None and chat is not None:
            task = task.in_chat()
        cap = completion_tokens or task.completion_tokens
        ids = tokenised(policy, task, [task.train[row] for row in rows], cap, chat, prefix)
        batch = batch_that_fits(policy, max(map(len, ids)), cap, memory_budget(settings, policy.device))
        yield Subject(policy, task, dict(zip(rows, ids, strict=True)), Sampling(cap, 1.0, ends), Room(batch))


def _learnable(subject: Subject, rows: Sequence[int], samples: int, seconds: float) -> Learnable:
    from ftis_node.evaluate.learnable import Learnable

    began = time.monotonic()
    tried = []
    with suppress(KeyboardInterrupt):  # what was measured until then is said
        for one in subject.tried(rows, samples, seconds):
            tried.append(one)
    if not tried:
        raise KeyboardInterrupt
    return Learnable.of(tried, time.monotonic() - began)


def _say_learnable(asked: str, rows: int, found: Learnable) -> None:
    groups = f"{found.groups_with_signal * found.rows:.0f} of {counted(found.rows, 'group')}"
    say(f"  {asked}")
    say(f"  sampled       {found.samples} completions of {found.rows} of {counted(rows, 'row')}, at temperature 1")
    say(f"  formatted     {found.formatted:.0%}; right {found.right:.0%}, in any format {found.lenient:.0%}")
    say(f"  signal        {groups} had rewards that differ: only these teach")
    say(f"  length        {found.tokens:.0f} tokens, {found.cut_off:.0%} cut off")
    say(f"  time          {duration(found.seconds)} here")
    for what in found.advice():
        say(f"advice: {what}")


def _field(task: Task, template: str | None) -> str:
    """The field that a file of these rows asks by. template: which the command line names.

    Raises UsageError where such a file would be another task.
    """
    if task.scorer is None and task.template == PLAIN:
        return "prompt"
    if task.scorer is None and (template is not None or known_as(task.template) is not None):
        return "question"
    raise UsageError(
        f"{task.name} is judged by code of its own, or has its own template, which a file of rows loses.",
        "Filter within that code, or write prompts; this is for tasks with a rule.",
    )


def _lines(rows: Sequence[Example], field: str) -> str:
    """The rows as JSON lines."""
    lines = [msgspec.json.encode({field: row.question, "answer": row.answer}) for row in rows]
    return b"\n".join([*lines, b""]).decode()


def _tried_before(notes: Path, of: Mapping[str, object]) -> dict[int, TriedRow]:
    """The rows that are done, by their number. of: what the file of notes begins with.

    Raises UsageError for those of another task, model or number of samples."""
    from ftis_node.evaluate.learnable import TriedRow

    if not notes.exists() or not notes.stat().st_size:
        return {}
    if [head.get("of") for head in read_events(notes, "filtering")][:1] != [of]:
        raise UsageError(
            f"{notes} is of another task, model, template or number of samples.",
            "Name another --output, or remove that file.",
        )
    done = {}
    for event in read_events(notes, "row"):
        with suppress(msgspec.ValidationError):  # a person's change
            one = msgspec.convert(event, TriedRow)
            done[one.row] = one
    return done
