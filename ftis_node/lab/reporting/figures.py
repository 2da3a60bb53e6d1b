"""How the lab draws: panels of lines with bands, dots with intervals, grids, and differences by size.

Colours are those of Okabe and Ito (2008), told apart by the colour-blind too, and a brown in place of their yellow;
from the ninth line on the dashes differ. Figures are 8 inches wide: at 800 pixels their letters are those of the text
around them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftis_node.lab.reporting.statistics import Interval

PALETTE = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#8C564B")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
WIDTH = 8.0
COLUMNS = 2  # of panels
DOTTED = 15  # points of a line, up to which each has a dot
LETTERS = 110  # of a line of the legend
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "figure.dpi": 130,
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of means with a band, of the interval at each x; look: which colour and dashes it has."""

    label: str
    x: Sequence[float]
    around: Sequence[Interval]
    look: int


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one method, a dot a seed, and their mean with its interval."""

    label: str
    values: Sequence[float]
    around: Interval
    look: int


@dataclass(frozen=True, slots=True)
class Heat:
    """A grid of numbers, row → column → value, coloured from `low` to `high` by matplotlib's map `colours`."""

    title: str
    values: Mapping[str, Mapping[str, float]]
    low: float
    high: float
    colours: str

    def is_dark(self, value: float) -> bool:
        """Whether black letters could not be read on the colour of this value."""
        if self.low >= 0:
            return value > 0.6 * self.high
        middle = (self.low + self.high) / 2
        return abs(value - middle) > 0.35 * (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Point:
    """A difference with its interval, at a place on the x axis."""

    label: str
    x: float
    around: Interval


def drawn(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Draws in this module's style, whatever the machine's own matplotlibrc says."""

    def styled(*arguments: Any, **named: Any) -> Any:
        import matplotlib.style

        with matplotlib.style.context(["default", STYLE]):
            return draw(*arguments, **named)

    return styled


@drawn
def save(figure: Any, png: Path) -> None:
    """Writes a picture of 256 colours, without date or version."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    with Image.open(png) as picture:
        reduced = picture.convert("RGB").quantize(method=Image.Quantize.FASTOCTREE)  # others lose a line's colour
    reduced.save(png, optimize=True)


@drawn
def panels(parts: Mapping[str, Sequence[Line]], *, x: str) -> Any:
    """Panels of pass@1 by title in two columns, with one y axis for all, and one legend of all lines below."""
    columns = min(len(parts), COLUMNS)
    rows = -(-len(parts) // columns)
    figure, grid = _axes(len(parts), columns, [2.8] * rows, share=True)
    for place, (axes, (title, lines)) in enumerate(zip(grid, parts.items(), strict=True)):
        for line in lines:
            _draw(axes, line)
        axes.set_title(title)
        leftmost = place % columns == 0
        lowest = place + columns >= len(parts)
        if leftmost:
            axes.set_ylabel("pass@1")
        if lowest:
            axes.set_xlabel(x)
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    for axes in grid:  # after all is drawn, for axes that are shared must hold all of it
        axes.set_ylim(_within_one(axes.get_ylim()))
    _add_legend(figure, grid)
    return figure


@drawn
def dots(parts: Mapping[str, Sequence[Row]], *, x: str, bounded: bool = True) -> Any:
    """A panel a node side by side, a line a method from top to bottom: a dot a seed, a bar for mean and interval.

    bounded: values are shares.
    """
    columns = min(len(parts), COLUMNS)
    counts = [len(rows) for rows in parts.values()]
    heights = [0.9 + 0.3 * max(counts[first : first + columns]) for first in range(0, len(counts), columns)]
    figure, grid = _axes(len(parts), columns, heights, share=False)
    before: list[str] = []
    for place, (axes, (title, rows)) in enumerate(zip(grid, parts.items(), strict=True)):
        for y, row in enumerate(rows):
            colour, _ = look(row.look)
            below = y + 0.18 + 0.05 * (np.arange(len(row.values)) % 3)  # the bar, so that neither hides
            axes.plot(row.values, below, "o", color=colour, alpha=0.55, markersize=3, markeredgewidth=0)
            if not math.isnan(row.around.low):
                axes.plot([row.around.low, row.around.high], [y, y], color=colour, linewidth=2)
            axes.plot([row.around.mean], [y], "D", color=colour, markersize=5)
        labels = [row.label for row in rows]
        shown = labels
        if place % columns and labels == before:
            shown = [""] * len(rows)  # they stand to the left
        before = labels
        axes.set_yticks(range(len(rows)), shown)
        axes.set(title=title, xlabel=x, ylim=(len(rows) - 0.4, -0.5))
        axes.xaxis.get_major_locator().set_params(nbins=5)
        if bounded:
            axes.set_xlim(_within_one(axes.get_xlim()))
        else:
            axes.set_xlim(left=0)
    return figure


@drawn
def heats(parts: Sequence[Heat]) -> Any:
    """Grids one below another, each with its numbers written into it."""
    heights = [1.3 + 0.28 * len(part.values) for part in parts]
    figure, grid = _axes(len(parts), 1, heights, share=False)
    for axes, part in zip(grid, parts, strict=True):
        rows = list(part.values)
        columns = list(dict.fromkeys(column for row in part.values.values() for column in row))
        table = np.array([[part.values[row].get(column, math.nan) for column in columns] for row in rows])
        axes.imshow(table, cmap=part.colours, vmin=part.low, vmax=part.high, aspect="auto")
        for (y, x), value in np.ndenumerate(table):
            if math.isfinite(value):
                colour = "white" if part.is_dark(value) else "black"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
        axes.set_yticks(range(len(rows)), rows)
        axes.grid(visible=False)
        axes.set_title(part.title)
    return figure


@drawn
def differences(parts: Mapping[str, Sequence[Point]], *, x: str) -> Any:
    """Panels of differences of pass@1 on a logarithmic axis; a label has a colour."""
    figure, grid = _axes(len(parts), len(parts), [3.0], share=True)
    labels = list(dict.fromkeys(point.label for points in parts.values() for point in points))
    for axes, (title, points) in zip(grid, parts.items(), strict=True):
        axes.axhline(0, color="#777777", linewidth=1)
        places = [point.x for point in points]  # in order
        for number, point in enumerate(points):
            among_equals = number - places.index(point.x)
            middle = (places.count(point.x) - 1) / 2
            beside = point.x * 1.1 ** (among_equals - middle)
            colour = PALETTE[labels.index(point.label)]
            axes.plot([beside], [point.around.mean], "o", color=colour, markersize=4, label=point.label)
            axes.vlines([beside], point.around.low, point.around.high, color=colour, linewidth=1.2)
        axes.set_xscale("log")
        axes.set_xticks([0.1, 1, 3], ["0.1", "1", "3"], minor=False)
        axes.set_xticks([], minor=True)
        axes.set(title=title, xlabel=x, xlim=(0.04, 6))
    means = [point.around.mean for points in parts.values() for point in points]
    grid[0].set(ylabel="difference of final pass@1", ylim=(min(means) - 0.05, max(means) + 0.05))
    _add_legend(figure, grid)
    return figure


def look(number: int) -> tuple[str, Any]:
    """Colour and dashes of the n-th line."""
    colour = PALETTE[number % len(PALETTE)]
    return colour, DASHES[number // len(PALETTE) % len(DASHES)]


def _axes(count: int, columns: int, heights: Sequence[float], share: bool) -> tuple[Any, list[Any]]:
    """A figure with so many axes, row by row. heights: of the rows, in inches. share: all have one y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    grid = figure.subplots(len(heights), columns, sharey=share, squeeze=False, height_ratios=heights)
    every = list(grid.flat)
    for axes in every[count:]:
        axes.remove()
    return figure, every[:count]


def _draw(axes: Any, line: Line) -> None:
    """A line with its band, and a dot at each point if there are few."""
    colour, dash = look(line.look)
    marker = None
    if len(line.x) <= DOTTED:
        marker = "o"
    means = [around.mean for around in line.around]
    axes.plot(line.x, means, color=colour, linestyle=dash, marker=marker, markersize=2.5, label=line.label)
    low = [around.low for around in line.around]
    high = [around.high for around in line.around]
    axes.fill_between(line.x, low, high, color=colour, alpha=0.12, linewidth=0)


def _within_one(limits: tuple[float, float]) -> tuple[float, float]:
    """Axis limits without the part where no share can lie, which intervals of few seeds reach far into."""
    return max(limits[0], -0.02), min(limits[1], 1.02)


def _add_legend(figure: Any, grid: Sequence[Any]) -> None:
    """One legend of all axes below them, in as many columns as its labels leave room for."""
    handles: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    longest = max(map(len, handles))
    in_a_row = max(1, LETTERS // (longest + 8))
    rows = -(-len(handles) // in_a_row)
    columns = -(-len(handles) // rows)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, handlelength=2.5)
