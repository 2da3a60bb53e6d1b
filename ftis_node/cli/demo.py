"""``ftis-node demo``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ftis_node.cli.common import JsonOption, print_json


def demo(
    listener: Annotated[bool, typer.Option("--listener", help="Add a fourth node that only learns.")] = False,
    mixed: Annotated[bool, typer.Option("--mixed", help="Three models with three different tokenizers.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Until every node has taken so many steps.")] = 80,
    output: Annotated[Path, typer.Option("--output", help="Where homes, curves.png and summary.json go.")] = Path(
        "demo-output"
    ),
    json: JsonOption = False,
) -> None:
    """Run a real swarm of three different small models on this machine, live. Ctrl-C ends everything."""
    from ftis_node.demo import Demo

    summary = Demo(output, listener=listener, mixed=mixed, steps=steps, quiet=json).run()
    if json:
        print_json(msgspec.to_builtins(summary))
    sys.exit(0 if summary.complete else 1)
