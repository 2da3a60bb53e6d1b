"""The report's sections on what training reached: curves and final values."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from ftis_node.lab.events import HELD_OUT, EvaluationEvent
from ftis_node.lab.reporting import book as say
from ftis_node.lab.reporting import figures
from ftis_node.lab.reporting.book import Book
from ftis_node.lab.reporting.figures import Line, Row
from ftis_node.lab.reporting.results import Results
from ftis_node.lab.reporting.statistics import Interval, bands, collapse_share

Curve: TypeAlias = tuple[Sequence[float], Sequence[Interval]]
"""The places of a line's points, and their means with intervals."""
TIMES = 25  # points of a curve over time


def curves(results: Results, book: Book) -> None:
    """Section: pass@1 over steps; nothing where the report has its pictures."""
    if book.full:
        return
    book.write("## Validation curves")
    parts = _panels(results, _curve)
    caption = "Greedy pass@1 on held-out prompts, mean over seeds; bands: 95 % of the mean, at each step by itself."
    book.picture("validation", figures.panels(parts, x="step of the node"), caption)
    if len({results.cell(cell).pace for cell in results.cells}) > 1:
        _over_time(results, book)


def _over_time(results: Results, book: Book) -> None:
    """pass@1 over simulated seconds, where cells differ in pace and the same step is not the same time."""
    parts = _panels(results, _timed)
    caption = "The same over simulated time, on straight lines between evaluations, as far as every seed went."
    book.picture("validation-time", figures.panels(parts, x="simulated seconds"), caption)


def _finals(results: Results) -> Iterator[tuple[str, str, str, dict[int, float]]]:
    """(set, node, cell, seed → final value), without those that have none."""
    for on, node, cell in itertools.product(results.sets(), results.nodes(), results.cells):
        values = results.values(cell, node, on=on)
        if values:
            yield on, node, cell, values


def final_values(results: Results) -> list[dict[str, Any]]:
    """Per cell, node and set: start (mean at step 0); mean, limits and n of the final values that are not of collapsed
    seeds; how many collapsed, to which mean, and the limits of their share. nan for none."""
    rows = []
    for on, node, cell, values in _finals(results):
        starts = [trial.start(node, on) for trial in results.of(cell).values()]
        start = _mean([start for start in starts if start is not None])
        ends = [values[seed] for seed in sorted(results.collapsed(cell, node, on))]
        share = collapse_share(len(ends), len(values))
        facts = {"set": on, "node": node, "cell": cell, "start": start, **asdict(results.settled(cell, node, on))}
        lost = {"collapsed": len(ends), "collapsed_mean": _mean(ends), "share_low": share.low, "share_high": share.high}
        rows.append({**facts, **lost})
    return rows


def _mean(values: Sequence[float]) -> float:
    """nan for none."""
    if not values:
        return math.nan
    return statistics.fmean(values)


def finals(results: Results, book: Book, *, drawn: bool = True) -> None:
    """Section: the final values, with a picture if `drawn`."""
    tail = results.manifest.tail
    rows = final_values(results)
    most = max(map(_seeds, rows), default=1)
    book.write(
        "## Final pass@1",
        f"A seed's value is the mean of its last {tail} evaluations after step 0 (fewer where there are fewer). "
        "A seed has *collapsed* if it ends below half of its own start and 0.1 under it. In brackets the 95 % interval "
        "of the mean over the others (the wider of Student's and the studentised bootstrap's), and of the share of the "
        f"collapsed (Clopper and Pearson). {sum(row['collapsed'] for row in rows)} of {sum(map(_seeds, rows))} values "
        f"are of collapsed seeds; where none of {most} did, up to {100 * collapse_share(0, most).high:.0f} % may.",
    )
    every = ((*where, seed, f"{value:.6g}") for *where, values in _finals(results) for seed, value in values.items())
    book.csv("seeds", ("set", "node", "cell", "seed", "final"), every)
    for on in results.sets():
        here = {(row["node"], row["cell"]): row for row in rows if row["set"] == on}
        nodes = [node for node in results.nodes() if any((node, cell) in here for cell in results.cells)]
        if not nodes:
            continue
        book.write(f"On {on}:")
        table = []
        for cell in results.cells:
            found = [here.get((node, cell)) for node in nodes]
            if any(found):
                texts = [_final(row) if row else say.NONE for row in found]
                table.append([results.label(cell), *texts, str(max(_seeds(row) for row in found if row))])
        book.table(["cell", *(f"{node}: start → final" for node in nodes), "seeds"], table)
        if not drawn:
            continue
        parts = {results.node_label(node): _final_rows(results, node, on) for node in nodes}
        caption = f"Final pass@1 on {on}: a dot a seed, a diamond the mean of those that held, a bar its 95 % interval."
        book.picture(f"final-{say.file_name(on)}", figures.dots(parts, x="pass@1"), caption)


def _panels(results: Results, curve: Callable[[Results, str, str], Curve | None]) -> dict[str, list[Line]]:
    """Title → lines: a panel a node, or one for each group of its cells."""
    parts = defaultdict[str, list[Line]](list)
    for node, cell in itertools.product(results.nodes(), results.cells):
        found = curve(results, cell, node)
        if found:
            group, label, look = results.drawn(cell)
            title = results.node_label(node)
            if group:
                title += f", {group}"
            parts[title].append(Line(label, *found, look))
    return parts


def _curve(results: Results, cell: str, node: str) -> Curve | None:
    """At the steps that every finished seed of the cell evaluated, so that no mean changes its seeds on the way."""
    by_step = [{e["step"]: e["pass_at_1"] for e in curve} for curve in _evaluated(results, cell, node)]
    steps = sorted(set.intersection(*(set(curve) for curve in by_step))) if by_step else []
    return (steps, bands([[curve[step] for step in steps] for curve in by_step])) if steps else None


def _timed(results: Results, cell: str, node: str) -> Curve | None:
    """On straight lines between evaluations, as far as every seed went."""
    seeds = _evaluated(results, cell, node)
    if not seeds:
        return None
    xs = np.linspace(0.0, min(curve[-1]["time"] for curve in seeds), TIMES)
    found = [np.interp(xs, [e["time"] for e in curve], [e["pass_at_1"] for e in curve]) for curve in seeds]
    return list(xs), bands([list(values) for values in found])


def _evaluated(results: Results, cell: str, node: str) -> list[list[EvaluationEvent]]:
    """The node's evaluations in each finished seed of the cell that has some."""
    curves = [trial.evaluations.get((node, HELD_OUT)) for trial in results.of(cell).values()]
    return [curve for curve in curves if curve]


def _final(row: dict[str, Any]) -> str:
    settled = say.NONE
    if row["n"]:
        settled = say.level(Interval(row["mean"], row["low"], row["high"], row["n"]))
    told = f"{say.number(row['start'])} → {settled}"
    if not row["collapsed"]:
        return told
    share = f"share [{say.number(row['share_low'])}, {say.number(row['share_high'])}]"
    return f"{told}; {row['collapsed']} collapsed to {say.number(row['collapsed_mean'])}, {share}"


def _seeds(row: dict[str, Any]) -> int:
    return int(row["n"]) + int(row["collapsed"])


def _final_rows(results: Results, node: str, on: str) -> list[Row]:
    rows = []
    for cell in results.cells:
        values = list(results.values(cell, node, on=on).values())
        if values:
            rows.append(Row(results.label(cell), values, results.settled(cell, node, on), results.drawn(cell)[2]))
    return rows
