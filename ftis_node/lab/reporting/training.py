"""The report's sections on how training went: importance weights, divergence, filter, and gradients."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ftis_node.lab.reporting import book as say
from ftis_node.lab.reporting import figures
from ftis_node.lab.reporting.book import Book
from ftis_node.lab.reporting.figures import Line, Panel, Scale
from ftis_node.lab.reporting.results import ESTIMATES, FOREIGN, QUANTILES, Gradient, Results
from ftis_node.lab.reporting.statistics import Interval, mean_interval

MOST_POINTS = 40  # of a line; more are averaged in bins
A_PICTURE = len(figures.PALETTE)  # lines that colours alone tell apart, since dashes mean "after truncation" here
GRADIENT_NAMES = {"cosine": "cosine to the own gradient", "norm_ratio": "norm, in norms of the own gradient"}
FILTER_NAMES = {
    "filtered_fraction": "filtered, of Â ≤ 0",
    "gated": "dropped with Â > 0",
    "loss_share": "share of loss weight",
}

Series: TypeAlias = tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]


class Foreign:
    """The figures of foreign samples over training, averaged over the seeds that had such samples at a step."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._series = {
            (cell, node): found
            for cell in results.cells
            for node in results.nodes(cell)
            if (found := _series(results, cell, node))
        }
        self.cells = [cell for cell in results.cells if any(name == cell for name, _ in self._series)]
        self.nodes = [node for node in results.nodes() if any(name == node for _, name in self._series)]

    def line(self, cell: str, node: str, name: str, *, dashed: bool = False) -> Line | None:
        """The mean of a figure at each step, at most `MOST_POINTS` of them; None where there is nothing to draw."""
        found = self._series.get((cell, node))
        if found is None or not np.isfinite(found[1][name]).any():
            return None
        label = "" if dashed else self.results.label(cell)
        return Line(label, list(found[0]), list(found[1][name]), self._look(cell), dashed=dashed)

    def late(self, cell: str, node: str, name: str) -> float:
        """The mean of a figure over the second half of training; nan if there is none."""
        found = self._series.get((cell, node))
        return math.nan if found is None else _mean(found[1][name][len(found[0]) // 2 :])

    def rows(self) -> Iterable[Sequence[object]]:
        for (cell, node), (steps, columns) in self._series.items():
            for i, step in enumerate(steps):
                yield cell, node, float(step), *(float(columns[name][i]) for name in FOREIGN)

    def _look(self, cell: str) -> int:
        """The cell's own colour, or where there are more cells than colours, one that no other of its chunk has."""
        everyone = self.results.cells
        return everyone.index(cell) if len(everyone) <= A_PICTURE else self.cells.index(cell) % A_PICTURE

    def chunks(self) -> list[list[str]]:
        """The cells, as many at a time as one picture can show."""
        return [self.cells[i : i + A_PICTURE] for i in range(0, len(self.cells), A_PICTURE)]


def weights(foreign: Foreign, book: Book) -> None:
    """Section: importance weights before and after truncation."""
    book.write("## Importance weights of foreign samples")
    if not foreign.cells:
        book.write("No cell trained on foreign samples.")
        return
    book.csv("foreign", ("cell", "node", "step", *FOREIGN), foreign.rows())
    names = {"p1": "1st percentile", "p50": "median", "p99": "99th percentile", "max": "maximum"}
    for place, cells in enumerate(foreign.chunks()):
        parts = []
        for node in foreign.nodes:
            for quantile in QUANTILES:
                before = [foreign.line(cell, node, f"ratio_{quantile}") for cell in cells]
                after = [foreign.line(cell, node, f"weight_{quantile}", dashed=True) for cell in cells]
                lines = [line for pair in zip(before, after, strict=True) for line in pair if line]
                parts.append(Panel(f"{node}: {names[quantile]}", lines, "weight", "ratio"))
        figure = figures.panels(parts, columns=4, x="step", share=True, height=2.0)
        caption = (
            "Importance weights of the foreign tokens of a step: ρ = π_θ / π_gen before truncation (full lines) and "
            "the weight that the objective gives them (dashed); mean over seeds."
        )
        book.picture(_numbered("weights", place), figure, caption)
    _pictures(
        foreign,
        book,
        "ess",
        {"ess": "effective sample size", "truncated": "tokens truncated, share"},
        "share",
        "Effective sample size (Σw)²/Σw² of the foreign tokens as a share of their number, and the share of them whose "
        "ratio was above C; mean over seeds.",
    )
    _late(foreign, book, ("ratio_p50", "ratio_p99", "ratio_max", "weight_p99", "weight_max", "ess", "truncated"))


def divergence(foreign: Foreign, book: Book) -> None:
    """Section: how far foreign samples lie, and what the filter does with them."""
    if not foreign.cells:
        return
    book.write("## Divergence and filter")
    used = defaultdict(list)
    for cell in foreign.cells:
        values = foreign.results.cell(cell).values
        told = [f"{key} {values[key]}" for key in ("divergence", "reduction", "threshold") if key in values]
        used[", ".join(told)].append(foreign.results.label(cell))
    told = [f"{what} in {say.sentence_list(cells)}" for what, cells in used.items() if what]
    book.write(
        f"What the filter looks at: {'; '.join(told)}." if told else "The cells do not say which divergence they use.",
        "Estimates are means over foreign tokens; `divergence_mean` is the objective's own, over samples.",
    )
    names = {name: f"{name}, nats" if name != "k3_reverse" else name for name in ESTIMATES}
    caption = "Six estimates of the divergence from the author of the foreign samples, mean over tokens and seeds."
    _pictures(foreign, book, "divergence", names, "log", caption)
    caption = (
        "What the filter and the gate drop of the foreign samples, and their share of the loss weight; mean over seeds."
    )
    _pictures(foreign, book, "filter", FILTER_NAMES, "share", caption)
    _late(foreign, book, (*ESTIMATES, "divergence_mean", *FILTER_NAMES))


def gradients(results: Results, book: Book) -> None:
    """Section: the bias of the gradient on foreign samples under each objective; nothing if it was not measured."""
    measured = [
        (cell, node)
        for cell in results.cells
        for node in results.nodes(cell)
        if any(trial.gradients.get(node) for trial in results.of(cell).values())
    ]
    if not measured:
        return
    book.write(
        "## Gradients on foreign samples",
        "How the gradient that an objective takes from foreign samples lies to the gradient on a large batch of own "
        "samples: its cosine, 1 for no bias of direction, and its norm as a multiple of the own one's. A step's own "
        "samples, where they were measured too, show how much of the distance is mere noise of so few. Where an "
        "objective let nothing through, the norm is 0 and there is no cosine. In the table a seed's value is its mean "
        "over training, with the 95 % interval over seeds.",
    )
    table, rows = [], []
    for cell in dict.fromkeys(cell for cell, _ in measured):
        parts = []
        for node in (node for name, node in measured if name == cell):
            found = _gradients(results, cell, node)
            for name, title in GRADIENT_NAMES.items():
                lines = [_gradient_line(label, seeds, name, look) for look, (label, seeds) in enumerate(found.items())]
                parts.append(Panel(f"{node}: {title}", lines))
            for label, seeds in found.items():
                means = {name: _over_seeds(seeds, name) for name in GRADIENT_NAMES}
                table.append([results.label(cell), node, label, *(say.level(means[name]) for name in GRADIENT_NAMES)])
                rows.append((cell, node, label, *astuple(means["cosine"]), *astuple(means["norm_ratio"])[:3]))
        figure = figures.panels(parts, columns=2, x="step of the node")
        caption = f"{results.label(cell)}: gradients on foreign samples, mean over seeds; bands: 95 %."
        book.picture(f"gradients-{say.file_name(cell)}", figure, caption)
    book.table(["cell", "node", "objective", "cosine [95 %]", "norm ratio [95 %]"], table)
    header = ("cell", "node", "objective", "cosine", "cosine_low95", "cosine_high95", "n", "norm", "norm_low95")
    book.csv("gradients", (*header, "norm_high95"), rows)


def _pictures(foreign: Foreign, book: Book, stem: str, names: dict[str, str], scale: Scale, caption: str) -> None:
    """A panel for each node and figure, in as many pictures as the cells need."""
    columns = min(3, len(names))
    for place, cells in enumerate(foreign.chunks()):
        parts = [
            Panel(f"{node}: {title}", [line for cell in cells if (line := foreign.line(cell, node, name))], "", scale)
            for node in foreign.nodes
            for name, title in names.items()
        ]
        book.picture(_numbered(stem, place), figures.panels(parts, columns=columns, x="step", height=2.0), caption)


def _late(foreign: Foreign, book: Book, names: Sequence[str]) -> None:
    book.write("Means over the second half of training:")
    rows = [
        [foreign.results.label(cell), node, *(say.short(foreign.late(cell, node, name)) for name in names)]
        for cell in foreign.cells
        for node in foreign.results.nodes(cell)
    ]
    book.table(["cell", "node", *names], rows)


def _series(results: Results, cell: str, node: str) -> Series | None:
    """Steps `[n]` (the middle of each bin) and each figure's mean `[n]` over seeds; None without foreign samples."""
    seeds = [trial.steps[node] for trial in results.of(cell).values() if node in trial.steps]
    last = max((steps.step[-1] for steps in seeds if steps.step), default=0)
    if not last or not any(math.isfinite(value) for steps in seeds for value in steps.columns["ess"]):
        return None
    bins = min(last, MOST_POINTS)
    edge = np.concatenate([(np.array(steps.step) - 1).clip(min=0) * bins // last for steps in seeds])
    at = np.concatenate([np.array(steps.step, dtype=np.float64) for steps in seeds])
    columns = {name: np.concatenate([np.array(steps.columns[name]) for steps in seeds]) for name in FOREIGN}
    kept = np.unique(edge)
    return _binned(at, edge, kept), {name: _binned(values, edge, kept) for name, values in columns.items()}


def _binned(values: NDArray[np.float64], bins: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean of the finite values in each kept bin, nan if it has none."""
    finite = np.isfinite(values)
    sums = np.bincount(bins[finite], values[finite], minlength=int(kept[-1]) + 1)
    counts = np.bincount(bins[finite], minlength=int(kept[-1]) + 1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.asarray(means[kept], dtype=np.float64)


def _gradients(results: Results, cell: str, node: str) -> dict[str, list[list[Gradient]]]:
    """Label → the gradients of each seed; the label is the objective, with the source if that is not foreign."""
    seeds = [trial.gradients.get(node, []) for trial in results.of(cell).values()]
    labels = dict.fromkeys(_label(gradient) for seed in seeds for gradient in seed)
    return {label: [[gradient for gradient in seed if _label(gradient) == label] for seed in seeds] for label in labels}


def _label(gradient: Gradient) -> str:
    source = gradient.source
    return gradient.objective if source == "foreign" else f"{gradient.objective}, {source} samples"


def _gradient_line(label: str, seeds: list[list[Gradient]], name: str, look: int) -> Line:
    by_step: dict[int, list[float]] = defaultdict(list)
    for gradient in itertools.chain(*seeds):
        if math.isfinite(value := getattr(gradient, name)):
            by_step[gradient.step].append(value)
    around = {step: mean_interval(values) for step, values in sorted(by_step.items())}
    return figures.banded(label, list(around), list(around.values()), look)


def _over_seeds(seeds: list[list[Gradient]], name: str) -> Interval:
    """The interval over seeds of a figure's mean over training."""
    means = [_mean(np.array([getattr(gradient, name) for gradient in seed], dtype=np.float64)) for seed in seeds]
    finite = [mean for mean in means if math.isfinite(mean)]
    return mean_interval(finite) if finite else Interval(math.nan, math.nan, math.nan, 0)


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _numbered(stem: str, place: int) -> str:
    return stem if place == 0 else f"{stem}-{place + 1}"
