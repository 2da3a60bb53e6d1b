"""The rows of a task, before anybody trains on them: gold answers, doubles, empty rows, and whether prompts fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec import Struct

from ftis_node.config.settings import collect
from ftis_node.errors import UserError
from ftis_node.tasks import Example, Scorer, Source, Task, scoring
from ftis_node.tasks.trial import refuse_unskilled
from ftis_node.text import counted

_TOLD = 5  # places that are named
_FORMS = ("<think></think> <answer>{}</answer>", r"\boxed{{{}}}", "{}")


class Trouble(Struct, frozen=True):
    """What is wrong with the rows, and what a person should do."""

    what: str
    fix: str


class TaskRows(Struct, frozen=True):
    """What was found. accepted, refused: rows whose gold answer the rule takes for right, or does not; undecided: rows
    that name no one right answer. duplicates: rows with the question of an earlier one; contradictions: questions with
    several answers. empty: blank rows of the file. longest: of the prompts, in tokens of the model; None: not checked,
    and unchecked says why."""

    task: str
    data: str
    reward: str
    rows: int
    held_out: int
    accepted: int
    refused: int
    undecided: int
    duplicates: int
    contradictions: int
    empty: int
    prompt_tokens: int
    longest: int | None
    unchecked: list[str]
    troubles: list[Trouble]


def checked(source: Source, task: Task, advance: Callable[[int], None]) -> TaskRows:
    """Try every row of the task.

    Args:
        advance: called with 1 after each row.

    Raises:
        UserError: the process of the rule cannot be started.
    """
    rows = (*task.train, *task.held_out)
    troubles: list[Trouble] = []
    with scoring(task.reward, task.scorer) as scorer:
        verdicts: list[bool | None] = []
        for row in rows:
            verdicts.append(_accepts(task.reward, scorer, row))
            advance(1)
    refused = [row for row, right in zip(rows, verdicts, strict=True) if right is False]
    answers: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        answers[row.question].add(row.answer)
    twice = sum(len(found) > 1 for found in answers.values())
    longest, unchecked = _longest(task, rows, troubles)
    undecided = verdicts.count(None)
    if undecided:
        unchecked.append(f"{counted(undecided, 'row')}: the gold answer is no answer itself under {task.reward}")
    if refused:
        what = f"The rule {task.reward} refuses the gold answer of {counted(len(refused), 'row')}: {_places(refused)}."
        troubles.append(Trouble(what, "Correct these answers, or name another rule with --reward."))
    if twice:
        what = f"{counted(twice, 'question')} with different answers: {_places(rows, answers)}."
        troubles.append(Trouble(what, "Keep one answer of each."))
    try:
        refuse_unskilled(task)
    except UserError as error:
        troubles.append(Trouble(error.what, error.fix))
    sizes = (len(task.train), len(task.held_out), verdicts.count(True), len(refused), undecided)
    empty = source.empty()
    counts = (len(rows) - len(answers), twice, empty, task.prompt_tokens, longest)
    return TaskRows(task.name, task.data, task.reward, *sizes, *counts, unchecked, troubles)


def _accepts(rule: str, scorer: Scorer, row: Example) -> bool | None:
    """Whether the rule takes the gold answer for right; None where it is no answer: unit tests, many expressions."""
    right = scorer.right(row.question, row.answer)[1]
    if right is row.question or not scorer.takes_gold:
        return None
    accepted = any(scorer(form.format(right), row.answer).reward == 1 for form in _FORMS[: 1 if scorer.tagged else 3])
    return accepted or (None if rule == "regex" else False)


def _longest(task: Task, rows: Sequence[Example], troubles: list[Trouble]) -> tuple[int | None, list[str]]:
    """The tokens of the longest prompt for the model of the settings, if that is here."""
    import os
    from pathlib import Path

    from ftis_node.policy.availability import cached
    from ftis_node.policy.load import load_tokenizer
    from ftis_node.policy.names import resolve
    from ftis_node.tokenizer.chat import prompt_ids
    from ftis_node.tokenizer.fingerprint import unwritable
    from ftis_node.worker.formats import chat_in

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        settings = collect(task=task.name, flags={}, environment=os.environ)[0]
        source = resolve(settings.model)
        if not Path(source).is_dir() and cached(source, "tokenizer.json") is None:
            return None, [f"prompts: {settings.model} is not here"]
        tokenizer = load_tokenizer(settings.model)
        chat = chat_in(None, tokenizer, task.template, settings)
        if missing := unwritable(tokenizer, "".join(sorted({*task.template.join(row.question for row in rows)}))):
            return None, [f"prompts: {settings.model} cannot write {missing[:20]!a}"]
        sizes = [len(prompt_ids(tokenizer, task.template, row.question, chat)) for row in rows]
    except UserError as error:
        return None, [f"prompts: {error.what}"]
    long = [row for row, size in zip(rows, sizes, strict=True) if size > task.prompt_tokens]
    if long:
        what = f"{counted(len(long), 'prompt')} of more than {task.prompt_tokens} tokens: {_places(long)}."
        troubles.append(Trouble(what, "Shorten these questions, or leave them out."))
    return max(sizes), []


def _places(rows: Sequence[Example], answers: dict[str, set[str]] | None = None) -> str:
    chosen = [row for row in rows if answers is None or len(answers[row.question]) > 1]
    return "; ".join(row.place or repr(row.question[-60:]) for row in chosen[:_TOLD]) + "; …" * (len(chosen) > _TOLD)
