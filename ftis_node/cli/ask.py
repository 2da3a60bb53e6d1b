"""``ftis-node ask``: a trained model answers, beside its base model if that is wanted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.common import (
    CheckpointOption,
    JsonOption,
    RewardOption,
    SetOption,
    held_checkpoint,
    parse_pairs,
    print_json,
)
from ftis_node.cli.eval import Chosen, chosen_models
from ftis_node.errors import UsageError
from ftis_node.export.record import record_of
from ftis_node.fit.context import context_of, refuse_prompts
from ftis_node.host.doing import doing
from ftis_node.observe.terminal import shown_work
from ftis_node.store.home import DEFAULT_HOME
from ftis_node.tasks import Example, Task, load_evaluation, scoring
from ftis_node.tasks.templates import ASKED, as_trained
from ftis_node.text import say

if TYPE_CHECKING:
    from ftis_node.policy.policy import Policy

PROMPT = "> "


def ask(
    question: Annotated[str | None, typer.Argument(help="What to ask; without it lines are read.")] = None,
    checkpoint: CheckpointOption = str(DEFAULT_HOME),
    compare: Annotated[bool, typer.Option("--compare", help="The base model answers, too.")] = False,
    trained: Annotated[bool, typer.Option("--trained", help="In the run's template, as in training.")] = False,
    task: Annotated[str | None, typer.Option(help="Ask a held-out row of this task, and judge the answer.")] = None,
    row: Annotated[int, typer.Option(min=0, help="Which one, from 0.")] = 0,
    reward: RewardOption = None,
    completion_tokens: Annotated[int | None, typer.Option(min=1, help="Longest; default: the run's, else 512.")] = None,
    set_: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Ask a trained model, beside its base model with --compare.

    It is asked in its own chat, a base model in plain text; with --trained, or a --task, in the words of its run. Its
    likeliest words are the answer.
    """
    if task is not None and question is not None:
        raise UsageError("A question and --task contradict one another.", "Leave one of them out.")
    loaded, example = _example(task, row, reward)
    with contextlib.ExitStack() as stack:
        found = held_checkpoint(stack, checkpoint)
        record = record_of(found)
        cap = completion_tokens
        if cap is None:
            cap = record.run.completion_tokens if record.run else 512
        with shown_work(), doing("loading the model"):
            from ftis_node.worker.restore import load_trained

            flags = parse_pairs(set_)
            models = chosen_models(checkpoint, found, record, None, flags, "", compare=compare)
            policies = {name: load_trained(one.settings, one.found) for name, one in models.items()}
        template = ASKED
        if loaded is not None:
            loaded = as_trained(loaded, record.run, reward, None)
            template = loaded.template
        if trained:
            run = models["checkpoint"].run
            if run is None:
                raise UsageError("No run is known here whose template could be used.", "Leave out --trained.")
            template = run.template
        asked: Iterable[str] = _lines(json)
        if example is not None:
            asked = [example.question]
        elif question is not None:
            asked = [question]
        for one in asked:
            with shown_work(), doing("answering", len(policies), "answers"):
                answers = {name: _answer(policy, models[name], template, one, cap) for name, policy in policies.items()}
            verdicts = _verdicts(loaded, example, answers)
            if json:
                print_json({"question": one, "answers": answers, **verdicts})
            else:
                _show(answers, example, verdicts)


def _answer(policy: Policy, chosen: Chosen, template: str, question: str, tokens: int) -> str:
    """The model's likeliest answer to a question in a template.

    Raises:
        UsageError: the tokenizer cannot write the question, or the model has no room for it and its answer.
    """
    from ftis_node.policy.generate.stream import Sampling, generate
    from ftis_node.tokenizer.asking import prompt_ids
    from ftis_node.worker.formats import asked_in

    tokenizer = policy.tokenizer
    chat, prefix, ends = asked_in(chosen.run, tokenizer, template, chosen.settings)
    ids = prompt_ids(tokenizer, template, question, chat, prefix)
    context = context_of(policy.causal_lm.config)
    shorter = "Ask a shorter question, or use fewer --completion-tokens."
    examples = [Example(question, "")]
    refuse_prompts(policy.name, context, [ids], examples, "the question", tokens, shorter=shorter)
    ((completion,),) = generate(policy, [ids], group=1, sampling=Sampling(tokens, 1.0, ends, greedy=True))
    text = str(tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)).strip()
    if not completion.finished:
        text += " …"
    return text


def _example(name: str | None, row: int, reward: str | None) -> tuple[Task | None, Example | None]:
    """The task and its held-out row. Raises UsageError where there is none of that number."""
    if name is None:
        return None, None
    task = load_evaluation(name, reward=reward, code=True)
    if row >= len(task.held_out):
        raise UsageError(f"{task.name} has {len(task.held_out)} held-out rows, from 0.", "Name a smaller --row.")
    return task, task.held_out[row]


def _lines(quiet: bool) -> Iterator[str]:
    """Questions from standard input until its end; a person is shown a prompt."""
    asking = sys.stdin.isatty() and not quiet
    while True:
        if asking:
            sys.stdout.write(PROMPT)
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _verdicts(task: Task | None, example: Example | None, answers: dict[str, str]) -> dict[str, Any]:
    """The gold answer and the rewards of a task's row; nothing for other questions."""
    if task is None or example is None:
        return {}
    with scoring(task.reward, task.scorer) as scorer:
        rewards = {name: scorer(text, example.answer).reward for name, text in answers.items()}
    return {"gold": example.answer, "rewards": rewards}


def _show(answers: dict[str, str], example: Example | None, verdicts: dict[str, Any]) -> None:
    if example is not None:
        say(*example.question.split("\n"), f"gold: {example.answer}", "")
    for name, text in answers.items():
        judged = ""
        if verdicts:
            judged = f" (reward {verdicts['rewards'][name]:g})"
        if len(answers) > 1 or judged:
            say(f"{name}{judged}:")
        say(*text.split("\n"), "")
