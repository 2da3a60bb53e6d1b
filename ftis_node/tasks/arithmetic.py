"""The built-in tasks: `a±b±c=` with operands 1–9 and no negative intermediate, 1,899 prompts that need no download.

`arithmetic-4` has a fourth operand: the harder relative of the first, as MATH is of GSM8K, for evaluation beside it.
"""

from dataclasses import replace
from functools import cache
from itertools import product

from ftis_node.tasks.source import Source
from ftis_node.tasks.task import ARITHMETIC_TEXT, CAPS, Example, Task, digest_of, place_of
from ftis_node.tasks.templates import PLAIN

_OPERANDS = range(1, 10)
_OPERANDS_OF = {"arithmetic": 3, "arithmetic-4": 4}
_HELD_OUT = {3: 0.3, 4: 0.02}  # shares of the prompts, by the number of operands


def apply(x: int, sign: str, y: int) -> int:
    """`x + y` or `x - y`."""
    if sign == "+":
        return x + y
    return x - y


@cache
def arithmetic(operands: int = 3) -> Task:
    """The task, made anew and the same everywhere; 3 or 4 operands.

    Held out are, chosen by their hash, about 30 % of the 1,899 prompts of three operands, and 2 % of those of four.
    """
    train = []
    held_out = []
    operations = tuple(product("+-", _OPERANDS))
    for first, others in product(_OPERANDS, product(operations, repeat=operands - 1)):
        values = [first]
        for sign, operand in others:
            values.append(apply(values[-1], sign, operand))
        if min(values) < 0:
            continue
        written = "".join(f"{sign}{operand}" for sign, operand in others)
        example = Example(f"{first}{written}=", str(values[-1]))
        if place_of(example.question) < _HELD_OUT[operands]:
            held_out.append(example)
        else:
            train.append(example)
    name = next(name for name, count in _OPERANDS_OF.items() if count == operands)
    rows = tuple(train), tuple(held_out), digest_of(train)
    return replace(Task.by_rule(name, *rows, "integer", CAPS["arithmetic"], PLAIN), text=ARITHMETIC_TEXT)


class Arithmetic(Source):
    """The built-in tasks."""

    names = tuple(_OPERANDS_OF)

    def _load(self) -> Task:
        return arithmetic(_OPERANDS_OF[self.name])

    def foreseen(self) -> tuple[str | None, str | None]:
        return self._load().data, self.rule
