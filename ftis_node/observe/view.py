"""The terminal view of several nodes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_SPARKS = "▁▂▃▄▅▆▇█"


def nodes_view(statuses: Sequence[dict[str, Any]], curves: Sequence[Sequence[float]], headline: str) -> RenderableType:
    """A table with one row a node.

    Args:
        statuses: what each node's API answered; only ``name``, ``model`` and ``state`` must be there.
        curves: each node's pass@1 so far, drawn as a spark line.
        headline: a line above the table.
    """
    table = Table(expand=False, pad_edge=False, header_style="bold")
    for column in ("node", "model", "state"):
        table.add_column(column)
    for column in ("step", "pass@1", "start", "own", "foreign", "weight", "filtered", "MB in", "MB out"):
        table.add_column(column, justify="right")
    table.add_column("pass@1 so far")
    for status, curve in zip(statuses, curves, strict=True):
        table.add_row(*(Text(cell) for cell in _row(status)), Text(sparkline(curve), style="green"))
    return Group(Text(headline), table)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Values from 0 to 1 as bars, the latest `width` of them."""
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[min(top, max(0, round(value * top)))] for value in values[-width:])


def _row(status: dict[str, Any]) -> list[str]:
    foreign = sum(status.get("foreign_groups_used", {}).values())
    return [
        status["name"],
        f"{status['model']} {status.get('kind', '')}",
        status["state"].lower(),
        _number(status.get("step"), "d"),
        _number(status.get("pass_at_1"), ".2f"),
        _number(status.get("pass_at_1_before"), ".2f"),
        _number(status.get("own_groups_used"), "d"),
        str(foreign) if "step" in status else "–",
        _number(status.get("foreign_weight_share"), ".0%"),
        _number(status.get("filtered_fraction"), ".0%"),
        _number(status.get("bytes_in"), ".2f", 1e-6),
        _number(status.get("bytes_out"), ".2f", 1e-6),
    ]


def _number(value: Any, form: str, scale: float = 1.0) -> str:
    if value is None:
        return "–"
    return format(value if form == "d" else value * scale, form)
