"""Extra columns of a verdict, such as the answer that was read and why it is wrong.

A reward function makes them, mostly of what strangers wrote. They are bounded where they enter, and are only shown.
"""

import math
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice

COLUMNS = 8
CHARACTERS = 256
_GROUPS = 256  # whose columns are kept to be shown
_VALUES = 4096  # the latest of a column that a step's figure is made of

Columns = dict[str, str | float]


def bounded(columns: object) -> Columns:
    """The first `COLUMNS` columns, cut: names and texts that UTF-8 can write, finite numbers; nothing else."""
    if not isinstance(columns, Mapping):
        return {}
    kept = {}
    for name, value in islice(columns.items(), COLUMNS):
        column = _cut(name)
        shown = _cut(value)
        if isinstance(column, str) and shown is not None:
            kept[column] = shown
    return kept


def _cut(value: object) -> str | float | None:
    if isinstance(value, str):
        return value[:CHARACTERS].encode(errors="replace").decode()
    with suppress(OverflowError):
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


class ScoreColumns:
    """The columns of the latest groups, and of all verdicts since the last step. Any thread may add."""

    def __init__(self) -> None:
        self._groups: deque[tuple[bytes, list[Columns]]] = deque(maxlen=_GROUPS)
        self._values: deque[Columns] = deque(maxlen=_VALUES)

    def add(self, packet: bytes, columns: Sequence[Columns]) -> None:
        """Keep the columns of a group's completions, in their order, if there are any."""
        if any(columns):
            self._groups.append((packet, list(columns)))
            self._values.extend(columns)

    def of(self, packet: bytes) -> list[Columns]:
        """The columns of a group's completions; none if they are no longer known."""
        for known, columns in list(self._groups):
            if known == packet:
                return columns
        return []

    def taken(self) -> Columns:
        """Return the mean, or the commonest text, of each of the first `COLUMNS` columns since the last call."""
        verdicts = list(self._values)
        self._values.clear()
        values: dict[str, list[str | float]] = {}
        for columns in verdicts:
            for name, value in columns.items():
                values.setdefault(name, []).append(value)
        return {name: _typical(found) for name, found in islice(values.items(), COLUMNS)}


def _typical(values: Sequence[str | float]) -> str | float:
    """The mean of numbers; the commonest where some are texts."""
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) == len(values):
        mean = sum(number / len(numbers) for number in numbers)
        return max(-sys.float_info.max, min(mean, sys.float_info.max))  # which rounding may exceed
    return Counter(map(str, values)).most_common(1)[0][0]
