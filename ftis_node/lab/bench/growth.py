"""How the cost of a whole step grows with its work, and with the number of peers that it takes groups from."""

import asyncio
import contextlib
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftis_node.lab.bench.measure import Tell, cpu_seconds, held, peak_memory
from ftis_node.lab.bench.model import Size, small_config
from ftis_node.lab.bench.whole import WholeNode
from ftis_node.lab.reporting.figures import PALETTE, WIDTH, drawn, save

BASE = Size(groups=4, group=8, prompt_tokens=40, completion_tokens=32)
GROWING: Mapping[str, tuple[str, Sequence[int]]] = {
    "groups": ("groups in a step", (2, 4, 8, 16)),
    "group": ("completions in a group", (4, 8, 16, 32)),
    "completion_tokens": ("tokens of a completion", (16, 32, 64, 128)),
    "peers": ("peers, at the same batch", (1, 4, 16, 64)),
}
PARTS = ("total", "generate", "train", "rest")


Point = dict[str, float]
"""A step of one size, `value`: CPU-seconds of all and of each part, and the most that tensors took, in 10⁶ bytes."""


def bench_growth(*, repeats: int, plot: Path | None, tell: Tell) -> dict[str, Any]:
    """Steps of `BASE` with one thing growing at a time, all of a random Qwen2 of 1,050,752 parameters.

    Args:
        repeats: steps, of which the medians are told; one before them is not timed.
        plot: where a picture is written, as PNG.

    Returns:
        By what grows: its points, and of each figure the exponent between the last two, 1 where its cost is linear.
        `peers`: the batch stays the same, a quarter of it the node's own; they hold ready-made packets in memory, so of
        a network's cost it shows hearing, choosing and admitting alone.
    """
    found: dict[str, list[Point]] = {}
    for what, (name, values) in GROWING.items():
        found[what] = []
        for value in values:
            tell(f"{name}: {value}")
            found[what].append(_point(what, value, repeats))
    if plot is not None:
        save(_picture(found), plot)
    grown = {what: {"points": points, "exponent": _exponents(points)} for what, points in found.items()}
    return {**grown, "base": BASE.as_dict(), "repeats": repeats}


def _point(what: str, value: int, repeats: int) -> Point:
    size = BASE if what == "peers" else replace(BASE, **{what: value})
    peers = value if what == "peers" else 0
    devices: list[Mapping[str, float]] = []
    totals: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(WholeNode(small_config(), size, Path(folder), peers=peers)) as node,
    ):
        for _ in range(1 + repeats):
            node.prepare()
            totals.append(cpu_seconds(lambda: devices.append(asyncio.run(node.step())["device"])))
        node.prepare()
        peak = peak_memory(lambda: asyncio.run(node.step()), held(node.engine.learner)) / 1e6
    total = statistics.median(totals[1:])
    generate, train = (statistics.median(d[f"cpu_{part}"] for d in devices[1:]) for part in ("generate", "train"))
    spent = (total, generate, train, max(0.0, total - generate - train))
    return {"value": value, **dict(zip(PARTS, spent, strict=True)), "peak_memory_mb": peak}


def _exponents(points: Sequence[Point]) -> dict[str, float | None]:
    """The growth of each figure between its last two points; None where it is 0."""
    before, last = points[-2:]
    grown = math.log(last["value"] / before["value"])
    pairs = {name: (before[name], last[name]) for name in (*PARTS, "peak_memory_mb")}
    return {name: math.log(b / a) / grown if a > 0 and b > 0 else None for name, (a, b) in pairs.items()}


@drawn
def _picture(found: Mapping[str, Sequence[Point]]) -> Any:
    """CPU time above, memory below, a column each for what grows; both axes logarithmic, with a line of slope 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplots(2, len(found), sharey="row")
    for column, (what, points) in enumerate(found.items()):
        xs = [point["value"] for point in points]
        for number, part in enumerate(PARTS):
            ys = [point[part] for point in points]
            axes[0, column].plot(xs, ys, marker="o", markersize=3, color=PALETTE[number], label=part)
        peaks = [point["peak_memory_mb"] for point in points]
        axes[1, column].plot(xs, peaks, marker="o", markersize=3, color=PALETTE[0])
        for row, last in ((0, points[-1]["total"]), (1, peaks[-1])):
            slope = [last * x / xs[-1] for x in xs]
            label = "linear" if row == 0 else None
            axes[row, column].plot(xs, slope, linestyle=":", linewidth=1, color="#777777", label=label)
            axes[row, column].set_xscale("log", base=2)
            axes[row, column].set_xticks(xs, [str(x) for x in xs])
            axes[row, column].set_yscale("log")
        axes[1, column].set_xlabel(GROWING[what][0])
    axes[0, 0].set_ylabel("CPU-seconds a step")
    axes[1, 0].set_ylabel("tensors at their peak, MB")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(PARTS) + 1)
    return figure
