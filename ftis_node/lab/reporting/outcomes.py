"""The report's sections on what training reached: curves, final values, differences, gains and costs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np

from ftis_node.lab.reporting import book as say
from ftis_node.lab.reporting import figures
from ftis_node.lab.reporting.book import Book
from ftis_node.lab.reporting.claims import LEVEL, least_p
from ftis_node.lab.reporting.figures import Line, Panel, Row
from ftis_node.lab.reporting.manifest import HELD_OUT
from ftis_node.lab.reporting.results import Measure, Results
from ftis_node.lab.reporting.statistics import (
    Interval,
    bands,
    holm,
    mean_interval,
    paired_difference,
    paired_permutation,
)

TIMES = 25  # points of a curve over time
MANY = 7  # lines, beyond which one panel is no picture any more
EQUAL = {
    "unshared": "as many own completions, and nothing shared",
    "alone": "as many completions trained on, all of them own",
}
UNEQUAL = "nothing shared; at a free pace nodes do not take equally many steps, so neither count is held equal"
COSTS: dict[Measure, str] = {
    "time": "simulated seconds",
    "cpu": "CPU seconds",
    "generated": "own completions",
    "trained": "samples trained on",
}


@dataclass(frozen=True, slots=True)
class Gain:
    """A node's gain against a baseline, p of the permutation test, and p after Holm's adjustment."""

    by: Interval
    p: float
    adjusted: float


def curves(results: Results, book: Book) -> None:
    """Section: pass@1 over steps; nothing where a small report has no room for its picture."""
    if book.full:
        return
    book.write("## Validation curves")
    look = figures.looks(results.cells)
    lines = {
        (node, cell): _curve(results, cell, node, look[cell]) for node in results.nodes() for cell in results.cells
    }
    parts = [
        Panel(
            results.node_label(node), [line for cell in results.cells if (line := lines[node, cell])], "pass@1", "pass"
        )
        for node in results.nodes()
    ]
    figure = figures.panels(parts, columns=min(2, len(parts)), x="step of the node", share=True, height=2.8)
    caption = "Greedy pass@1 on held-out prompts, mean over seeds; bands: 95 % of the mean, at each step by itself."
    book.picture("validation", figure, caption)
    for node in results.nodes() if len(results.cells) > MANY and not book.small else ():
        level = lines[node, results.cells[0]]
        grey = [replace(level, grey=True)] if level else []
        parts = [
            Panel(f"{node}: {results.label(cell)}", [*grey, line], "pass@1", "pass")
            for cell in results.cells
            if (line := lines[node, cell]) and line is not level
        ]
        if parts:
            figure = figures.panels(parts, columns=3, x="step of the node", share=True, height=1.7, legend=False)
            caption = f"Node {node}, each cell beside {results.label(results.cells[0])} (grey)."
            book.picture(f"validation-{say.file_name(node)}", figure, caption)
    if len({results.cell(cell).pace for cell in results.cells}) > 1:
        _over_time(results, book, look)
    header = ("cell", "node", "step", "mean", "low95", "high95")
    rows = [(cell, node, *point) for (node, cell), line in lines.items() if line for point in _points(line)]
    book.csv("curves", header, rows)


def _over_time(results: Results, book: Book, look: Mapping[str, int]) -> None:
    """pass@1 over simulated seconds, where cells differ in pace and the same step is not the same time."""
    parts = []
    for node in results.nodes():
        lines = []
        for cell in results.cells:
            trials = results.of(cell).values()
            seeds = [curve for trial in trials if (curve := trial.evaluations.get((node, HELD_OUT)))]
            if seeds:
                xs = np.linspace(0.0, min(curve[-1].time for curve in seeds), TIMES)
                found = [np.interp(xs, [e.time for e in curve], [e.pass_at_1 for e in curve]) for curve in seeds]
                ys = bands([list(values) for values in found])
                lines.append(figures.banded(results.label(cell), list(xs), ys, look[cell]))
        parts.append(Panel(results.node_label(node), lines, "pass@1", "pass"))
    figure = figures.panels(parts, columns=min(2, len(parts)), x="simulated seconds", share=True, height=2.8)
    caption = "The same over simulated time, on straight lines between evaluations, as far as every seed went."
    book.picture("validation-time", figure, caption)


def _finals(results: Results) -> Iterator[tuple[str, str, str, dict[int, float]]]:
    """(set, node, cell, seed → final value), without those that have none."""
    for on, node, cell in itertools.product(results.sets(), results.nodes(), results.cells):
        if values := results.values(cell, node, on=on):
            yield on, node, cell, values


def final_values(results: Results) -> list[dict[str, Any]]:
    """Per cell, node and set: start (mean at step 0), mean, limits and n of the final value; nan for none."""
    rows = []
    for on, node, cell, values in _finals(results):
        starts = [
            curve[0].pass_at_1
            for trial in results.of(cell).values()
            if (curve := trial.evaluations.get((node, on))) and curve[0].step == 0
        ]
        start = statistics.fmean(starts) if starts else math.nan
        facts = {"set": on, "node": node, "cell": cell, "start": start}
        rows.append({**facts, **asdict(mean_interval(list(values.values())))})
    return rows


def finals(results: Results, book: Book, *, drawn: bool = True) -> None:
    """Section: the final values, with a picture if `drawn`."""
    tail, rows = results.manifest.tail, final_values(results)
    book.write(
        "## Final pass@1",
        f"A seed's value is the mean of its last {tail} evaluations after step 0 (fewer where there are fewer). "
        "In brackets the 95 % interval of the mean over seeds (Student).",
    )
    book.csv("final", tuple(rows[0]) if rows else ("set",), [tuple(row.values()) for row in rows])
    every = ((*where, seed, value) for *where, values in _finals(results) for seed, value in values.items())
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
                table.append([results.label(cell), *texts, str(max(row["n"] for row in found if row))])
        book.table(["cell", *(f"{node}: start → final" for node in nodes), "seeds"], table)
        if not drawn:
            continue
        parts = {results.node_label(node): _final_rows(results, node, on) for node in nodes}
        caption = f"Final pass@1 on {on}: a dot a seed, a diamond the mean, a bar its 95 % interval."
        book.picture(f"final-{say.file_name(on)}", figures.dots(parts, x="pass@1"), caption)


def differences(results: Results, book: Book) -> None:
    """Section: every cell minus the first, pair by pair."""
    base = results.cells[0]
    compared = [
        (on, node, cell, found)
        for on, node, cell in itertools.product(results.sets(), results.nodes(), results.cells[1:])
        if (found := _paired(results, cell, base, node, on)) is not None
    ]
    book.write(
        f"## Differences to {results.label(base)}",
        "Paired by seed: mean of cell − baseline with its 95 % interval, and p of the permutation test. These describe "
        "and are not adjusted for their number; what is claimed is tested in the first table.",
    )
    book.csv(
        "differences",
        ("set", "node", "cell", "baseline", "mean", "low95", "high95", "n", "p"),
        [(on, node, cell, base, *astuple(interval), p) for on, node, cell, (interval, p) in compared],
    )
    if not compared:
        book.write("There is nothing to compare.")
        return
    book.table(
        ["set", "node", "cell", "difference [95 %]", "n", "p"],
        [
            (on, node, results.label(cell), say.difference(interval), str(interval.n), say.probability(p))
            for on, node, cell, (interval, p) in compared
        ],
    )


def gains(results: Results, book: Book) -> None:
    """Section: who gains and who loses by sharing; nothing if no cell is named `unshared` or `alone`."""
    baselines = [name for name in EQUAL if name in results.cells]
    others = [cell for cell in results.cells if cell not in EQUAL]
    if not baselines or not others:
        return
    steady = all(results.cell(cell).pace == "lockstep" for cell in results.cells)
    book.write(
        "## Who gains by sharing",
        *(f"Against {results.label(base)}: {EQUAL[base] if steady else UNEQUAL}." for base in baselines),
        "Paired by seed, with the 95 % interval; p of the permutation test, and after Holm's adjustment for the cells "
        "that one node is compared with one baseline in.",
    )
    _strength(results, book)
    rows: list[tuple[Any, ...]] = []
    for on in results.sets():
        found = {
            (base, node): gained
            for base, node in itertools.product(baselines, results.nodes())
            if (gained := _gained(results, base, node, on, others))
        }
        _gain_table(results, book, on, found)
        for (base, node), gained in found.items():
            if any(gain.by.n > 1 for gain in gained.values()):
                book.write(_gain_words(results, base, node, gained))
            rows += [(on, base, node, cell, *astuple(gain.by), gain.p, gain.adjusted) for cell, gain in gained.items()]
    header = ("set", "baseline", "node", "cell", "mean", "low95", "high95", "n", "p", "p_holm")
    book.csv("gains", header, rows)


def costs(results: Results, book: Book) -> None:
    """Section: what it cost to reach the target."""
    target = results.manifest.target
    book.write(
        f"## Cost of reaching pass@1 = {target:g}",
        "The first point at which the held-out curve, on straight lines between its evaluations, reaches the target: "
        "how many seeds did, the median of those, and the mean with its 95 % interval only where all did.",
    )
    table, rows = [], []
    for node, cell in itertools.product(results.nodes(), results.cells):
        found = {measure: list(results.values(cell, node, measure).values()) for measure in COSTS}
        if not found["time"]:
            continue
        reached = [value for value in found["time"] if math.isfinite(value)]
        texts = []
        for measure, values in found.items():
            median, mean = _cost(values)
            texts.append(_cost_text(median, mean))
            rows.append((node, cell, measure, len(values), len(reached), median, mean.mean, mean.low, mean.high))
        table.append((node, results.label(cell), f"{len(reached)} of {len(found['time'])}", *texts))
    header = ("node", "cell", "cost", "seeds", "reached", "median", "mean", "low95", "high95")
    book.csv("target", header, rows)
    book.table(["node", "cell", "reached", *COSTS.values()], table)


def _curve(results: Results, cell: str, node: str, look: int) -> Line | None:
    """At the steps that every finished seed of the cell evaluated, so that no mean changes its seeds on the way."""
    found = [trial.evaluations.get((node, HELD_OUT), []) for trial in results.of(cell).values()]
    by_step = [{e.step: e.pass_at_1 for e in curve} for curve in found if curve]
    steps = sorted(set.intersection(*(set(curve) for curve in by_step))) if by_step else []
    if not steps:
        return None
    around = bands([[curve[step] for step in steps] for curve in by_step])
    return figures.banded(results.label(cell), steps, around, look)


def _points(line: Line) -> Iterator[tuple[float, ...]]:
    return zip(line.x, line.y, line.low, line.high, strict=True)


def _final(row: dict[str, Any]) -> str:
    return f"{say.number(row['start'])} → {say.level(Interval(row['mean'], row['low'], row['high'], row['n']))}"


def _final_rows(results: Results, node: str, on: str) -> list[Row]:
    look = figures.looks(results.cells)
    seeds = {cell: list(results.values(cell, node, on=on).values()) for cell in results.cells}
    return [Row(results.label(cell), s, mean_interval(s), look[cell]) for cell, s in seeds.items() if s]


def _paired(results: Results, a: str, b: str, node: str, on: str) -> tuple[Interval, float] | None:
    """Difference and permutation p on the seeds that both have; None if there are none."""
    first, second = results.values(a, node, on=on), results.values(b, node, on=on)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    pair = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
    return paired_difference(*pair), paired_permutation(*pair)


def _strength(results: Results, book: Book) -> None:
    """The node that is stronger without sharing; the gains are read against it."""
    base = next(name for name in ("alone", "unshared") if name in results.cells)
    ends = {node: list(results.values(base, node).values()) for node in results.nodes(base)}
    told = [f"{node} at {say.number(statistics.fmean(values))}" for node, values in ends.items() if values]
    if told:
        book.write(f"By itself ({results.label(base)}, held-out) ends {say.sentence_list(told)}.")


def _gained(results: Results, base: str, node: str, on: str, cells: Sequence[str]) -> dict[str, Gain]:
    pairs = {cell: pair for cell in cells if (pair := _paired(results, cell, base, node, on)) is not None}
    adjusted = holm({cell: p for cell, (_, p) in pairs.items()}) if pairs else {}
    return {cell: Gain(by, p, adjusted[cell]) for cell, (by, p) in pairs.items()}


def _gain_table(results: Results, book: Book, on: str, found: Mapping[tuple[str, str], Mapping[str, Gain]]) -> None:
    if not found:
        return
    bases = list(dict.fromkeys(base for base, _ in found))
    rows = []
    for node, cell in dict.fromkeys((node, cell) for (_, node), gained in found.items() for cell in gained):
        row = [node, results.label(cell)]
        for base in bases:
            gain = found.get((base, node), {}).get(cell)
            texts = [say.difference(gain.by), f"{gain.by.n}"] if gain else [say.NONE] * 2
            row += [*texts, f"{say.probability(gain.p)}, {say.probability(gain.adjusted)}" if gain else say.NONE]
        rows.append(row)
    book.write(f"On {on}:")
    book.table(["node", "cell", *(h for b in bases for h in (f"− {results.label(b)} [95 %]", "n", "p, Holm"))], rows)


def _gain_words(results: Results, base: str, node: str, gained: Mapping[str, Gain]) -> str:
    """The nodes that gain, by the adjusted p; by unadjusted intervals, and said so, where no p can be small."""
    least = min(1.0, len(gained) * min(least_p(gain.by.n) for gain in gained.values()))
    blind = least >= LEVEL
    sure = {c: g.by for c, g in gained.items() if (g.by.low * g.by.high > 0 if blind else g.adjusted < LEVEL)}
    words = []
    for verb, better in (("gains", True), ("loses", False)):
        cells = [results.label(cell) for cell, by in sure.items() if (by.mean > 0) == better]
        if cells:
            words.append(f"{verb} with {say.sentence_list(cells)}")
    if len(sure) < len(gained):
        rest = say.sentence_list([results.label(cell) for cell in gained if cell not in sure])
        words.append(f"the seeds do not tell for {rest}")
    warning = f" (by unadjusted intervals: no adjusted p could be below {least:.2g} with so few seeds)" if blind else ""
    return f"**{node}** against {results.label(base)}{warning}: {'; '.join(words)}."


def _cost(values: Sequence[float]) -> tuple[float, Interval]:
    finite = [value for value in values if math.isfinite(value)]
    median = statistics.median(finite) if finite else math.nan
    whole = len(finite) == len(values)
    return median, mean_interval(finite) if whole else Interval(math.nan, math.nan, math.nan, len(finite))


def _cost_text(median: float, mean: Interval) -> str:
    if math.isnan(mean.low):
        return say.short(median)
    return f"{say.short(median)}; mean {say.short(mean.mean)} [{say.short(mean.low)}, {say.short(mean.high)}]"
