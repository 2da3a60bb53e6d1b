"""Tasks: questions with answers, and the rules that score completions."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from ftis_node.errors import UsageError
from ftis_node.tasks.arithmetic import arithmetic
from ftis_node.tasks.gsm8k import gsm8k_to_be_tested, load_gsm8k
from ftis_node.tasks.jsonl import load_jsonl
from ftis_node.tasks.judge import Judge
from ftis_node.tasks.math500 import load_math500
from ftis_node.tasks.mathematics import score_mathematics
from ftis_node.tasks.rewards import LOCAL_RULES, RULES, Score, score
from ftis_node.tasks.task import Example, Task

__all__ = [
    "LOCAL_RULES",
    "RULES",
    "Example",
    "Score",
    "Scorer",
    "Task",
    "load_evaluation",
    "load_task",
    "score",
    "scoring",
]

# The operands of their questions.
_ARITHMETIC = {"arithmetic": 3, "arithmetic-4": 4}

logger = logging.getLogger(__name__)

Scorer: TypeAlias = Callable[[str, str], Score]
"""The verdict on a text, given the gold answer."""


def load_task(name: str, *, data: Path | None = None, eval_data: Path | None = None) -> Task:
    """The task `arithmetic` or `gsm8k`, or the one of a `.jsonl` file, to train on.

    `data` is a local training file (for `gsm8k`, or where a `.jsonl` of that name lies elsewhere on this machine),
    `eval_data` a file of the same layout to hold out. Raises UsageError for an unknown name, for a task that cannot be
    trained on, and for unusable files.
    """
    if name in _ARITHMETIC:
        if data is not None or eval_data is not None:
            raise UsageError(f"The task {name} makes its own data.", "Leave out --data and --eval-data.")
        return arithmetic(_ARITHMETIC[name])
    if name == "gsm8k":
        return load_gsm8k(data, eval_data)
    if name == "math500":
        raise UsageError(
            "The task math500 is a test: it has nothing to train on, and its verdicts cannot be shared by a run.",
            "Train on another task, for example gsm8k, and use: ftis-node eval --task math500.",
        )
    if name.endswith(".jsonl"):
        return load_jsonl(data or Path(name), eval_data)
    raise UsageError(f"There is no task {name!r}.", "Use arithmetic, gsm8k or the path of a .jsonl file.")


def load_evaluation(name: str, *, data: Path | None = None) -> Task:
    """The task to evaluate on; its `train` is empty, and no training file is looked for.

    `data` is a local file of the questions, all of which are used; by default the tests of `gsm8k` and `math500` are
    downloaded once, and of a `.jsonl` file the tenth is used that training on it leaves out. Raises UsageError for an
    unknown name and for unusable files.
    """
    if name in _ARITHMETIC:
        return replace(load_task(name, data=data), train=())
    if name == "gsm8k":
        return gsm8k_to_be_tested(data)
    if name == "math500":
        return load_math500(data)
    if name.endswith(".jsonl"):
        return replace(load_jsonl(Path(name), data), train=())
    raise UsageError(
        f"There is no task {name!r}.", "Use arithmetic, arithmetic-4, gsm8k, math500 or the path of a .jsonl file."
    )


@contextmanager
def scoring(rule: str) -> Iterator[Scorer]:
    """What scores by a rule of `RULES` or `LOCAL_RULES`, as long as the context lasts; for one thread at a time.

    Raises UsageError for a rule that is none, and where it needs what is not installed.
    """
    if rule == "math":
        with Judge() as judge:
            yield functools.partial(score_mathematics, judge)
        if judge.unanswered:
            logger.warning("%d answers were given no verdict within a second; they count as wrong.", judge.unanswered)
        return
    score(rule, "", "")  # an unknown rule is told now
    yield functools.partial(score, rule)
