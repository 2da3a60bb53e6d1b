"""Rows of one node's own in a trial, of another kind for each: other signs, lengths and scales of the reward.

What is held out of them is held out of the built-in tasks too, so that no model has seen it in its warm-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ftis_node.tasks import Example, Score, Scorer, Task, load_task, score
from ftis_node.worker.messages import OWN_DATA

EVALUATION = OWN_DATA  # the name of the evaluation set of each node's own rows
_CLOSE = 2
_SCALE = 10.0


def _graded(text: str, gold: str) -> Score:
    """10 for the right answer, 4 for a number that is off by 2 at most."""
    found = score("integer", text, gold)
    near = (score("integer", text, str(int(gold) + off)) for off in range(-_CLOSE, _CLOSE + 1))
    part = 1.0 if found.reward else 0.4 * any(one.reward for one in near)
    return replace(found, reward=_SCALE * part)


def _signs(*wanted: str) -> Callable[[Example], bool]:
    """Whether a question of three operands has these two signs."""
    return lambda example: "".join(filter("+-".__contains__, example.question)) in wanted


# Each kind: the built-in task, its rows that belong to it, and a scorer in place of the task's rule.
KINDS: dict[str, tuple[str, Callable[[Example], bool], Scorer | None]] = {
    "additions": ("arithmetic", _signs("++"), None),
    "subtractions": ("arithmetic", _signs("+-", "--"), None),
    "long": ("arithmetic-4", lambda example: True, None),
    "graded": ("arithmetic", _signs("-+"), Scorer(_graded)),
}


@functools.cache
def private_task(kind: str) -> Task:
    """The rows of a kind of `KINDS`."""
    name, belongs, scorer = KINDS[kind]
    task = load_task(name)
    train, held_out = (tuple(filter(belongs, rows)) for rows in (task.train, task.held_out))
    return replace(task, name=kind, train=train, held_out=held_out, scorer=scorer)
