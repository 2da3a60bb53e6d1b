"""``ftis-node eval``: how good a model or a checkpoint is at a task."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from msgspec import to_builtins

from ftis_node.cli.common import (
    AnswerOption,
    BaseOption,
    CheckpointOption,
    JsonOption,
    QuestionOption,
    RewardOption,
    SetOption,
    TemplateOption,
    TokensOption,
    held_checkpoint,
    parse_pairs,
    print_json,
    tell_choice,
)
from ftis_node.config.profiles import TASK_KINDS
from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError
from ftis_node.evaluate.evaluation import Evaluation
from ftis_node.export.record import TrainingRecord, record_of
from ftis_node.host.doing import doing
from ftis_node.observe.terminal import shown_work
from ftis_node.store.home import DEFAULT_HOME
from ftis_node.tasks import Example, Scorer, Task, load_evaluation, scoring, source_of, with_columns
from ftis_node.tasks.rewards import FORMS, form_of
from ftis_node.tasks.templates import as_trained
from ftis_node.text import say

if TYPE_CHECKING:
    from ftis_node.evaluate.judging import Judged
    from ftis_node.worker.restore import Checkpoint


def evaluate(
    task: Annotated[str, typer.Option(help=f"math500, {TASK_KINDS}; of training data the tenth held out.")],
    checkpoint: CheckpointOption = str(DEFAULT_HOME),
    compare: Annotated[bool, typer.Option("--compare", help="The base model, too, and the paired difference.")] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", "--eval-data", help="A file of held-out questions; all of them are asked."),
    ] = None,
    question: QuestionOption = None,
    answer: AnswerOption = None,
    reward: RewardOption = None,
    template: TemplateOption = None,
    model: BaseOption = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only so many questions, evenly spread.")] = None,
    completion_tokens: TokensOption = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Questions answered at a time; default: what fits.")] = None,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="A .jsonl file for every completion with its scores.")] = None,
    json: JsonOption = False,
) -> None:
    """Measure greedy pass@1 with its 95 % interval; also right formats, and accuracy in any format."""
    flags = parse_pairs(set_)
    if "eval_prompts" in flags:
        raise UsageError("eval_prompts says how many questions a node asks in training.", "Here name --prompts.")
    task = with_columns(task, question, answer) or task
    chosen = load_evaluation(task, data=data, reward=reward, template=template, code=True)
    with contextlib.ExitStack() as stack:
        found = held_checkpoint(stack, checkpoint)
        record = record_of(found)
        chosen = as_trained(chosen, record.run, reward, template)
        if out is not None:
            _refuse_questions(out, task, data)
        examples = chosen.asked(prompts)
        # What is missing is told before a model is loaded.
        scorer = stack.enter_context(scoring(chosen.reward, chosen.scorer))
        with shown_work():
            subjects = chosen_models(checkpoint, found, record, model, flags, chosen.name, compare=compare)
        lines = None
        if out is not None:
            lines = stack.enter_context(_opened(out))
        cap = completion_tokens or chosen.with_room().completion_tokens
        asked = _Questions(chosen, examples, scorer, cap, batch)
        results = []
        for name, subject in subjects.items():
            of = {}
            if compare:
                of["of"] = name
            with shown_work(), doing(f"evaluating the {name}", len(examples), "questions"):
                results.append(_measure(subject, asked, _teller(lines, of)))
            if not json:
                _print(asked, *results)
    if json:
        print_json(_figures(asked, *results))


@dataclass(frozen=True)
class Chosen:
    """The one that is asked: a model by its name, or a checkpoint of it."""

    name: str
    found: Checkpoint | None
    settings: Settings
    run: Run | None  # that says how it was asked in training

    def row(self) -> dict[str, object]:
        """Its fields of `--json`."""
        row: dict[str, object] = {"checkpoint": None, "step": None, "model": self.name}
        if self.found:
            row |= {"checkpoint": str(self.found.path), "step": self.found.step}
        return row | {"quantisation": self.settings.quantisation or "none"}


@dataclass(frozen=True)
class _Questions:
    task: Task
    examples: Sequence[Example]
    scorer: Scorer
    cap: int
    batch: int | None


@dataclass(frozen=True)
class _Result:
    """trained: `full` or `lora`, None for a model by its name. device, dtype: as torch names them."""

    chosen: Chosen
    figures: Evaluation
    judged: Sequence[Judged]
    trained: str | None
    device: str
    dtype: str


def chosen_models(
    name: str,
    found: Checkpoint | None,
    record: TrainingRecord,
    model: str | None,
    flags: Mapping[str, Any],
    task: str,
    *,
    compare: bool,
) -> dict[str, Chosen]:
    """The `checkpoint`, or model, of that name; with `compare` also its `base`, in the same dtype and asked in the same
    way.

    Raises:
        UsageError: a model has no base, and --model says nothing of it; or a setting is wrong.
    """
    from ftis_node.worker.restore import settings_for

    if found is None and model is not None:
        raise UsageError(f"{name} is a model and no checkpoint, so --model says nothing.", "Leave out --model.")
    if found is None and compare:
        raise UsageError(f"{name} is no checkpoint, so it has no base model.", "Leave out --compare.")
    if found is not None:
        name = model or found.model
    settings, origins = settings_for(found, name, {**record.asked(), **flags}, task)
    tell_choice(found, settings, origins)
    run = record.run
    if "chat" in flags:
        run = None
    models = {"checkpoint": Chosen(name, found, settings, run)}
    if compare:
        settings, _ = settings_for(None, name, {"dtype": settings.dtype, **flags}, task)
        models["base"] = Chosen(name, None, settings, run)
    return models


def _measure(chosen: Chosen, asked: _Questions, tell: Callable[[Sequence[Judged]], None]) -> _Result:
    """The model is gone again afterwards: two may be too many for the memory."""
    import torch

    from ftis_node.evaluate.episodes import Episodes
    from ftis_node.evaluate.greedy import batch_that_fits, evaluate, tokenised
    from ftis_node.policy.generate.stream import Sampling
    from ftis_node.worker.formats import asked_in
    from ftis_node.worker.planning import memory_budget
    from ftis_node.worker.restore import load_trained

    gc.collect()  # models that are gone hold themselves in cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    policy = load_trained(chosen.settings, chosen.found)
    chat, prefix, ends = asked_in(chosen.run, policy.tokenizer, asked.task.template, chosen.settings)
    ids = tokenised(policy, asked.task, asked.examples, asked.cap, chat, prefix)
    budget = memory_budget(chosen.settings, policy.device)
    batch = asked.batch or batch_that_fits(policy, max(map(len, ids), default=1), asked.cap, budget)
    sampling = Sampling(asked.cap, 1.0, ends, greedy=True)
    episodes = Episodes.of(policy.tokenizer, asked.task.template, chat, asked.task.turns)
    outcome = evaluate(policy, ids, asked.examples, asked.scorer, sampling, episodes=episodes, batch=batch, tell=tell)
    trained = None
    if chosen.found:
        trained = policy.kind
    dtype = str(policy.dtype).removeprefix("torch.")
    return _Result(chosen, outcome.figures(), outcome.judged, trained, str(policy.device), dtype)


def _teller(lines: IO[str] | None, of: Mapping[str, str]) -> Callable[[Sequence[Judged]], None]:
    def tell(judged: Sequence[Judged]) -> None:
        if lines is not None:
            for one in judged:
                asked = {"question": one.example.question, "gold": one.example.answer, "tokens": one.tokens}
                given = {"completion": one.text, "finished": one.finished, **to_builtins(one.score)}
                lines.write(json.dumps({**of, **asked, **given}, ensure_ascii=False) + "\n")
            lines.flush()

    return tell


def _figures(asked: _Questions, result: _Result, other: _Result | None = None) -> dict[str, Any]:
    """The object of `--json`."""
    from ftis_node.evaluate.intervals import paired

    compared = {}
    if other is not None:
        compared = {"base": other.chosen.row() | to_builtins(other.figures)}
        compared["paired"] = to_builtins(paired(result.judged, other.judged))
    settings = result.chosen.settings
    task = asked.task
    alpha = None
    if settings.lora:
        alpha = settings.lora_alpha
    return {
        **result.chosen.row(),
        "trained": result.trained,
        "device": result.device,
        "dtype": result.dtype,
        "task": task.name,
        "data": task.data,
        "reward": task.reward,
        "template": task.template,
        "completion_tokens": asked.cap,
        "lora_alpha": alpha,
        **to_builtins(result.figures),
        **compared,
    }


def _print(asked: _Questions, result: _Result, other: _Result | None = None) -> None:
    """Print a result; with another that alone, and how they differ."""
    if other is not None:
        _print_comparison(result, other)
        return
    chosen = result.chosen
    figures = result.figures
    trained = ""
    if result.trained:
        trained = f" ({result.trained}{_how(chosen)})"
    say(f"{chosen.name}{trained} on {asked.task.name}, {figures.prompts} questions, greedy", "")
    say(f"  pass@1     {_rate(figures)}")
    say(f"  formatted  {_percent(figures.formatted)}  {_form(asked.task)}")
    say(f"  lenient    {_percent(figures.lenient)}  the last answer is right, whatever the format")
    say(f"  finished   {_percent(figures.finished)}  within {asked.cap} tokens")
    say("", f"{figures.mean_tokens:.0f} tokens a completion, {figures.seconds:.1f} s on {result.device}", flush=True)


def _form(task: Task) -> str:
    """In what form a formatted answer is."""
    form = form_of(task.reward)
    if task.scorer is not None:
        form = task.scorer.form
    if not form:
        return "as the task wants it"
    shown = FORMS[form].format("…")
    if form == "tags":
        shown += ", and nothing else"
    return shown


def _how(chosen: Chosen) -> str:
    told = ""
    if chosen.found and chosen.found.step is not None:
        told = f", step {chosen.found.step}"
    if chosen.settings.quantisation == "nf4":
        told += ", weights in NF4"
    return told


def _print_comparison(result: _Result, other: _Result) -> None:
    from ftis_node.evaluate.intervals import paired

    figures = paired(result.judged, other.judged)
    say("", f"beside it {other.chosen.name}{_how(other.chosen)} on the same questions", "")
    say(f"  pass@1     {_rate(other.figures)}")
    bounds = f"95 % between {100 * figures.low:+.1f} and {100 * figures.high:+.1f}"
    chance = f"p = {figures.p:.2g} (McNemar's exact test)"
    say(f"  difference {100 * figures.difference:+5.1f} points  {bounds}, {chance}")
    apart = f"only the first {figures.only_checkpoint}, only the other {figures.only_base}"
    say(f"  right      both {figures.both}, {apart}, neither {figures.neither}")


def _rate(figures: Evaluation) -> str:
    low = _percent(figures.low).strip()
    high = _percent(figures.high).strip()
    return f"{_percent(figures.pass_at_1)}  95 % between {low} and {high}"


def _percent(rate: float) -> str:
    return f"{100 * rate:5.1f} %"


def _refuse_questions(out: Path, task: str, data: Path | None) -> None:
    """Raise UsageError for an output that is the file that the questions are from."""
    for file in (data, source_of(task).file):
        if file is not None and out.exists() and file.exists() and out.samefile(file):
            raise UsageError(f"{out} holds the questions: it is not written over.", "Name another --out.")


def _opened(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", "Name another --out.") from None
