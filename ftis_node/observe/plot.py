"""Curves as a picture."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftis_node.errors import UsageError
from ftis_node.installed import to_install

TO_DRAW = to_install("ftis-node[lab]")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_drawing() -> None:
    """Raises UsageError if pictures cannot be drawn; so that long work finds it out before."""
    if not can_draw():
        raise UsageError("Pictures need matplotlib, which is not installed.", f"Run: {TO_DRAW}")


def plot_pass_at_1(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str) -> None:
    """Draw pass@1 against seconds, one line a node, as a PNG. Raises OSError if `path` cannot be written.

    Args:
        curves: label → (seconds, pass@1) in order.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150)
    ends: list[tuple[float, str, Any]] = []
    for label, points in curves.items():
        if points:
            (line,) = axes.plot([t for t, _ in points], [p for _, p in points], linewidth=2)
            axes.plot(points[0][0], points[0][1], "o", color=line.get_color(), markersize=4)
            ends.append((points[-1][1], label, line))
    _label_ends(axes, ends)
    axes.set(xlabel="seconds since the start", ylabel="greedy pass@1 on held-out prompts", ylim=(0, 1))
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _label_ends(axes: Any, ends: list[tuple[float, str, Any]]) -> None:
    """Each line's label at its right end, pushed apart where they would overlap."""
    place = 1.04
    for height, label, line in sorted(ends, key=lambda end: end[0], reverse=True):
        place = min(height, place - 0.06)
        axes.annotate(
            f"{label}  {height:.2f}",
            xy=(line.get_xdata()[-1], height),
            xytext=(1.01, place),
            textcoords=("axes fraction", "data"),
            color=line.get_color(),
            va="center",
            annotation_clip=False,
        )
