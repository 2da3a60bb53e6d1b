"""The report's sections on what training reached: curves and final values."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from ftis_node.lab.events import HELD_OUT
from ftis_node.lab.reporting import figures
from ftis_node.lab.reporting import page as say
from ftis_node.lab.reporting.figures import Line, Row
from ftis_node.lab.reporting.page import ReportPage
from ftis_node.lab.reporting.results import Results
from ftis_node.lab.reporting.statistics import Interval, bands, collapse_share

_Row: TypeAlias = dict[str, Any]
"""A line of `final_values`."""


def curves(results: Results, page: ReportPage) -> None:
    """Section: pass@1 over steps; nothing where the report has its pictures already."""
    if page.full:
        return
    page.write("## Validation curves")
    picture = figures.panels(_panels(results), x="step of the node")
    caption = "Greedy pass@1 on held-out prompts, mean over seeds; bands: 95 % of the mean, at each step by itself."
    page.picture("validation", picture, caption)


def _each_final(results: Results) -> Iterator[tuple[str, str, str, dict[int, float]]]:
    """(set, node, cell, seed → final value), without those that have none."""
    places = itertools.product(results.sets(), results.nodes(), results.cells)
    for on, node, cell in places:
        values = results.values(cell, node, on=on)
        if values:
            yield on, node, cell, values


def final_values(results: Results) -> list[_Row]:
    """Per cell, node and set: start (mean at step 0); mean, limits and n of the final values that are not of collapsed
    seeds; how many collapsed, to which mean, and the limits of their share. nan for none."""
    rows = []
    for on, node, cell, values in _each_final(results):
        starts = [trial.start(node, on) for trial in results.of(cell).values()]
        known = [start for start in starts if start is not None]
        settled = results.settled(cell, node, on)
        fallen = sorted(results.collapsed(cell, node, on))
        collapsed = [values[seed] for seed in fallen]
        share = collapse_share(len(collapsed), len(values))
        row = {
            "set": on,
            "node": node,
            "cell": cell,
            "start": _mean(known),
            **asdict(settled),
            "collapsed": len(collapsed),
            "collapsed_mean": _mean(collapsed),
            "share_low": share.low,
            "share_high": share.high,
        }
        rows.append(row)
    return rows


def write_final_values(results: Results, page: ReportPage, *, drawn: bool) -> None:
    """Section: the final values, with a picture for each set if `drawn`; and `seeds.csv`, each seed's value."""
    tail = results.manifest.tail
    rows = final_values(results)
    counts = [_seeds(row) for row in rows]
    most = max(counts, default=1)
    collapsed = sum(row["collapsed"] for row in rows)
    unseen = 100 * collapse_share(0, most).high
    page.write(
        "## Final pass@1",
        f"A seed's value is the mean of its last {tail} evaluations after step 0 (fewer where there are fewer). "
        "A seed has *collapsed* if it ends below half of its own start and 0.1 under it. In brackets the 95 % interval "
        "of the mean over the others (the wider of Student's and the studentised bootstrap's), and of the share of the "
        f"collapsed (Clopper and Pearson). {collapsed} of {sum(counts)} values "
        f"are of collapsed seeds; where none of {most} did, up to {unseen:.0f} % may.",
    )
    every = []
    for on, node, cell, values in _each_final(results):
        for seed, value in values.items():
            every.append((on, node, cell, seed, f"{value:.6g}"))
    page.csv("seeds", ("set", "node", "cell", "seed", "final"), every)
    for on in results.sets():
        here = {(row["node"], row["cell"]): row for row in rows if row["set"] == on}
        if not here:
            continue
        with_values = {node for node, _ in here}
        nodes = [node for node in results.nodes() if node in with_values]
        page.write(f"On {on}:")
        _table(results, page, nodes, here)
        if not drawn:
            continue
        parts = {}
        for node in nodes:
            parts[results.node_label(node)] = _drawn_rows(results, node, on)
        picture = figures.dots(parts, x="pass@1")
        caption = f"Final pass@1 on {on}: a dot a seed, a diamond the mean of those that held, a bar its 95 % interval."
        file = on.replace(" ", "-")
        page.picture(f"final-{file}", picture, caption)


def _table(
    results: Results,
    page: ReportPage,
    nodes: Sequence[str],
    here: Mapping[tuple[str, str], _Row],
) -> None:
    """Final values of one set: a line a cell, a column a node. here: the rows of `final_values` by node and cell."""
    lines = []
    for cell in results.cells:
        texts = []
        seeds = 0
        for node in nodes:
            row = here.get((node, cell))
            if row is None:
                texts.append(say.NONE)
            else:
                texts.append(_final_text(row))
                seeds = max(seeds, _seeds(row))
        if seeds:
            lines.append([results.label(cell), *texts, str(seeds)])
    columns = [f"{node}: start → final" for node in nodes]
    page.table(["cell", *columns, "seeds"], lines)


def _mean(values: Sequence[float]) -> float:
    """nan for none."""
    if not values:
        return math.nan
    return statistics.fmean(values)


def _panels(results: Results) -> dict[str, list[Line]]:
    """Title → lines: a panel a node, or one for each group of its cells."""
    parts = defaultdict[str, list[Line]](list)
    for node, cell in itertools.product(results.nodes(), results.cells):
        steps, means = _curve(results, cell, node)
        if not steps:
            continue
        group, label, look = results.drawn(cell)
        title = results.node_label(node)
        if group:
            title += f", {group}"
        parts[title].append(Line(label, steps, means, look))
    return parts


def _curve(results: Results, cell: str, node: str) -> tuple[list[int], list[Interval]]:
    """Steps that every finished seed of the cell evaluated, so that no mean changes its seeds on the way, and pass@1
    there."""
    by_seed = []
    for trial in results.of(cell).values():
        evaluations = trial.evaluations.get((node, HELD_OUT))
        if evaluations:
            by_seed.append({evaluation["step"]: evaluation["pass_at_1"] for evaluation in evaluations})
    if not by_seed:
        return [], []
    steps = sorted(set.intersection(*map(set, by_seed)))
    curves = [[curve[step] for step in steps] for curve in by_seed]
    return steps, bands(curves)


def _final_text(row: _Row) -> str:
    """Start, mean and interval of a node in a cell, and what collapsed."""
    settled = say.NONE
    if row["n"]:
        settled = say.level(Interval(row["mean"], row["low"], row["high"], row["n"]))
    told = f"{say.number(row['start'])} → {settled}"
    if not row["collapsed"]:
        return told
    share = f"share [{say.number(row['share_low'])}, {say.number(row['share_high'])}]"
    return f"{told}; {row['collapsed']} collapsed to {say.number(row['collapsed_mean'])}, {share}"


def _seeds(row: _Row) -> int:
    """All seeds that have a final value, collapsed or not."""
    return int(row["n"]) + int(row["collapsed"])


def _drawn_rows(results: Results, node: str, on: str) -> list[Row]:
    """What is drawn of a node: a line for each cell that it has values of."""
    rows = []
    for cell in results.cells:
        values = results.values(cell, node, on=on)
        if values:
            _, _, look = results.drawn(cell)
            settled = results.settled(cell, node, on)
            rows.append(Row(results.label(cell), list(values.values()), settled, look))
    return rows
