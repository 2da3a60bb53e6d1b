"""Answers that need no skill, tried on a task before a run begins.

A rule that rewards one of them row after row pays strangers for nothing, and a node's own model finds it too. Rows with
different right answers are tried, and on none its own right answer. To be refused, an answer must be rewarded on as
many rows as have the commonest right answer ("Yes." may be right wherever "yes" is), and on three quarters of the
others. Where there is one right answer only, nothing is tried.
"""

import logging
import math
import re
import string
import time
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

from ftis_node.errors import UsageError
from ftis_node.tasks import scoring
from ftis_node.tasks.rewards import FORMS, Scorer, kind_of, ways
from ftis_node.tasks.task import Example, Task

ROWS = 16  # of each part of a task, and half as many at least
SHARE = 0.75
REWARDED = 0.5  # and more; many rewards give a half for the form, or a part of the answer
SECONDS = 60.0
_COMPARING = ("integer", "exact", "math")
_ANSWERS = (
    "nan",
    "inf",
    "-inf",
    "None",
    "null",
    "true",
    "false",
    "True",
    "False",
    "yes",
    "no",
    "Yes",
    "No",
    "unknown",
    "?",
    "0",
    "1",
    "-1",
    "42",
    "0.5",
    "1e999",
    "0/0",
    "x",
    "[]",
    "{}",
    "()",
    "[[]]",
    "''",
    "$$",
    r"\boxed{}",
    r"\text{}",
    "The answer is",
    "A",
    "B",
    "A B C D",
    "1 2 3 4 5 6 7 8 9 10",
    "1,2,3",
    "[1, 2]",
    "\u200b",
    "\u0663",
    "",
    string.ascii_uppercase,
    ", ".join(map(str, range(101))),
    "pass",
    "raise SystemExit",
    "exit()",
    "0 " * 999,
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

_FAILURES = 3  # after so many nothing more is tried: each may take seconds
MEND = "Mend it: it returns a Score for every text, whatever that is, as Score(0.0, False, False) for a wrong one."

logger = logging.getLogger(__name__)


def failures(task: Task) -> tuple[list[str], bool]:
    """Why a person's reward function gave no verdict on texts that a model may write, a sentence for each reason, and
    whether it gave none at all. Right answers come first."""
    rows = task.train[:2]
    reasons: dict[str, str] = {}
    failed = 0
    given = 0
    texts = [(form.format(row.answer), row) for form in ways("") for row in rows]
    odd = ("", "no", FORMS["tags"].format("7"), "<answer>", "\u0663\x00 \U0001f600", "0 " * 999)
    texts += [(text, rows[0]) for text in odd]
    with scoring(task.reward, task.scorer) as scorer:
        for text, row in texts:
            why = scorer.why_not(text, row.answer)
            if why:
                failed += 1
                reasons.setdefault(why, f"The reward function of {task.name} {why}, asked about {text[:40]!r}.")
            else:
                given += 1
            if failed == _FAILURES:
                break
    return list(reasons.values()), given == 0


def refuse_broken(task: Task) -> None:
    """Raise UsageError where a person's reward function gives no verdict on any text; warn where it gives some."""
    if task.scorer is None:
        return
    reasons, all_failed = failures(task)
    if reasons and all_failed:
        raise UsageError(f"{reasons[0]} It has given no verdict on any answer.", MEND)
    for reason in reasons:
        logger.warning("%s Such answers are wrong.", reason)


def refuse_unskilled(task: Task) -> None:
    """Raise UsageError for a task that rewards an answer that needs no skill, see `unskilled`, or whose own reward
    function gives no verdicts.

    Rules that compare an answer with the right one are not tried at each start: tests show that they need not be.
    """
    refuse_broken(task)
    if kind_of(task.reward) in _COMPARING:
        return
    found = unskilled(task)
    if found is not None:
        answer, row, rewarded, rows = found
        raise UsageError(
            f"The task {task.name} rewards {answer[-80:]!r} on {rewarded} of {rows} rows whose right answers differ, "
            f"such as {row.question[-200:]!r} ({row.answer[:80]}).",
            "Mend its reward or those rows, or leave that part of the task out: who answers so would learn nothing.",
        )


def unskilled(task: Task, seconds: float = SECONDS) -> tuple[str, Example, int, int] | None:
    """The first answer that is rewarded on most rows though it needs no skill; a row, on how many, and of how many
    that were tried. None: none is, or time is up.

    Starts the process that judges, if the rule has one. Logs that it tries, and what it left out.
    """
    ends = time.monotonic() + seconds
    logger.info("Trying answers without skill on %s, for %d s at most.", task.name, seconds)
    with scoring(task.reward, task.scorer) as scorer:
        for rows in _parts(task, scorer):
            scorer.begin()  # what hangs on three answers is asked no more
            most = Counter(right for _, right in rows).most_common(1)[0][1]
            misses = len(rows) - most - math.ceil(SHARE * (len(rows) - most))
            answers = [_texts(scorer, row.question, right) for row, right in rows]
            for texts in zip(*answers, strict=True):  # one answer, as it is tried on each row
                if time.monotonic() > ends:
                    logger.warning("Not all answers without skill were tried on %s within %d s.", task.name, seconds)
                    return None
                found = []
                for place, text in enumerate(texts):
                    row = rows[place][0]
                    if text is not None and _reward(scorer, text, row.answer, task.turns) > REWARDED:
                        found.append(place)
                    if place + 1 - len(found) > misses:
                        break
                else:
                    first = found[0]
                    return str(texts[first]), rows[first][0], len(found), len(rows)
    return None


def _parts(task: Task, scorer: Scorer) -> Iterator[list[tuple[Example, str]]]:
    """Yield the first rows of each part of the task with their right answers, as many of each."""
    parts: dict[str, dict[str, list[tuple[Example, str]]]] = {}
    for row in task.train:
        part, right = scorer.right(row.question, row.answer)
        parts.setdefault(part, {}).setdefault(_normal(right), []).append((row, _normal(right)))
    for by_answer in parts.values():
        if len(by_answer) == 1:
            continue
        rows = []
        for turn in zip_longest(*by_answer.values()):  # a row of each right answer, then another of each
            rows += [row for row in turn if row is not None]
        if len(rows) >= ROWS // 2:
            yield rows[:ROWS]


def _normal(answer: str) -> str:
    return answer.strip().casefold()


def _texts(scorer: Scorer, question: str, right: str) -> Iterator[str | None]:
    """Yield the answers to try on a row, in each form that the task might expect; None for its right answer."""
    lines = question.strip().splitlines() or [""]
    numbers = _NUMBER.findall(question) or ["7"]
    own = (question, lines[0], lines[-1], lines[-1].rpartition(" ")[2], numbers[0], numbers[-1], " ".join(numbers))
    for answer in (*_ANSWERS, *own):
        for form in ways(scorer.form):
            text = None
            if _normal(answer) != right:
                text = form.format(answer)
            yield text


def _reward(scorer: Scorer, text: str, gold: str, turns: int) -> float:
    """Return the reward of the text, or of an episode in which it is every answer."""
    if turns == 1:
        return scorer(text, gold).reward
    for count in range(1, turns + 1):
        played = scorer.replay([text] * count, gold)
        if played is not None and played.over:
            return played.reward
    return 0.0
