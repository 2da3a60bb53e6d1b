"""The terminal view of several nodes at once."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from ftis_node.observe.answers import Status
from ftis_node.observe.terminal import words
from ftis_node.text import number

_SPARKS = "▁▂▃▄▅▆▇█"


def nodes_view(statuses: Sequence[Status], curves: Sequence[Sequence[float]], headline: str) -> RenderableType:
    """A table with one row a node and its curve below; fits 80 columns.

    Args:
        statuses: what each node's API answered.
        curves: each node's pass@1 so far, drawn as a spark line.
        headline: a line above the table.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in ("node", "model", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("step", "pass@1", "own", "others'", "loss share", "MB in", "out"):
        table.add_column(column, justify="right", no_wrap=True)
    for status in statuses:
        table.add_row(*(words(cell) for cell in _row(status)))
    sparks = [
        words(f"{status.name:5}") + words(sparkline(curve), "green")
        for status, curve in zip(statuses, curves, strict=True)
    ]
    return Group(words(headline), table, *sparks)


def sparkline(values: Sequence[float], width: int = 70) -> str:
    """Values from 0 to 1 as bars, the latest `width` of them."""
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[min(top, max(0, round(value * top)))] for value in values[-width:])


def _row(status: Status) -> list[str]:
    before, now = number(status.pass_at_1_before, ".2f"), number(status.pass_at_1, ".2f")
    return [
        f"{status.name} {status.kind or ''}",
        status.model,
        status.state.lower(),
        number(status.step, "d"),
        f"{before} → {now}" if status.step is not None else "–",
        number(status.own_groups_used, "d"),
        str(sum(status.foreign_groups_used.values())) if status.step is not None else "–",
        number(status.foreign_weight_share, ".0%"),
        number(status.bytes_in, ".2f", 1e-6),
        number(status.bytes_out, ".2f", 1e-6),
    ]
