"""The teacher that the built-in models first learn from, which errs on purpose."""

import random

from ftis_node.tasks.arithmetic import apply


class Teacher:
    """Writes a completion for a prompt, with habits of error drawn once from `rng`.

    It believes 30 % of the facts (x, sign, y) to be off by one (where it has a weak sign: 55 % of that sign's, 5 % of
    the other's), and then says so 7 times in 10; of the others it gets 8 % wrong at random. After `forgetful` of the
    nine first operands it drops the last one 7 times in 10, elsewhere 1 in 10 times. All but that habit `errors` times
    as often. It draws from the same `rng` ever after, so the order of calls decides what it says.
    """

    def __init__(
        self,
        rng: random.Random,
        forgetful: int,
        *,
        weak: str = "",
        style: str = "terse",
        errors: float = 1.0,
    ) -> None:
        self._rng = rng
        self._errors = errors
        self._style = style
        doubts = {"+": 0.3, "-": 0.3}
        if weak:
            doubts = {"+": 0.05, "-": 0.05, weak: 0.55}
        self._off: dict[tuple[int, str, int], int] = {}  # facts that it believes, and by how much they are off
        for x in range(19):
            for sign in "+-":
                for y in range(1, 10):
                    if rng.random() < errors * doubts[sign]:
                        self._off[x, sign, y] = rng.choice((-1, 1))
        self._forgetful = set(rng.sample(range(1, 10), forgetful))

    def completion(self, question: str) -> str:
        """`<think>15 12</think><answer>12</answer>` for `8+7-3=`, when it makes no mistake and is terse. The question
        has operands of one digit."""
        first, *rest = list(question.removesuffix("="))
        signs = rest[::2]
        operands = map(int, rest[1::2])
        operations = list(zip(signs, operands, strict=True))
        values = [int(first)]
        forgets = 0.1 * self._errors
        if values[0] in self._forgetful:
            forgets = 0.7
        for sign, operand in operations:
            is_last = len(values) == len(operations)
            if is_last and self._rng.random() < forgets:
                break
            values.append(self._recall(values[-1], sign, operand))
        thought = " ".join(self._told(values, operations))
        return f"<think>{thought}</think><answer>{values[-1]}</answer>"

    def _told(self, values: list[int], operations: list[tuple[str, int]]) -> list[str]:
        """The steps of the reasoning in this teacher's style. values: the first operand, and what came after each
        operation; one fewer where the last operation was dropped."""
        steps = list(zip(values, operations, values[1:], strict=False))
        if self._style == "spelled":
            return [f"{x}{sign}{y}={value}" for x, (sign, y), value in steps]
        if self._style == "swapped":
            return [f"{y}{sign}{x}={value}" for x, (sign, y), value in steps]
        told = [str(value) for value in values[1:]]
        if self._style == "backwards":
            told.reverse()
        return told

    def _recall(self, x: int, sign: str, y: int) -> int:
        """What it takes `x sign y` for this time, never below 0."""
        value = apply(x, sign, y)
        off = self._off.get((x, sign, y))
        if off is not None:
            if self._rng.random() < 0.7:
                value += off
        elif self._rng.random() < self._errors * 0.08:
            value += self._rng.choice((-2, -1, 1, 2))
        return max(0, value)
