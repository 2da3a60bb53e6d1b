"""``ftis-node run``: making and reading run files."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ftis_node.cli.common import (
    KINDS,
    AnswerOption,
    DataOption,
    EvalDataOption,
    HomeOption,
    JsonOption,
    QuestionOption,
    RewardOption,
    TemplateOption,
    TokensOption,
    print_answer,
    waiting,
)
from ftis_node.config.run import EPOCH, SLOTS_MAX, RunFile, dump_run_file, in_short, load_run_file, make_hints, run_for
from ftis_node.errors import UsageError
from ftis_node.packet import MAX_GROUP
from ftis_node.store.home import DEFAULT_HOME, Home

GroupOption = Annotated[int, typer.Option(min=2, max=MAX_GROUP, help="Completions a prompt.")]
app = typer.Typer(no_args_is_help=True)


@app.command("show")
def show(file: Annotated[Path, typer.Argument(help="A run file.")], json: JsonOption = False) -> None:
    """Check a run file and show it with its id."""
    run_file = load_run_file(file)
    facts = {"id": run_file.run.id.hex(), **run_file.model_dump(mode="json")}
    head = f"# run {run_file.run.id.hex()}: {in_short(run_file.run)}"
    print_answer(facts, head, *dump_run_file(run_file).splitlines(), json=json)


@app.command("new")
def new(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the run file.")],
    task: Annotated[str, typer.Option(help=KINDS)] = "arithmetic",
    model: Annotated[str | None, typer.Option(help="Any model whose tokenizer the run shall use.")] = None,
    data: DataOption = None,
    eval_data: EvalDataOption = None,
    question: QuestionOption = None,
    answer: AnswerOption = None,
    reward: RewardOption = None,
    template: TemplateOption = None,
    group: GroupOption = 12,
    completion_tokens: TokensOption = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    name: Annotated[str, typer.Option(help="A name for people; not part of the id.")] = "",
    any_tokenizer: Annotated[bool, typer.Option("--any-tokenizer", help="For models of any tokenizer.")] = False,
    chat: Annotated[Literal["auto", "always", "never"], typer.Option(help="In a chat; auto: if instruct.")] = "auto",
    thinking: Annotated[bool, typer.Option("--thinking", help="Turn thinking on in a template that can.")] = False,
    collaboration: Annotated[
        Literal["vertical", "horizontal"],
        typer.Option(help="Whether each node makes whole groups, or a part of every group."),
    ] = "vertical",
    parts: Annotated[
        int | None, typer.Option(min=2, max=MAX_GROUP, help="Of a group, in a horizontal run; or 3.")
    ] = None,
    epoch: Annotated[int | None, typer.Option(help=f"Seconds of its rows, in a horizontal run; or {EPOCH}.")] = None,
    private: Annotated[bool, typer.Option("--private", help="For members; --home has the founding key.")] = False,
    home: HomeOption = DEFAULT_HOME,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run file that lies there.")] = False,
    bootstrap: Annotated[list[str] | None, typer.Option(help="An address to join at, repeatable; a hint.")] = None,
    json: JsonOption = False,
) -> None:
    """Write a run file for a task and a tokenizer, or for models of any tokenizer."""
    from ftis_node.swarm.identity import Identity
    from ftis_node.tasks import load_task, with_columns
    from ftis_node.tasks.trial import refuse_unskilled

    hints = make_hints(name=name, bootstraps=tuple(bootstrap or ()))
    if any_tokenizer and model is not None:
        raise UsageError("--any-tokenizer and --model contradict one another.", "Leave out --model.")
    if not any_tokenizer and model is None and task != "arithmetic":
        raise UsageError(
            "A run is for one tokenizer, and no --model says which.",
            "Name a model of the family that is to take part: --model qwen2.5-1.5b; or take --any-tokenizer.",
        )
    named = with_columns(task, question, answer) or task
    said = {"data": data, "eval_data": eval_data, "reward": reward}
    with waiting("Reading the task and the tokenizer"):
        chosen = load_task(named, **said, template=template, code=True)
        refuse_unskilled(chosen)
        if any_tokenizer:
            facts = chosen.facts()
        else:
            from ftis_node.worker.facts import facts_of_run

            facts = facts_of_run(chosen, model or "tiny-a", chat, thinking=thinking)
    shared: dict[str, Any] = {}
    if completion_tokens is not None:
        shared["completion_tokens"] = completion_tokens
    if collaboration == "horizontal":
        shared |= {
            "collaboration": collaboration,
            "parts": parts or 3,
            "slots": SLOTS_MAX,
            "common": SLOTS_MAX,
            "epoch": epoch or EPOCH,
        }
    elif parts or epoch:
        wrong = "--epoch"
        if parts:
            wrong = "--parts"
        raise UsageError(f"{wrong} is for a horizontal run.", "Leave it out, or add --collaboration horizontal.")
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists already.", "Name another --output, or add --overwrite.")
    if private:
        shared["founder"] = Identity.load_or_create(Home(home).key).peer_id
    run = run_for(facts, any_tokenizer=any_tokenizer, group=group, temperature=temperature, **shared)
    run_file = RunFile(run=run, hints=hints)
    try:
        output.write_text(dump_run_file(run_file), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}.", "Name another --output.") from None
    words = ["ftis-node", "join", "--run", str(output), "--task", named]
    for option, value in said.items():
        if value is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    if home != DEFAULT_HOME:
        words += ["--home", str(home)]
    line = f"Run {run.id.hex()} written to {output}; join it with: {shlex.join(words)} --model {model or '…'}"
    print_answer({"id": run.id.hex(), "file": str(output)}, line, json=json)
