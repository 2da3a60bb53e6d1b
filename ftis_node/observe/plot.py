"""Curves as a picture."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    for label, points in curves.items():
        if points:
            seconds, rates = zip(*points, strict=True)
            axes.plot(seconds, rates, label=f"{label}  {rates[-1]:.2f}", linewidth=2, marker="o", markevery=[0])
    axes.legend(loc="lower right", frameon=False)
    axes.set(xlabel="seconds since the start", ylabel="greedy pass@1 on held-out prompts", ylim=(0, 1))
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
