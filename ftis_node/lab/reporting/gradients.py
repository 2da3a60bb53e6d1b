"""The report's section on the gradient that foreign samples give under each objective."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ftis_node.lab.events import GradientEvent
from ftis_node.lab.reporting import book as say
from ftis_node.lab.reporting import figures
from ftis_node.lab.reporting.book import Book
from ftis_node.lab.reporting.figures import Line
from ftis_node.lab.reporting.results import Results
from ftis_node.lab.reporting.statistics import Interval, mean_interval

_Name: TypeAlias = Literal["cosine", "norm_ratio"]
GRADIENT_NAMES: dict[_Name, str] = {
    "cosine": "cosine to the own gradient",
    "norm_ratio": "norm, in norms of the own gradient",
}


def compared(results: Results, book: Book) -> None:
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
    table = []
    for cell in dict.fromkeys(cell for cell, _ in measured):
        parts = {}
        for node in (node for name, node in measured if name == cell):
            found = _gradients(results, cell, node)
            for name, title in GRADIENT_NAMES.items():
                lines = [_gradient_line(label, seeds, name, look) for look, (label, seeds) in enumerate(found.items())]
                parts[f"{node}: {title}"] = lines
            for label, seeds in found.items():
                means = {name: _over_seeds(seeds, name) for name in GRADIENT_NAMES}
                table.append([results.label(cell), node, label, *(say.level(means[name]) for name in GRADIENT_NAMES)])
        figure = figures.panels(parts, x="step of the node")
        caption = f"{results.label(cell)}: gradients on foreign samples, mean over seeds; bands: 95 %."
        book.picture(f"gradients-{say.file_name(cell)}", figure, caption)
    book.table(["cell", "node", "objective", "cosine [95 %]", "norm ratio [95 %]"], table)


def _gradients(results: Results, cell: str, node: str) -> dict[str, list[list[GradientEvent]]]:
    """Label → the gradients of each seed; the label is the objective, with the source if that is not foreign."""
    seeds = [trial.gradients.get(node, []) for trial in results.of(cell).values()]
    labels = dict.fromkeys(_label(gradient) for seed in seeds for gradient in seed)
    return {label: [[gradient for gradient in seed if _label(gradient) == label] for seed in seeds] for label in labels}


def _label(gradient: GradientEvent) -> str:
    source, objective = gradient["source"], gradient["objective"]
    return objective if source == "foreign" else f"{objective}, {source} samples"


def _gradient_line(label: str, seeds: list[list[GradientEvent]], name: _Name, look: int) -> Line:
    by_step: dict[int, list[float]] = defaultdict(list)
    for gradient in itertools.chain(*seeds):
        if math.isfinite(value := gradient[name]):
            by_step[gradient["step"]].append(value)
    around = {step: mean_interval(values) for step, values in sorted(by_step.items())}
    return Line(label, list(around), list(around.values()), look)


def _over_seeds(seeds: list[list[GradientEvent]], name: _Name) -> Interval:
    """The interval over seeds of a figure's mean over training."""
    means = [_mean(np.array([gradient[name] for gradient in seed], dtype=np.float64)) for seed in seeds]
    finite = [mean for mean in means if math.isfinite(mean)]
    return mean_interval(finite) if finite else Interval(math.nan, math.nan, math.nan, 0)


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan
