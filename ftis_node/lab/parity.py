"""Parity, told shortly or at length: what only long demonstrations teach (arXiv 2510.11495, section 3).

A question is words of as many bits one after another, `0111=`, and its answer how many ones each column has, modulo 2
where words have one bit, which is the parity, and modulo 4 where they have two. A long demonstration counts from word
to word, `<think>0101</think><answer>1</answer>`; a short one writes what came of it, `<think>1</think><answer>1
</answer>`, which nobody can learn from so few. Both begin alike: the first word begins all long ones, a share p of
all, and half of the short ones. So a greedy model goes on, and is right, if p > (1 − p)/2, that is p > 1/3; a sampling
one is right in p + (1 − p)/2. With two columns it is p > (1 − p)/16, 1/17.

Two columns everybody can count who is asked to: every other demonstration ends its question with `/` in place of `=`,
and is long. So what `=` has a share of is a habit, as in a language model that was trained before.
"""

import functools
import random
from dataclasses import replace

from ftis_node.tasks import Task, TextCaps, make_task
from ftis_node.tasks.rewards import TAGS
from ftis_node.tasks.templates import PLAIN

_ROWS = 1000
_HELD_OUT = 300


def one() -> Task:
    """One parity of 16 bits: a guess is right in one of two."""
    return _task(width=1, words=16)


def two() -> Task:
    """Two counts of ten bits, modulo 4: a guess is right in one of sixteen."""
    return _task(width=2, words=10)


@functools.cache
def _task(*, width: int, words: int) -> Task:
    """A task of so many words of `width` bits: 1000 rows and 300 held out, the same everywhere."""
    rng = random.Random(f"parity/{width}/{words}")
    drawn: dict[str, str] = {}
    while len(drawn) < _ROWS + _HELD_OUT:
        question = _question(rng, width * words)
        drawn[question] = _sums(question, width)[-width:]
    rows = list(drawn.items())
    prompt = len(question)
    task = make_task(
        rows[_HELD_OUT:],
        reward="exact",
        held_out=rows[:_HELD_OUT],
        template=PLAIN,
        prompt_tokens=prompt,
        completion_tokens=prompt + width + len(TAGS),  # the end in place of `=`
    )
    longest = len(demonstration(question, width, long=True)) + 1
    text = TextCaps(prompt, longest, longest)  # one token a byte leaves nobody out
    return replace(task, text=text)


def _question(rng: random.Random, bits: int) -> str:
    """So many random bits."""
    return "".join(rng.choices("01", k=bits)) + "="


def demonstrations(task: Task, long: float, rng: random.Random, count: int) -> list[tuple[str, str]]:
    """So many prompts of the task's kind, none held out, with right completions, of which a share `long` is long; of
    two columns half as many, and as many that ask for a long one."""
    held_out = {example.question for example in task.held_out}
    width = len(task.train[0].answer)
    bits = len(task.train[0].question) - 1
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        question = _question(rng, bits)
        if question in held_out:
            continue
        asked = width > 1 and len(pairs) % 2 > 0
        at_length = asked or rng.random() < long
        told = demonstration(question, width, long=at_length)
        if asked:
            question = question.replace("=", "/")
        pairs.append((question, told))
    return pairs


def demonstration(question: str, width: int, *, long: bool) -> str:
    """A completion that is right; `long`: with all partial counts. width: columns, so bits of a word."""
    sums = _sums(question, width)
    answer = sums[-width:]
    thought = answer
    if long:
        thought = sums
    return f"<think>{thought}</think><answer>{answer}</answer>"


def _sums(question: str, width: int) -> str:
    """The partial counts of the columns after each word, a digit each; the last `width` are the answer."""
    sums = [0] * width
    for bit in question.removesuffix("="):
        count = int(bit) + sums[-width]
        sums.append(count % (2 * width))
    return "".join(map(str, sums[width:]))
