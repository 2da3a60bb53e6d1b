"""Extra columns of a verdict, such as the answer that was read and why it is wrong.

A reward function makes them, mostly of what strangers wrote. They are bounded where they enter, and are only shown.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

COLUMNS, NAME_CHARACTERS, VALUE_CHARACTERS = 8, 64, 256
_GROUPS = 256  # whose columns are kept to be shown
_TEXTS = 64  # different texts of a column that are counted in a step


def bounded(columns: object) -> dict[str, str | float]:
    """The first `COLUMNS` columns, cut: names and texts that UTF-8 can write, finite numbers; nothing else."""
    if not isinstance(columns, Mapping):
        return {}
    kept: dict[str, str | float] = {}
    for name, value in islice(columns.items(), COLUMNS):
        made = _text(value, VALUE_CHARACTERS) if isinstance(value, str) else _number(value)
        if isinstance(name, str) and made is not None:
            kept[_text(name, NAME_CHARACTERS)] = made
    return kept


def _text(text: str, most: int) -> str:
    return text[:most].encode(errors="replace").decode()


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class ScoreColumns:
    """The columns of the latest groups, and of all verdicts since the last step. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[bytes, list[dict[str, str | float]]] = {}
        self._numbers: dict[str, list[float]] = {}
        self._texts: dict[str, Counter[str]] = {}

    def add(self, packet: bytes, columns: Sequence[dict[str, str | float]]) -> None:
        """Keep the columns of a group's completions, in their order, if there are any."""
        if not any(columns):
            return
        with self._lock:
            self._groups[packet] = list(columns)
            if len(self._groups) > _GROUPS:
                del self._groups[next(iter(self._groups))]
            for name, value in (item for one in columns for item in one.items()):
                if name not in self._numbers | self._texts and len(self._numbers | self._texts) >= COLUMNS:
                    continue
                if isinstance(value, str):
                    texts = self._texts.setdefault(name, Counter())
                    texts.update([value] if value in texts or len(texts) < _TEXTS else ())
                else:
                    self._numbers.setdefault(name, []).append(value)

    def of(self, packet: bytes) -> list[dict[str, str | float]]:
        """The columns of a group's completions; none if they are no longer known."""
        with self._lock:
            return self._groups.get(packet, [])

    def taken(self) -> dict[str, str | float]:
        """Of each column the mean of its numbers, or its commonest text, since the last call."""
        with self._lock:
            numbers, texts = self._numbers, self._texts
            self._numbers, self._texts = {}, {}
        told: dict[str, str | float] = {name: found.most_common(1)[0][0] for name, found in texts.items()}
        return told | {name: sum(one / len(found) for one in found) for name, found in numbers.items()}
