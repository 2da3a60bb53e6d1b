"""``ftis-node demo``."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ftis_node.cli.common import JsonOption, print_json
from ftis_node.errors import UsageError


def demo(
    listener: Annotated[bool, typer.Option("--listener", help="Add a fourth node that only learns.")] = False,
    mixed: Annotated[bool, typer.Option("--mixed", help="Three models with three different tokenizers.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Two nodes with this model of yours: a name, a folder, or a GGUF file.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Until every node has taken so many steps; default 80, with --model 12.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", help="Where homes, curves.png and summary.json go.")] = Path(
        "demo-output"
    ),
    json: JsonOption = False,
) -> None:
    """Run a real swarm of three different small models on this machine, live. Ctrl-C ends everything.

    With --model two nodes train that model on sums in words: about how good is it before, and after?
    """
    if model is not None and (listener or mixed):
        raise UsageError("--model has two nodes of its own.", "Leave out --listener and --mixed.")
    from ftis_node.demo import OWN_STEPS, STEPS, Demo

    if steps is None:
        steps = STEPS
        if model is not None:
            steps = OWN_STEPS
    summary = Demo(output, listener=listener, mixed=mixed, model=model, steps=steps, quiet=json).run()
    if json:
        print_json(msgspec.to_builtins(summary))
    sys.exit(int(not summary.complete))
