"""How the lab draws: panels of lines with bands, and dots with intervals.

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
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
WIDTH = 8.0
COLUMNS = 2  # of panels
DOTTED = 15  # points of a line, up to which each has a dot
LETTERS = 110  # of a line of the legend
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.dpi": 130,
}


@dataclass(frozen=True)
class Line:
    """A line of means with a band, of the interval at each x; look: which colour and dashes it has."""

    label: str
    x: Sequence[float]
    around: Sequence[Interval]
    look: int


@dataclass(frozen=True)
class Row:
    """The values of one method, a dot a seed, and their mean with its interval."""

    label: str
    values: Sequence[float]
    around: Interval
    look: int


def drawn(draw: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the function draws in this module's style, whatever the machine's own matplotlibrc says."""

    def styled(*arguments: Any, **named: Any) -> Any:
        import matplotlib.style

        with matplotlib.style.context(["default", STYLE]):
            return draw(*arguments, **named)

    return styled


@drawn
def save(figure: Any, png: Path) -> None:
    """Writes a picture of 256 colours, without date or version. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    with Image.open(png) as picture:
        colours = picture.convert("RGB")
        reduced = colours.quantize(method=Image.Quantize.FASTOCTREE)  # other methods lose a line's colour
    reduced.save(png, optimize=True)


@drawn
def panels(parts: Mapping[str, Sequence[Line]], *, x: str) -> Any:
    """Panels of pass@1 by title in two columns, with one y axis for all, and one legend of all lines below.

    Args:
        parts: one panel at least. x: the name of the lowest panels' axis.

    Returns:
        The figure, for `save`.
    """
    columns = min(len(parts), COLUMNS)
    rows = -(-len(parts) // columns)
    figure, grid = _axes(len(parts), columns, [2.8] * rows, share=True)
    for place, title in enumerate(parts):
        axes = grid[place]
        for line in parts[title]:
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

    bounded: values are shares; else they are 0 or more. Returns the figure, for `save`.
    """
    columns = min(len(parts), COLUMNS)
    counts = [len(rows) for rows in parts.values()]
    heights = []
    for first in range(0, len(counts), columns):
        most = max(counts[first : first + columns])
        heights.append(0.9 + 0.3 * most)
    figure, grid = _axes(len(parts), columns, heights, share=False)
    before: list[str] = []
    for place, (title, rows) in enumerate(parts.items()):
        axes = grid[place]
        for y, row in enumerate(rows):
            _draw_row(axes, y, row)
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


def _draw_row(axes: Any, y: int, row: Row) -> None:
    """A row at this height: its bar, and the dots below it, so that neither hides the other."""
    colour, _ = look(row.look)
    below = y + 0.18 + 0.05 * (np.arange(len(row.values)) % 3)
    axes.plot(row.values, below, "o", color=colour, alpha=0.55, markersize=3, markeredgewidth=0)
    around = row.around
    if not math.isnan(around.low):
        axes.plot([around.low, around.high], [y, y], color=colour, linewidth=2)
    axes.plot([around.mean], [y], "D", color=colour, markersize=5)


def look(number: int) -> tuple[str, Any]:
    """Colour and dashes of the n-th line."""
    colour = PALETTE[number % len(PALETTE)]
    return colour, DASHES[number // len(PALETTE) % len(DASHES)]


def _axes(count: int, columns: int, heights: Sequence[float], share: bool) -> tuple[Any, list[Any]]:
    """A figure with so many axes, row by row. heights: of the rows, in inches. share: all have one y axis."""
    from matplotlib.figure import Figure

    size = (WIDTH, sum(heights) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(
        len(heights),
        columns,
        sharey=share,
        squeeze=False,
        height_ratios=heights,
    )
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
    low = [around.low for around in line.around]
    high = [around.high for around in line.around]
    axes.plot(
        line.x,
        means,
        color=colour,
        linestyle=dash,
        marker=marker,
        markersize=2.5,
        label=line.label,
    )
    axes.fill_between(line.x, low, high, color=colour, alpha=0.12, linewidth=0)


def _within_one(limits: tuple[float, float]) -> tuple[float, float]:
    """Axis limits without the part where no share can lie, which intervals of few seeds reach far into."""
    low, high = limits
    return max(low, -0.02), min(high, 1.02)


def _add_legend(figure: Any, grid: Sequence[Any]) -> None:
    """One legend of all axes below them, in as many columns as its labels leave room for."""
    handles: dict[str, Any] = {}
    for axes in grid:
        found, labels = axes.get_legend_handles_labels()
        for handle, label in zip(found, labels, strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    longest = max(map(len, handles))
    in_a_row = max(1, LETTERS // (longest + 8))
    rows = -(-len(handles) // in_a_row)
    columns = -(-len(handles) // rows)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=columns,
        handlelength=2.5,
    )
