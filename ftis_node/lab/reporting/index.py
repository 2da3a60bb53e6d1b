"""The table of all claims: `python -m ftis_node.lab.reporting.index DIR` rewrites it in DIR/README.md.

DIR holds a report's folder for each experiment. The table stands between two marks; what is around them is a person's.
DIR/sizes.png shows what sharing brings to models of several sizes, by the claims on a node that `SIZES` names.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ftis_node.errors import UsageError
from ftis_node.host.files import replace_text
from ftis_node.lab.events import HELD_OUT
from ftis_node.lab.loading import find_experiment, load_experiment
from ftis_node.lab.recipes import LARGER, RECIPES, Recipe
from ftis_node.lab.reporting import figures
from ftis_node.lab.reporting.figures import Point
from ftis_node.lab.reporting.page import limits, pairs, signed, tallied
from ftis_node.lab.reporting.statistics import Interval

Compared: TypeAlias = tuple[str, str, str, str]
"""Report, cell, the cell it is compared with, and what its partner differs in."""

_PAIRS = ("size", "style", "expertise", "tokenizer")
SIZES: dict[str, list[Compared]] = {
    "F-TIS above not sharing": [
        ("objectives", "ftis", "unshared", "size"),
        ("confirmation", "style ftis", "style unshared", "style"),
        ("expertise", "ftis", "unshared", "expertise"),
        ("tokenizers", "mixed-ftis", "unshared", "tokenizer"),
        *(("larger", f"{pair} ftis", "unshared", pair) for pair in _PAIRS),
    ],
    "F-TIS above as many groups alone": [
        ("objectives", "ftis", "alone", "size"),
        ("expertise", "ftis", "alone", "expertise"),
        *(("larger", f"{pair} ftis", "twice", pair) for pair in _PAIRS),
    ],
    "NoIS above as many groups alone": [
        ("objectives", "nois", "alone", "size"),
        *(("larger", f"{pair} nois", "twice", pair) for pair in _PAIRS),
    ],
}
BEGIN = "<!-- claims: written by `make evidence` -->"
END = "<!-- end of the claims -->"


def write_index(directory: Path) -> Path:
    """Puts the verdicts of every report under `directory` into its README.md.

    Raises:
        UsageError: the README.md is not there, or has no place for them.
    """
    page = directory / "README.md"
    try:
        before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    except OSError as error:
        raise UsageError(f"{page} cannot be read: {error.strerror}.", "Name the folder of the reports.") from None
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise UsageError(f"{page} has no place for the claims.", f"Write {BEGIN} and {END} where they belong.")
    reports = {path.parent.name: json.loads(path.read_text()) for path in sorted(directory.glob("*/summary.json"))}
    replace_text(page, f"{before}{BEGIN}\n\n{_tables(reports)}\n{END}{after}")
    parts = {title: _differences(reports, shown) for title, shown in SIZES.items()}
    if any(parts.values()):
        figures.save(figures.differences(parts, x="million parameters"), directory / "sizes.png")
    return page


def _differences(reports: Mapping[str, Mapping[str, Any]], shown: Sequence[Compared]) -> list[Point]:
    """Of each node: what its partner differs in, its million parameters without embeddings, and the difference."""
    found = []
    for name, a, b, pair in shown:
        if name not in reports:
            continue
        warm_ups = {node.name: node.warm for node in load_experiment(find_experiment(name)).nodes}
        for claim in reports[name]["claims"]:
            difference = claim["difference"]
            warm_up = warm_ups.get(claim["node"])
            if (claim["a"], claim["b"], claim["set"]) != (a, b, HELD_OUT) or difference["mean"] is None:
                continue
            if warm_up is not None:
                recipe = next(recipe for recipe in (*RECIPES, *LARGER) if recipe.name == warm_up.recipe)
                found.append(Point(pair, _millions(recipe), Interval(**difference)))
    return sorted(found, key=lambda point: point.x)


def _millions(recipe: Recipe) -> float:
    """Parameters of a model's layers, in millions."""
    return recipe.layers * 3 * (recipe.width**2 + recipe.width * recipe.mlp) / 1e6


def _tables(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each claim of the paper, and for each report's own claims their number by verdict."""
    every = [(name, claim) for name, report in reports.items() for claim in report["claims"]]
    hours = sum(report["cpu_hours"] for report in reports.values())
    lines = [
        f"{count} claims: {told}; {hours:.0f} hours of a core.\n"
        for _, count, told in tallied(("", claim["verdict"]) for _, claim in every)
    ]
    paper = [(name, claim) for name, claim in every if claim["source"] == "paper"]
    if paper:
        lines += ["**Claims of the paper**", "", "| claim | verdict | difference [95 %] | seeds | report |"]
        lines += ["|---|---|---|---|---|", *(_line(name, claim) for name, claim in paper), ""]
    ours = [(name, claim["verdict"]) for name, claim in every if claim["source"] == "ours"]
    if ours:
        lines += ["**Claims of ours**", "", "| report | claims | verdicts |", "|---|---|---|"]
        lines += [f"| [{name}]({name}/report.md) | {count} | {told} |" for name, count, told in tallied(ours)]
        lines.append("")
    return "\n".join(lines)


def _line(name: str, claim: Mapping[str, Any]) -> str:
    difference = claim["difference"]
    collapsed = claim.get("collapsed", 0)
    told = "not tested: not every seed got there"
    if collapsed:
        told = "every pair has a collapse"
    seeds = "–"
    if difference is not None:
        seeds = pairs(difference["n"], collapsed)
        if difference["mean"] is not None:
            told = f"{signed(difference['mean'])} {limits(difference['low'], difference['high'])}"
    return f"| {claim['text']} | {claim['verdict']} | {told} | {seeds} | [{name}]({name}/report.md) |"


if __name__ == "__main__":
    print(write_index(Path(sys.argv[1])))
