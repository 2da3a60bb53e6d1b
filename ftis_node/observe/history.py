"""`metrics.jsonl` and its older parts as curves: each line is read once, and what is kept is bounded."""

from __future__ import annotations

import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, cast

from ftis_node.observe.parts import DAMAGED, Part, opened, tell_damage

POINTS = 500  # of a curve, at most
BLOCK = 1 << 20  # bytes read at a time
WHOLE = 64 << 20  # bytes; of a longer log that is there already, windows are read in place of all
WINDOWS = 512
TEACHERS = 256  # authors whose shares are kept apart; those with least of it make room
OWN, OTHERS = "own", "others"
_Source = tuple[int, int, Callable[[], AbstractContextManager[IO[bytes]]]]  # number and length of a part, and the part

Point = dict[str, float | None]


class Curve:
    """Points in their order, at most `POINTS`. When it is full, neighbours become one, and from then on as many are
    joined before they count as a point: means, but for `LAST`, which are those of the latest."""

    LAST = ("step", "time")

    def __init__(self, *, joined: bool = True) -> None:
        """
        Args:
            joined: False: of neighbours the later one stays as it is (a measurement with its interval has no mean).
        """
        self.stride = 1
        self._joined = joined
        self._points: list[tuple[int, Point]] = []  # each with how many it stands for
        self._open: list[tuple[int, Point]] = []

    def add(self, point: Point) -> None:
        self._open.append((1, point))
        if len(self._open) >= self.stride:
            self._points.append(self._join(self._open))
            self._open = []
        if len(self._points) >= POINTS:
            pairs = [self._points[i : i + 2] for i in range(0, len(self._points), 2)]
            self._points = [self._join(pair) for pair in pairs]
            self.stride *= 2

    def cut(self, step: float) -> None:
        """Forgets points after `step`: a restart from an older checkpoint made them void."""
        self._points = [one for one in self._points if (one[1]["step"] or 0) <= step]
        self._open = [one for one in self._open if (one[1]["step"] or 0) <= step]

    def columns(self) -> dict[str, list[float | None]]:
        """Name → values, all of one length; the latest point may stand for fewer than the others."""
        points = [point for _, point in (*self._points, *([self._join(self._open)] if self._open else []))]
        names = dict.fromkeys(name for point in points for name in point)
        return {name: [_short(point.get(name)) for point in points] for name in names}

    def _join(self, some: list[tuple[int, Point]]) -> tuple[int, Point]:
        if len(some) == 1 or not self._joined:
            return sum(count for count, _ in some), some[-1][1]
        joined: Point = {}
        for name in dict.fromkeys(name for _, point in some for name in point):
            known = [(count, value) for count, point in some if (value := point.get(name)) is not None]
            whole = sum(count for count, _ in known)
            joined[name] = sum(count * value for count, value in known) / whole if whole else None
        return sum(count for count, _ in some), joined | {name: some[-1][1].get(name) for name in self.LAST}


