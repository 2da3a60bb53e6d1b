"""The rows of a task, before anybody trains on them: gold answers, doubles, empty rows, and whether prompts fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ftis_node.config.settings import collect
from ftis_node.errors import UserError
from ftis_node.preflight.case import noted
from ftis_node.tasks import Example, Scorer, Source, Task, scoring
from ftis_node.tasks.trial import refuse_unskilled
from ftis_node.text import counted

_TOLD = 5  # places that are named
_SHORTEN = "Shorten these questions, or leave them out."
_FORMS = ("<think></think> <answer>{}</answer>", r"\boxed{{{}}}", "{}")


def checked(source: Source, task: Task, advance: Callable[[int], None]) -> dict[str, Any]:
    """Try every row of the task; what was found, as `task check --json` prints it.

    accepted, refused: rows whose gold answer the rule takes for right, or does not; undecided: rows that name no one
    right answer. duplicates: rows with the question of an earlier one; contradictions: questions with several answers.
    empty: blank rows of the file. longest: of the prompts, in tokens of the model; None: not checked, and unchecked
    says why. troubles: what is wrong with the rows, and what a person should do.

    Args:
        advance: called with 1 after each row.

    Raises:
        UserError: the process of the rule cannot be started.
    """
    rows = (*task.train, *task.held_out)
    answers: dict[str, set[str]] = defaultdict(set)
    judged: dict[bool | None, list[Example]] = {True: [], False: [], None: []}
    with scoring(task.reward, task.scorer) as scorer:
        for row in rows:
            answers[row.question].add(row.answer)
            judged[_accepts(task.reward, scorer, row)].append(row)
            advance(1)
    refused, undecided = judged[False], len(judged[None])
    several = [row for row in rows if len(answers[row.question]) > 1]
    twice = len({row.question for row in several})
    longest, long, unchecked = _longest(task, rows)
    if undecided:
        unchecked.append(f"{counted(undecided, 'row')}: the gold answer is no answer itself under {task.reward}")
    refuses = f"The rule {task.reward} refuses the gold answer of {counted(len(refused), 'row')}"
    wrong = (
        (long, f"{counted(len(long), 'prompt')} of more than {task.prompt_tokens} tokens", _SHORTEN),
        (refused, refuses, "Correct these answers, or name another rule with --reward."),
        (several, f"{counted(twice, 'question')} with different answers", "Keep one answer of each."),
    )
    troubles = [{"what": f"{what}: {_places(found)}.", "fix": fix} for found, what, fix in wrong if found]
    troubles += [{"what": error.what, "fix": error.fix} for error in noted(lambda: refuse_unskilled(task))]
    told = {"task": task.name, "data": task.data, "reward": task.reward, "rows": len(task.train)}
    told |= {"held_out": len(task.held_out), "accepted": len(judged[True]), "refused": len(refused)}
    told |= {"undecided": undecided, "duplicates": len(rows) - len(answers), "contradictions": twice}
    told |= {"empty": source.empty(), "prompt_tokens": task.prompt_tokens, "longest": longest}
    return told | {"unchecked": unchecked, "troubles": troubles}


def _accepts(rule: str, scorer: Scorer, row: Example) -> bool | None:
    """Whether the rule takes the gold answer for right; None where it is no answer: unit tests, many expressions."""
    right = scorer.right(row.question, row.answer)[1]
    if right is row.question or not scorer.takes_gold:
        return None
    accepted = any(scorer(form.format(right), row.answer).reward == 1 for form in _FORMS[: 1 if scorer.tagged else 3])
    return accepted or (None if rule == "regex" else False)


def _longest(task: Task, rows: Sequence[Example]) -> tuple[int | None, list[Example], list[str]]:
    """The tokens of the longest prompt for the model of the settings, the rows whose prompts have too many, and why
    these were not checked, as where the model is not here."""
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
            return None, [], [f"prompts: {settings.model} is not here"]
        tokenizer = load_tokenizer(settings.model)
        chat = chat_in(None, tokenizer, task.template, settings)
        letters = {letter for row in rows for letter in task.prompt(row)}
        if missing := unwritable(tokenizer, "".join(sorted(letters))):
            return None, [], [f"prompts: {settings.model} cannot write {missing[:20]!a}"]
        sizes = [len(prompt_ids(tokenizer, task.template, row.question, chat)) for row in rows]
    except UserError as error:
        return None, [], [f"prompts: {error.what}"]
    return max(sizes), [row for row, size in zip(rows, sizes, strict=True) if size > task.prompt_tokens], []


def _places(rows: Sequence[Example]) -> str:
    more = "; …" * (len(rows) > _TOLD)
    return "; ".join(f"{row.place} {row.question[-60:]!r}".strip() for row in rows[:_TOLD]) + more
