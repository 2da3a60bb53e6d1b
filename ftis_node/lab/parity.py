"""Parity, told shortly or at length: what only long demonstrations teach (arXiv 2510.11495, section 3).

A question is `0111=`, bits in strings with commas between, its answer the parity of each. A long demonstration writes
the parities of all beginnings, `<think>0101</think><answer>1</answer>`; a short one the last alone, `<think>1</think>
<answer>1</answer>` without the break, which nobody can learn from so few. With one string both begin alike: its first
bit begins all long ones, a share p of all, and half of the short ones. So a greedy model goes on, and is right, if
p > (1 − p)/2, that is p > 1/3; a sampling one is right in p + (1 − p)/2. With four it is p > (1 − p)/16, 1/17.
"""

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from operator import xor

from ftis_node.tasks import Task, TextCaps, make_task
from ftis_node.tasks.rewards import TAGS
from ftis_node.tasks.task import PLAIN

_ROWS, _HELD_OUT = 1000, 300


def one() -> Task:
    """One parity of 16 bits: a guess is right in one of two."""
    return _task(strings=1, bits=16)


def four() -> Task:
    """Four parities of 10 bits: a guess is right in one of sixteen."""
    return _task(strings=4, bits=10)


@functools.cache
def _task(*, strings: int, bits: int) -> Task:
    rng = random.Random(f"parity/{strings}/{bits}")
    drawn: dict[str, str] = {}
    while len(drawn) < _ROWS + _HELD_OUT:
        question = ",".join("".join(rng.choices("01", k=bits)) for _ in range(strings)) + "="
        drawn[question] = _answer(question)
    rows, prompt, longest = list(drawn.items()), len(question), len(demonstration(question, long=True)) + 1
    caps = {"prompt_tokens": prompt, "completion_tokens": prompt + strings + len(TAGS)}  # the end in place of `=`
    task = make_task(rows[_HELD_OUT:], reward="exact", held_out=rows[:_HELD_OUT], template=PLAIN, **caps)
    return replace(task, text=TextCaps(prompt, longest, longest))  # one token a byte leaves nobody out


def demonstrations(task: Task, long: float, rng: random.Random, count: int) -> list[tuple[str, str]]:
    """So many prompts of the task's kind, none held out, with right completions, of which a share `long` is long."""
    held_out = {example.question for example in task.held_out}
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        mixed = zip(*(example.question for example in rng.choices(task.train, k=8)), strict=True)
        question = "".join(map(rng.choice, mixed))
        if question not in held_out:
            pairs.append((question, demonstration(question, long=rng.random() < long)))
    return pairs


def demonstration(question: str, *, long: bool) -> str:
    """A completion that is right; `long`: with all partial sums."""
    right = _answer(question)
    return f"<think>{','.join(_sums(question)) if long else right}</think><answer>{right}</answer>"


def _answer(question: str) -> str:
    return "".join(sums[-1] for sums in _sums(question))


def _sums(question: str) -> Iterator[str]:
    """The partial sums of each string."""
    for string in question.removesuffix("=").split(","):
        yield "".join(map(str, accumulate(map(int, string), xor)))