class History:
    """Follows a log. `follow` reads what is new; it may run in a thread, one call at a time."""

    def __init__(self, path: Path) -> None:
        self.version = 0  # grows with every event that was taken in
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._file: tuple[int, int] | None = None  # device and inode of the present file
        self._part = self._read = 0  # the part that is read, and how much of it
        self._steps, self._evaluations = Curve(), Curve(joined=False)
        self._teachers: dict[str, Counter[str]] = {}
        self._before: tuple[float, float, float] | None = None  # time, bytes in, bytes out

    def follow(self) -> bool:
        """Reads what was written since the last call; whether that was anything."""
        before = self.version
        older, present = opened(self._path)
        if present is not None:
            with present:
                self._take(older, present)
        return self.version != before

    def facts(self) -> dict[str, Any]:
        """Curves as columns, and what came of whom: samples, loss_weight, negatives, filtered of each source."""
        return {
            "steps": self._steps.columns(),
            "evaluations": self._evaluations.columns(),
            "joined": self._steps.stride,
            "teachers": {name: dict(figures) for name, figures in self._teachers.items()},
        }

    # --- reading --------------------------------------------------------------------------------------------------

    def _take(self, older: Sequence[Part], present: IO[bytes]) -> None:
        number = older[-1].number + 1 if older else 1
        stat = os.fstat(present.fileno())
        file = (stat.st_dev, stat.st_ino)
        if number < self._part or (number == self._part and (file != self._file or stat.st_size < self._read)):
            self._begin()  # it is another log
            self.version += 1
        sources: list[_Source] = [(part.number, part.length(), part.open) for part in older]
        sources.append((number, stat.st_size, lambda: nullcontext(present)))
        if self._file is None:
            self._take_windows(sources)
        self._file = file
        parts = {part.number: part for part in older}
        for number, _, opening in sources:
            if number >= self._part:
                try:
                    with opening() as data:
                        self._take_rest(number, data)
                except FileNotFoundError:  # it has been dropped
                    continue
                except DAMAGED as error:
                    if number in parts:
                        tell_damage(parts[number], error)

    def _take_rest(self, number: int, file: IO[bytes]) -> None:
        """What was not read yet of a part."""
        self._part, self._read = number, self._read if number == self._part else 0
        file.seek(self._read)
        rest = b""
        while block := cast(io.BufferedReader, file).read1(BLOCK):  # of a damaged part all up to the damage
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._line(line)
        self._read = file.tell() - len(rest)

    def _take_windows(self, sources: Sequence[_Source]) -> None:
        """Of a long log a part, evenly spread: reading a year of it would take minutes, and show the same curve."""
        whole = sum(length for _, length, _ in sources)
        if whole <= WHOLE:
            return
        begin, stride = 0, whole // WINDOWS
        for number, length, opening in sources:
            spots = [at - begin for at in range(0, WINDOWS * stride, stride) if begin <= at < begin + length]
            begin += length
            if not spots:
                continue
            with suppress(*DAMAGED), opening() as file:
                for spot in spots:
                    file.seek(spot)
                    lines = file.read(WHOLE // WINDOWS).split(b"\n")
                    for line in lines[spot > 0 : -1]:
                        self._line(line)
                    self._part, self._read = number, file.tell() - len(lines[-1])
                    self._before = None  # no traffic across a gap

    def _line(self, line: bytes) -> None:
        """Takes an event in; a line that a kill cut short, or that is something else, is left out."""
        try:
            entry = json.loads(line)
            kind = entry["event"]
            if kind == "step":
                self._step(entry)
            elif kind == "evaluation":
                self._evaluations.cut(entry["step"])
                names = ("step", "time", "pass_at_1", "low", "high", "formatted")
                self._evaluations.add({name: _number(entry.get(name)) for name in names})
            elif kind == "started":
                self._steps.cut(entry["step"])
                self._evaluations.cut(entry["step"])
                self._before = (entry["time"], 0.0, 0.0)
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        self.version += 1

    def _step(self, entry: dict[str, Any]) -> None:
        diagnostics = entry.get("diagnostics") or {}
        overall, foreign = diagnostics.get("overall") or {}, diagnostics.get("foreign") or {}
        seconds = entry["seconds"]
        point = {name: _number(entry.get(name)) for name in ("step", "time", "own_groups", "foreign_groups", "peers")}
        point |= {name: _number(entry.get(name)) for name in ("pool", "own_reward", "foreign_reward", "foreign_age")}
        heard = bool(foreign.get("samples"))
        point |= {
            "foreign_share": _number(foreign.get("loss_share")) if overall.get("loss_weight") else None,
            "importance": _mean_importance(foreign),
            "filtered": _number(foreign.get("filtered_fraction")) if heard else None,
            "truncated": _number(foreign.get("truncated")) if heard else None,
            "entropy": _number(overall.get("entropy")),
            "wait": _number(seconds.get("wait")),
            "train": _number(seconds.get("train")),
            "generate": max(0.0, seconds["total"] - seconds.get("train", 0.0) - seconds.get("wait", 0.0)),
            **self._rates(entry),
        }
        self._steps.add(point)
        if not entry.get("skipped"):
            for source, figures in (diagnostics.get("sources") or {}).items():
                self._teach(source, figures)

    def _rates(self, entry: Mapping[str, Any]) -> Point:
        """Bytes a second since the step before; a new process counts from nothing."""
        now, came, went = (float(entry.get(name, 0)) for name in ("time", "bytes_in", "bytes_out"))
        before, self._before = self._before, (now, came, went)
        if before is None or now <= before[0] or came < before[1] or went < before[2]:
            return {"in_rate": None, "out_rate": None}
        lasted = now - before[0]
        return {"in_rate": (came - before[1]) / lasted, "out_rate": (went - before[2]) / lasted}

    def _teach(self, source: str, figures: Mapping[str, Any]) -> None:
        if source not in self._teachers and len(self._teachers) >= TEACHERS:
            free = (name for name in self._teachers if name not in (OWN, OTHERS))
            least = min(free, key=lambda name: self._teachers[name]["loss_weight"])
            self._teachers.setdefault(OTHERS, Counter()).update(self._teachers.pop(least))
        book = self._teachers.setdefault(source, Counter())
        for name in ("samples", "loss_weight", "negatives", "filtered"):
            book[name] += _number(figures.get(name)) or 0.0  # type: ignore[assignment]


def _mean_importance(figures: Mapping[str, Any]) -> float | None:
    """The mean of min(ρ, 2) over the tokens of a source: `excess` is the sum of min(ρ, 2) − 1."""
    tokens, excess = _number(figures.get("tokens")), _number(figures.get("excess"))
    return 1.0 + excess / tokens if tokens and excess is not None else None


def _number(value: Any) -> float | None:
    """A finite number, or None: a diverged step has none, and JSON has no others."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _short(value: float | None) -> float | None:
    """Seven digits are more than a curve shows (times need ten)."""
    if value is None:
        return None
    return round(value, 1) if abs(value) >= 1e6 else float(f"{value:.7g}")
