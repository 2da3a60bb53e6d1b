"""The files of a report: its page in Markdown, at most two figures as PNG, and each seed's final values as CSV.

The same data give the same bytes: nothing written here holds a date, a version or a random identifier.
"""

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ftis_node.host.files import replace_text
from ftis_node.lab.reporting.figures import save
from ftis_node.lab.reporting.statistics import Interval

NONE = "–"
PICTURES = 2  # of a report: it stands in a repository


class ReportPage:
    """Collects the page's lines and writes tables and figures beside it, at once; `close` writes the page."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._drawn = 0
        self._page: list[str] = []

    @property
    def full(self) -> bool:
        """Whether it has all its pictures; later ones are left out."""
        return self._drawn >= PICTURES

    def write(self, *paragraphs: str) -> None:
        """Appends paragraphs (or headings, or tables) with an empty line after each."""
        for paragraph in paragraphs:
            self._page += [paragraph, ""]

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Appends a Markdown table. The rows have as many cells as the header."""
        lines = []
        for row in [header, ["---"] * len(header), *rows]:
            cells = [cell.replace("|", "\\|") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        self.write("\n".join(lines))

    def csv(self, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Writes `name`.csv."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
        replace_text(self.directory / f"{name}.csv", text.getvalue())

    def picture(self, name: str, figure: Any, caption: str) -> None:
        """Writes the figure as `name`.png and appends it with its caption; nothing if the page is full."""
        if self.full:
            return
        self._drawn += 1
        save(figure, self.directory / f"{name}.png")
        self.write(f"![{name}]({name}.png)", f"*{caption}*")

    def close(self) -> Path:
        """Writes report.md and returns its path."""
        path = self.directory / "report.md"
        replace_text(path, "\n".join(self._page).rstrip() + "\n")
        return path


def number(value: float, digits: int = 3, sign: str = "") -> str:
    """With a typographic minus; a dash for nan and inf. sign: "+" puts a sign before positive ones."""
    if not math.isfinite(value):
        return NONE
    return f"{value:{sign}.{digits}f}".replace("-", "−")


signed = partial(number, sign="+")


def probability(p: float) -> str:
    """p with three digits; a dash for nan, of a test that was impossible."""
    if math.isnan(p):
        return NONE
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}"


def limits(low: float, high: float, digits: int = 3, word: Callable[[float, int], str] = signed) -> str:
    """The limits of an interval in brackets, by default of a difference."""
    if math.isnan(low):
        return NONE
    return f"[{word(low, digits)}, {word(high, digits)}]"


def difference(interval: Interval, digits: int = 3) -> str:
    """A mean difference with its interval."""
    return f"{signed(interval.mean, digits)} {limits(interval.low, interval.high, digits)}"


def level(interval: Interval, digits: int = 3) -> str:
    """A mean with its interval."""
    return f"{number(interval.mean, digits)} {limits(interval.low, interval.high, digits, number)}"


def pairs(settled: int, collapsed: int) -> str:
    """How many pairs a difference is of, and how many more it leaves out."""
    if not collapsed:
        return str(settled)
    return f"{settled}, {collapsed} collapsed"


def tallied(verdicts: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """What (name, verdict) say: name, their number, and how many of each verdict, the most frequent first."""
    counts = defaultdict[str, Counter[str]](Counter)
    for name, verdict in verdicts:
        counts[name][verdict] += 1
    told = []
    for name, of_name in counts.items():
        words = ", ".join(f"{count} {verdict}" for verdict, count in of_name.most_common())
        told.append((name, str(of_name.total()), words))
    return told
