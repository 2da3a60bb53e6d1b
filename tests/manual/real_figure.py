"""The figure of real models at the top of the evidence: `make real-figure` draws docs/evidence/real.png.

It reads the trials that are kept beside the reports: pass@1 of held-out questions against steps, a panel a node, a
colour an arm; seeds are thin lines, their means thick ones. An arm whose seeds are not those of its panel's first arm
is left out.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis_node.lab.loading import find_experiment, load_experiment
from ftis_node.lab.reporting.figures import PALETTE, WIDTH, drawn, save
from ftis_node.lab.spec import trial_of
from ftis_node.text import counted

DOCS = Path("docs/evidence")
OUT = DOCS / "real.png"
PANELS = (  # experiment, node, title
    ("real/parameters", "A", "A: in full, beside its LoRA twin"),
    ("real/parameters", "L", "L: with LoRA, beside its full twin"),
    ("real/peer", "A", "A: fences, beside a 1.5B"),
    ("real/pairs", "A", "A: 0.5B, LoRA"),
    ("real/pairs", "B", "B: 1.5B, LoRA"),
    ("real/pairs", "G", "G: Gemma 270M, LoRA"),
)
ACROSS = 3
COLOURS = {
    "ftis": PALETTE[5],
    "gated": PALETTE[3],
    "f-nois": PALETTE[2],
    "sgt": PALETTE[6],
    "twice": PALETTE[1],
    "alone": PALETTE[1],
    "size": PALETTE[5],
    "text": PALETTE[3],
    "alone-A": PALETTE[1],
    "alone-B": PALETTE[1],
    "alone-G": PALETTE[1],
    "unshared-A": PALETTE[0],
    "unshared-G": PALETTE[0],
    "unshared": PALETTE[0],
}


@dataclass(frozen=True)
class Curve:
    """One seed of an arm: pass@1 by step."""

    cell: str
    label: str
    seed: int
    at: dict[int, float]


def curves(name: str, node: str) -> Iterator[Curve]:
    """Those of an experiment's trials that are kept and came to their end, of one node, in the cells' order."""
    experiment = load_experiment(find_experiment(name))
    folder = DOCS / name.replace("/", "-") / "trials"
    for cell in experiment.all_cells():
        for seed in experiment.seeds:
            log = folder / trial_of(experiment, cell, seed).id / "events.jsonl"
            if not log.exists():
                continue
            events = list(map(json.loads, log.read_text().splitlines()))
            if events[-1]["event"] != "end":
                continue
            at = {}
            for event in events:
                if event["event"] == "evaluation" and event["node"] == node and event["set"] == "held-out":
                    at[event["step"]] = event["pass_at_1"]
            if at:
                yield Curve(cell.name, cell.label, seed, at)


def draw(axes: Any, name: str, node: str, title: str) -> dict[str, Any]:
    """One panel. Returns the thick lines by their labels."""
    of_cells = defaultdict(list)
    for curve in curves(name, node):
        of_cells[curve.cell].append(curve)
    first_arm = next(iter(of_cells.values()))
    seeds = {curve.seed for curve in first_arm}
    drawn_lines = {}
    for cell, some in of_cells.items():
        if {curve.seed for curve in some} != seeds:
            continue
        for curve in some:
            axes.plot(list(curve.at), list(curve.at.values()), color=COLOURS[cell], linewidth=0.7, alpha=0.5)
        steps = list(some[0].at)
        means = [sum(curve.at[step] for curve in some) / len(some) for step in steps]
        (line,) = axes.plot(steps, means, color=COLOURS[cell], linewidth=2.0, marker="o", markersize=3)
        drawn_lines[some[0].label] = line
    axes.set_title(f"{title}, {counted(len(seeds), 'seed')}", fontsize=8)
    axes.set_xlabel("steps")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, 1)
    return drawn_lines


@drawn
def main():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    grid = figure.subplots(len(PANELS) // ACROSS, ACROSS, sharey=True)
    of_labels = {}
    for axes, (name, node, title) in zip(grid.flat, PANELS, strict=True):
        of_labels |= draw(axes, name, node, title)
    for axes in grid[:, 0]:
        axes.set_ylabel("pass@1")
    figure.legend(of_labels.values(), of_labels, loc="outside lower center", ncols=5, fontsize=8)
    save(figure, OUT)
    print(OUT)


if __name__ == "__main__":
    main()
