"""The report's section on a number that cells vary, such as a threshold or the count of nodes."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftis_node.lab.reporting import book as say
from ftis_node.lab.reporting import figures
from ftis_node.lab.reporting.book import Book
from ftis_node.lab.reporting.figures import Swept
from ftis_node.lab.reporting.results import Results


@dataclass(frozen=True, slots=True)
class Sweep:
    """Cells that differ in one number: group label → (value, cell), ascending."""

    key: str
    log: bool
    groups: dict[str, list[tuple[float, str]]]


def sweeps(results: Results) -> list[Sweep]:
    """The numbers of which cells that are equal otherwise have 3 values or more; 2 for nodes and `own_share`.

    Cells are equal otherwise if their values, collaboration, pace and number of nodes are. Where two of them then have
    the same number, the first words of their names tell them apart (what `vary` made are "name key=value").
    """
    facts = {}
    for name in results.cells:
        cell = results.cell(name)
        where = {"collaboration": cell.collaboration, "pace": cell.pace}
        facts[name] = {**where, "nodes": len(results.nodes(name)), **cell.values}
    found = []
    for key in dict.fromkeys(key for known in facts.values() for key in known):
        linear = key in ("nodes", "own_share")
        kept = {
            group: sorted(cells)
            for group, cells in _groups(facts, key).items()
            if len({value for value, _ in cells}) >= (2 if linear else 3)
        }
        if kept:
            found.append(Sweep(key, not linear, _short_labels(kept)))
    return found


def _groups(facts: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, list[tuple[float, str]]]:
    """Everything else that a cell says, as JSON → (value of `key`, cell)."""
    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, known in facts.items():
        value = _number(known.get(key, ""))
        if value is not None:
            apart = {other: said for other, said in known.items() if other != key}
            groups[json.dumps(apart, sort_keys=True, default=str)].append((value, name))
    for group, cells in list(groups.items()):
        if len({value for value, _ in cells}) < len(cells):
            del groups[group]
            for value, name in cells:
                stem = " ".join(word for word in name.split() if "=" not in word)
                groups[json.dumps({**json.loads(group), "cell": stem}, sort_keys=True)].append((value, name))
    return groups


def swept(results: Results, book: Book) -> None:
    """Section: the final value against a number that cells vary."""
    base = results.cells[0]
    for one in sweeps(results):
        parts: dict[str, list[Swept]] = {}
        level = {}
        for node in results.nodes():
            lines = _lines(results, one, node)
            if max((len(points) for _, points in lines), default=0) < 2:
                continue  # a node that only one value knows says nothing of the value
            named = results.node_label(node)
            parts[named] = lines
            outside = all(base != cell for cells in one.groups.values() for _, cell in cells)
            values = results.values(base, node)
            if outside and values:
                level[named] = statistics.fmean(values.values())
        if parts:
            book.write(f"## Final pass@1 against {one.key}")
            figure = figures.sweep(parts, x=one.key, log=one.log, level=level, named=results.label(base))
            caption = "Final pass@1 on held-out prompts, mean over seeds that did not collapse with its 95 % interval."
            caption += " ∞: no threshold." if one.key == "threshold" else ""
            book.picture(f"sweep-{say.file_name(one.key)}", figure, caption)


def _lines(results: Results, sweep: Sweep, node: str) -> list[Swept]:
    """Group label and (value, cell, interval of the final value) of the node, without groups that lack it."""
    lines: list[Swept] = []
    for label, cells in sweep.groups.items():
        points = []
        for value, cell in cells:
            around = results.settled(cell, node)
            if around.n:
                points.append((value, cell, around))
        if points:
            lines.append((label, points))
    return lines


def _number(value: Any) -> float | None:
    """A number, or what stands for no limit, as inf; None for what is no number."""
    if value is None or value in ("none", "inf"):
        return math.inf
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def _short_labels(groups: dict[str, list[tuple[float, str]]]) -> dict[str, list[tuple[float, str]]]:
    """Names each group by those of its other facts in which the groups differ."""
    facts = {group: json.loads(group) for group in groups}
    keys = dict.fromkeys(key for known in facts.values() for key in known)
    varied = [key for key in keys if len({json.dumps(known.get(key)) for known in facts.values()}) > 1]
    named = {g: ", ".join(f"{key} {known[key]}" for key in varied if key in known) for g, known in facts.items()}
    return {named[group]: cells for group, cells in groups.items()}
