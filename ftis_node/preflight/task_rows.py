"""The rows of a task, before anybody trains on them: gold answers, doubles, empty rows, and whether prompts fit."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftis_node.config.settings import collect
from ftis_node.errors import UserError
from ftis_node.host.doing import advance
from ftis_node.preflight.case import noted
from ftis_node.tasks import Example, Scorer, Source, Task, scoring
from ftis_node.tasks.rewards import ways
from ftis_node.tasks.trial import MEND, failures, refuse_unskilled
from ftis_node.text import counted
from ftis_node.tokenizer.fingerprint import WRITABLE

_TOLD = 5  # places that are named
_SHORTEN = "Shorten these questions, or leave them out."
_ALLOW = "Name a model with longer tokens in FTIS_MODEL, or leave that part of the task out."


def checked(source: Source, task: Task, flags: Mapping[str, str]) -> dict[str, Any]:
    """Try every row of the task; what was found, as `task check --json` prints it.

    flags: the settings that a person named, of which the model measures the prompts.

    accepted, refused: rows whose gold answer the rule takes for right, or does not; undecided: rows that name no one
    right answer. duplicates: rows with the question of an earlier one; contradictions: questions with several answers.
    empty: blank rows of the file. longest: of the prompts, in tokens of the model; None: not checked, and unchecked
    says why, or troubles do: what is wrong with the rows, and what a person should do. notes: what is odd about rows of
    a package, which nobody can correct.

    Raises:
        UserError: the process of the rule cannot be started.
    """
    rows = (*task.train, *task.held_out)
    answers = defaultdict(set)
    judged: dict[bool | None, list[Example]] = {True: [], False: [], None: []}
    reasons, all_failed = failures(task)
    with scoring(task.reward, task.scorer) as scorer:
        for row in rows:
            answers[row.question].add(scorer.right(row.question, row.answer)[1])
            accepted = None
            if not all_failed:  # else each row would wait for three answers in vain
                accepted = _accepts(task.reward, scorer, row)
            judged[accepted].append(row)
            advance(1)
        if not scorer.form and not judged[True]:  # its answers have another form than is tried here
            judged[None] = [*judged[None], *judged[False]]
            judged[False] = []
    refused = judged[False]
    undecided = len(judged[None])
    several = [row for row in rows if len(answers[row.question]) > 1]
    twice = len({row.question for row in several})
    model, named, sizes, lost, why = _measured(task, rows, flags)
    long = [row for row, size in zip(rows, sizes, strict=False) if size > task.prompt_tokens]
    cannot = f"{model} has no token for letters of {counted(len(lost), 'prompt')}"
    unchecked = []
    if why:
        unchecked.append(f"prompts: {why}")
    if lost and not named:
        unchecked.append(f"prompts: {cannot}; it is the default, name yours in FTIS_MODEL, or in --model. {WRITABLE}")
    if undecided:
        unchecked.append(f"{counted(undecided, 'row')}: the gold answer is no answer itself under {task.reward}")
    refuses = f"The rule {task.reward} refuses the gold answer of {counted(len(refused), 'row')}"
    shorten = _ALLOW
    if source.editable:
        shorten = _SHORTEN
    wrong = [(long, f"{counted(len(long), 'prompt')} of more than {task.prompt_tokens} tokens", shorten)]
    if named:
        wrong.insert(0, (lost, cannot, WRITABLE))
    rows_own = [
        (refused, refuses, "Correct these answers, or name another rule with --reward."),
        (several, f"{counted(twice, 'question')} with different answers", "Keep one answer of each."),
    ]
    if source.editable:
        wrong += rows_own
    notes = [f"{what}: {_places(found)}." for found, what, _ in rows_own if found and not source.editable]
    troubles = [{"what": f"{what}: {_places(found)}.", "fix": fix} for found, what, fix in wrong if found]
    troubles += [{"what": reason, "fix": MEND} for reason in reasons]
    if not reasons:
        troubles += [{"what": error.what, "fix": error.fix} for error in noted(lambda: refuse_unskilled(task))]
    return {
        "task": task.name,
        "data": task.data,
        "reward": task.reward,
        "rows": len(task.train),
        "held_out": len(task.held_out),
        "accepted": len(judged[True]),
        "refused": len(refused),
        "undecided": undecided,
        "duplicates": len(rows) - len(answers),
        "contradictions": twice,
        "empty": source.empty(),
        "prompt_tokens": task.prompt_tokens,
        "longest": max(sizes, default=None),
        "model": model,
        "unchecked": unchecked,
        "notes": notes,
        "troubles": troubles,
    }


def _accepts(rule: str, scorer: Scorer, row: Example) -> bool | None:
    """Whether the rule takes the gold answer for right; None where it is no answer: unit tests, many expressions."""
    right = scorer.right(row.question, row.answer)[1]
    if right is row.question or not scorer.takes_gold:
        return None
    if any(scorer(form.format(right), row.answer).reward == 1 for form in ways(scorer.form)):
        return True
    if rule == "regex":
        return None
    return False


def _measured(
    task: Task, rows: Sequence[Example], flags: Mapping[str, str]
) -> tuple[str, bool, list[int], list[Example], str]:
    """The settings' model, and whether the owner named it; the tokens of each prompt, unless there are rows that it
    cannot write, or a reason why neither is known. Raises UsageError if the settings are wrong."""
    from ftis_node.policy.availability import cached
    from ftis_node.policy.load import load_tokenizer
    from ftis_node.policy.names import resolve
    from ftis_node.tokenizer.asking import prompt_ids
    from ftis_node.tokenizer.fingerprint import backend_of, unwritable
    from ftis_node.worker.formats import chat_in

    settings, origins = collect(task=task.name, flags=flags)
    model = settings.model
    named = origins["model"] != "default"
    try:
        source = resolve(model)
        if not Path(source).is_dir() and cached(source, "tokenizer.json") is None:
            return model, named, [], [], f"{model} is not here"
        tokenizer = load_tokenizer(model)
        chat = chat_in(None, tokenizer, task.template, settings)
        backend = backend_of(tokenizer)
        letters = "".join(sorted({letter for row in rows for letter in row.question}))
        if unwritable(backend, letters) or unwritable(backend, task.template.replace("{question}", "")):
            return model, named, [], [row for row in rows if unwritable(backend, task.prompt(row))], ""
        sizes = [len(prompt_ids(tokenizer, task.template, row.question, chat)) for row in rows]
    except UserError as error:
        return model, named, [], [], error.what
    return model, named, sizes, [], ""


def _places(rows: Sequence[Example]) -> str:
    more = "; …" * (len(rows) > _TOLD)
    return "; ".join(f"{row.place} {row.question[-60:]!r}".strip() for row in rows[:_TOLD]) + more
