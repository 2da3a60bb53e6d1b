"""Sums of eight operands, whose steps take 40 to 62 tokens to spell out: the task of the larger models."""

import functools
import random
from dataclasses import replace

from ftis_node.lab.payloads import values
from ftis_node.tasks import Task, TextCaps, make_task
from ftis_node.tasks.templates import PLAIN

_OPERANDS = 8
_ROWS = 4000
_HELD_OUT = 300
_TEXT = TextCaps(prompt_bytes=16, completion_bytes=96, completion_tokens=96)  # one token a byte leaves nobody out


@functools.cache
def eight() -> Task:
    """`8+7-3+…=` with operands 1–9 and no negative intermediate, as in the built-in arithmetic: 4000 rows and 300 held
    out, the same on every machine. Lab files name it as the task `ftis_node.lab.sums:eight`."""
    rng = random.Random("sums of eight")
    drawn: dict[str, int] = {}
    while len(drawn) < _ROWS + _HELD_OUT:
        question = str(rng.randint(1, 9))
        for _ in range(_OPERANDS - 1):
            question += f"{rng.choice('+-')}{rng.randint(1, 9)}"
        found = values(question)
        if min(found) >= 0:
            drawn[f"{question}="] = found[-1]
    rows = list(drawn.items())
    task = make_task(
        rows[_HELD_OUT:],
        reward="integer",
        held_out=rows[:_HELD_OUT],
        template=PLAIN,
        prompt_tokens=16,
        completion_tokens=64,
    )
    return replace(task, text=_TEXT)
