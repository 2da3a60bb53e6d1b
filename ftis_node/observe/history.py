"""`metrics.jsonl` and its older parts as curves: each line is read once, and what is kept is bounded."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftis_node.observe.answers import at, finite
from ftis_node.observe.metrics import LogPart, opened

POINTS = 500  # of a curve, at most
WHOLE = 64 << 20  # bytes; of a longer log that is there already, only so many are parsed: a year takes minutes
TEACHERS = 256  # authors whose shares are kept apart; those with least of it make room
OWN = "own"
OTHERS = "others"

_STEP = b'"event": "step"'
_AS_WRITTEN = (
    "step",
    "time",
    "own_groups",
    "foreign_groups",
    "peers",
    "pool",
    "own_reward",
    "foreign_reward",
    "foreign_age",
)
# By the name of a point's value: the place in a step's event that it is read from.
_OF_A_STEP = {
    **{name: name for name in _AS_WRITTEN},
    "entropy": "diagnostics.overall.entropy",
    "wait": "seconds.wait",
    "train": "seconds.train",
}

Point = dict[str, float | None]


class Curve:
    """Points in their order, at most `POINTS`. When it is full, each two neighbours become one, and from then on as
    many new points are joined into one: by their means, but for `LAST`, which are those of the latest."""

    LAST = ("step", "time")

    def __init__(self, *, joined: bool = True) -> None:
        """
        Args:
            joined: False: of neighbours the later one stays as it is (a measurement with its interval has no mean).
        """
        self.stride = 1  # steps that each point stands for
        self._joined = joined
        self._points: list[Point] = []
        self._open: list[Point] = []  # fewer than `stride`

    def add(self, point: Point) -> None:
        """Add a point. All points of a curve have the same names."""
        self._open.append(point)
        if len(self._open) >= self.stride:
            self._points.append(self._join(self._open))
            self._open = []
        if len(self._points) >= POINTS:
            self._points = [self._join(self._points[i : i + 2]) for i in range(0, POINTS, 2)]
            self.stride *= 2

    def cut(self, step: float) -> None:
        """Forget points after `step`: a restart from an older checkpoint made them void."""
        self._points = [point for point in self._points if (point["step"] or 0) <= step]
        self._open = [point for point in self._open if (point["step"] or 0) <= step]

    def columns(self) -> dict[str, list[float | None]]:
        """Name → values, all of one length; the latest point may stand for fewer steps than the others."""
        points = list(self._points)
        if self._open:
            points.append(self._join(self._open))
        if not points:
            return {}
        return {name: [_short(point[name]) for point in points] for name in points[0]}

    def _join(self, some: Sequence[Point]) -> Point:
        """One point in place of some."""
        last = some[-1]
        if not self._joined:
            return last
        means = {name: _mean([point[name] for point in some]) for name in last}
        return means | {name: last[name] for name in self.LAST}


class History:
    """Follows a log. `follow` reads what is new; it may run in a thread, one call at a time."""

    def __init__(self, path: Path) -> None:
        self.version = 0  # grows with every event that was taken in
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._file: tuple[int, int] | None = None  # device and inode of the present file
        self._part = self._read = 0  # the part that is read, and how much of it
        self._steps = Curve()
        self._evaluations = Curve(joined=False)
        self._teachers: dict[str, Counter[str]] = {}
        self._before: tuple[float, float, float] | None = None  # time, bytes in, bytes out

    def follow(self) -> bool:
        """Reads what was written since the last call; whether that was anything."""
        before = self.version
        with opened(self._path) as parts:
            if parts and parts[-1].file is not None:
                self._take(parts, os.fstat(parts[-1].file.fileno()))
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

    def _take(self, parts: Sequence[LogPart], present: os.stat_result) -> None:
        """Take in what is new in these parts; begin anew where they are another log's. present: of the last part."""
        number = parts[-1].number
        file = (present.st_dev, present.st_ino)
        replaced = number == self._part and (file != self._file or present.st_size < self._read)
        if number < self._part or replaced:
            self._begin()
            self.version += 1
        every = 1
        if self._file is None:
            every = max(1, -(-sum(part.length() for part in parts) // WHOLE))
        self._file = file
        for part in parts:
            if part.number >= self._part:
                self._take_part(part, every)

    def _take_part(self, part: LogPart, every: int) -> None:
        """Take in what was not read yet of a part. Of steps only some are parsed: one of so many, and the latest."""
        if part.number != self._part:
            self._part = part.number
            self._read = 0
        left_out = b""
        for number, line in enumerate(part.lines(self._read)):
            if not line.endswith(b"\n"):
                break  # its other half is still to come
            self._read += len(line)
            left_out = b""
            if number % every and _STEP in line:
                left_out = line
            else:
                self._line(line)
        if left_out:
            self._line(left_out)

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
                self._evaluations.add({name: finite(entry.get(name)) for name in names})
            elif kind == "started":
                self._steps.cut(entry["step"])
                self._evaluations.cut(entry["step"])
                self._before = None  # bytes count from nothing, or go on where only the compute process is new
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        self.version += 1

    def _step(self, entry: dict[str, Any]) -> None:
        foreign = at(entry, "diagnostics.foreign") or {}
        seconds = entry["seconds"]
        point = {name: finite(at(entry, path)) for name, path in _OF_A_STEP.items()}
        point |= {
            "foreign_share": None,
            "importance": _mean_importance(foreign),
            "filtered": None,
            "truncated": None,
            "generate": max(0.0, seconds["total"] - seconds.get("train", 0.0) - seconds.get("wait", 0.0)),
            **self._rates(entry),
        }
        if at(entry, "diagnostics.overall.loss_weight"):
            point["foreign_share"] = finite(foreign.get("loss_share"))
        if foreign.get("samples"):
            point["filtered"] = finite(foreign.get("filtered_fraction"))
            point["truncated"] = finite(foreign.get("truncated"))
        self._steps.add(point)
        if not entry.get("skipped"):
            for source, figures in (at(entry, "diagnostics.sources") or {}).items():
                self._teach(source, figures)

    def _rates(self, entry: Mapping[str, Any]) -> Point:
        """Bytes a second since the step before of the same process."""
        before = self._before
        now, came, went = (float(entry.get(name, 0)) for name in ("time", "bytes_in", "bytes_out"))
        self._before = (now, came, went)
        unknown: Point = {"in_rate": None, "out_rate": None}
        if before is None:
            return unknown
        seconds = now - before[0]
        bytes_in = came - before[1]
        bytes_out = went - before[2]
        if seconds <= 0 or bytes_in < 0 or bytes_out < 0:
            return unknown
        return {"in_rate": bytes_in / seconds, "out_rate": bytes_out / seconds}

    def _teach(self, source: str, figures: Mapping[str, Any]) -> None:
        """Add a step's figures to those of its source."""
        teachers = self._teachers
        if source not in teachers and len(teachers) >= TEACHERS:
            free = (name for name in teachers if name not in (OWN, OTHERS))
            least = min(free, key=lambda name: teachers[name]["loss_weight"])
            teachers.setdefault(OTHERS, Counter()).update(teachers.pop(least))
        book = teachers.setdefault(source, Counter())
        for name in ("samples", "loss_weight", "negatives", "filtered"):
            book[name] += finite(figures.get(name)) or 0.0  # type: ignore[assignment]


def _mean_importance(figures: Mapping[str, Any]) -> float | None:
    """The mean of min(ρ, 2) over the judged tokens of a source: `excess` is the sum of min(ρ, 2) − 1."""
    tokens = finite(figures.get("judged_tokens", figures.get("tokens")))
    excess = finite(figures.get("excess"))
    if not tokens or excess is None:
        return None
    return 1.0 + excess / tokens


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    if known:
        return sum(known) / len(known)
    return None


def _short(value: float | None) -> float | None:
    """Seven digits are more than a curve shows (times need ten)."""
    if value is None:
        return None
    if abs(value) >= 1e6:
        return round(value, 1)
    return float(f"{value:.7g}")
