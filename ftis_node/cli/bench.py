"""``ftis-node bench``: measurements that anyone can repeat."""

from __future__ import annotations

from typing import Annotated

import typer

from ftis_node.cli.common import JsonOption, print_json

app = typer.Typer(no_args_is_help=True, help="Measurements.")


@app.callback()
def bench() -> None:
    """Measurements that anyone can repeat."""


@app.command("wire")
def wire(
    repeats: Annotated[int, typer.Option(min=1, help="How often each operation is timed.")] = 200,
    json: JsonOption = False,
) -> None:
    """Size of a 12 × 256-token packet, and the time to encode, decode and admit it."""
    from ftis_node.lab.bench_wire import bench_wire

    figures = bench_wire(repeats)
    if json:
        print_json(figures)
    else:
        for key, value in figures.items():
            print(f"{key:20} {value:.4g}")
