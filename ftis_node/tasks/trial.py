"""Answers that need no skill, tried on a task before a run begins.

A rule that rewards one of them row after row pays strangers for nothing, and a node's own model finds it too. Tried are
rows whose right answers differ, one row each. So "yes" is no such answer where "yes" is right, however often that is;
and where all rows have the same right answer, nothing is tried.
"""

from __future__ import annotations

import json
import logging
import re
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ftis_node.errors import UsageError
from ftis_node.tasks import scoring
from ftis_node.tasks.own import Guarded
from ftis_node.tasks.packaged import EnvironmentJudge, PackageJudge
from ftis_node.tasks.rewards import Scorer
from ftis_node.tasks.task import Environment, Example, Task

ROWS = 12  # of each part of a task
SHARE = 0.75  # of these rows; a guess of two values is right on half of them
REWARDED = 0.5  # what is worth less is a part of an answer
SECONDS = 30.0
_QUIET_SECONDS = 2.0
_ANSWERS = (
    *("nan", "inf", "-inf", "None", "null", "true", "false", "True", "False", "yes", "no", "Yes", "No", "unknown", "?"),
    *("0", "1", "-1", "42", "0.5", "1e999", "0/0", "x", "[]", "{}", "()", "[[]]", "''", "$$", r"\boxed{}", r"\text{}"),
    *("The answer is", "A", "B", "A B C D", "1 2 3 4 5 6 7 8 9 10", "1,2,3", "[1, 2]", "\u200b", "\u0663", ""),
    *(
        " ".join(string.ascii_letters),
        ", ".join(map(str, range(101))),
        "pass",
        "raise SystemExit",
        "exit()",
        "0 " * 999,
    ),
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_TAGGED = "<think></think><answer>{}</answer>"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unskilled:
    """An answer that needs no skill, a row on which it is rewarded, how many more are, and how many were tried."""

    answer: str
    row: Example
    rewarded: int
    rows: int


def refuse_unskilled(task: Task) -> None:
    """Raise UsageError for a task that rewards an answer that needs no skill, see `unskilled`."""
    if (found := unskilled(task)) is not None:
        raise UsageError(
            f"The task {task.name} rewards {found.answer[-80:]!r} on {found.rewarded} of {found.rows} rows whose right "
            f"answers differ, such as {found.row.question[-200:]!r} ({found.row.answer[:80]}).",
            "Mend its reward or those rows, or leave that part of the task out: who answers so would learn nothing.",
        )


def unskilled(task: Task, seconds: float = SECONDS) -> Unskilled | None:
    """The first answer that is rewarded on most rows though it needs no skill; None: none is, or time is up.

    Starts the process that judges, if the rule has one. Logs what takes long, and what was not tried.
    """
    began, told = time.monotonic(), False
    with scoring(task.reward, task.scorer) as scorer:
        for rows in _parts(task):
            for texts in zip(*(_texts(task, row.question) for row in rows), strict=True):
                spent = time.monotonic() - began
                if spent > seconds:
                    logger.warning("Not all answers without skill were tried on %s within %d s.", task.name, seconds)
                    return None
                if spent > _QUIET_SECONDS and not told:
                    logger.info("Trying answers without skill on %s, for %d s at most.", task.name, seconds)
                    told = True
                found = _rewarded(scorer, rows, texts, task.turns)
                if found:
                    place = found[0]
                    return Unskilled(texts[place], rows[place], len(found), len(rows))
    return None


def _parts(task: Task) -> list[Sequence[Example]]:
    """Of each part of the task the first rows whose right answers differ."""
    parts: dict[str, dict[str, Example]] = {}
    for row in task.train:
        part, right = "", row.answer
        if type(task.scorer) is PackageJudge:  # which names both in the row's answer
            name, level, *_, told = json.loads(row.answer)
            part, right = f"{name}@{level}", row.question if told is None else str(told)
        parts.setdefault(part, {}).setdefault(right.strip().casefold(), row)
    return [list(rows.values())[:ROWS] for rows in parts.values() if len(rows) > 1]


def _texts(task: Task, question: str) -> Iterator[str]:
    """What is tried on a row, in each form that the task might expect."""
    lines, numbers = question.strip().splitlines() or [""], _NUMBER.findall(question) or ["7"]
    own = (question, lines[0], lines[-1], lines[-1].split()[-1:][0] if lines[-1] else "", numbers[0], numbers[-1])
    free = isinstance(task.scorer, Guarded | EnvironmentJudge)
    for answer in (*_ANSWERS, *own, " ".join(numbers), str(len(question))):
        for form in ("{}", r"\boxed{{{}}}", _TAGGED) if free else (_TAGGED,):
            yield form.format(answer)


def _rewarded(scorer: Scorer, rows: Sequence[Example], texts: Sequence[str], turns: int) -> list[int]:
    """The places of the rows that reward their text; empty as soon as they cannot be most."""
    found: list[int] = []
    for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
        if _reward(scorer, text, row.answer, turns) >= REWARDED:
            found.append(place)
        if place + 1 - len(found) > (1 - SHARE) * len(rows):
            return []
    return found


def _reward(scorer: Scorer, text: str, gold: str, turns: int) -> float:
    """What the text is worth, or an episode in which it is every answer."""
    if turns == 1 or not isinstance(scorer, Environment):
        return scorer(text, gold).reward
    played = (scorer.replay([text] * count, gold) for count in range(1, turns + 1))
    return next((one.reward for one in played if one is not None and one.over), 0.0)
