"""The report's section on rows: what nodes could not do, learned from others, and could do then."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ftis_node.lab.reporting.book import NONE, Book
from ftis_node.lab.reporting.results import Results
from ftis_node.lab.reporting.statistics import mean_interval

_LATE = {"failed": "own groups all wrong", "alike": "own groups all alike", "pass_at_8": "pass@8 of own groups"}
_LAST = {"found": "rows failed", "learned": "learned from others", "done": "and done since"}


def learned(results: Results, book: Book) -> None:
    """Section, for experiments with pulling by need: dead groups and pass@8 in the last quarter of the steps, rows at
    the end."""
    if not any("needs" in steps[-1] for trial in results.trials.values() for steps in trial.steps.values()):
        return
    book.write("## Rows that a node could not do")
    rows = [
        (results.label(cell), node, *_figures(results, cell, node))
        for cell in results.cells
        for node in results.nodes(cell)
    ]
    book.table(["cell", "node", *_LATE.values(), *_LAST.values()], rows)
    book.write(
        "Shares of own groups are of the last quarter of the steps; pass@8 is estimated from each group's samples, on "
        "the rows that it drew for training. Rows are counts at the end, of those that are not forgotten."
    )


def _figures(results: Results, cell: str, node: str) -> Sequence[str]:
    trials = [trial for trial in results.of(cell).values() if node in trial.steps]
    late = [[trial.late(node, what) for trial in trials] for what in _LATE]
    needs = [trial.steps[node][-1].get("needs", {}) for trial in trials]
    last = [[rows[what] for rows in needs if rows] for what in _LAST]
    return [_mean(values, "{:.3f}") for values in late] + [_mean(values, "{:.1f}") for values in last]


def _mean(values: Sequence[float], form: str) -> str:
    known = [value for value in values if not math.isnan(value)]
    return form.format(mean_interval(known).mean) if known else NONE
