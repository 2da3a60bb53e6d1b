"""``ftis-node lab``: trainings that are studied."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import JsonOption, print_json

app = typer.Typer(no_args_is_help=True, help="Trainings that are studied.")


@app.callback()
def lab() -> None:
    """Trainings that are studied."""


@app.command("replay")
def replay(
    home: Annotated[Path, typer.Argument(help="The home of a daemon that is not running; it is only read.")],
    until: Annotated[int | None, typer.Option(min=0, help="The last step to take; default: the latest.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new directory for replay.jsonl, with full diagnostics, and a checkpoint.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Takes a daemon's steps again from its log and its packets, and compares.

    On a CPU it arrives at the same weights bit for bit; exit code 1: it did not.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")  # as the compute process does
    from ftis_node.lab.compared import told
    from ftis_node.lab.replay import replay as replayed

    report = replayed(home.expanduser(), until=until, out=out.expanduser() if out else None)
    if json:
        print_json(report)
    else:
        print(told(report))
    sys.exit(0 if report["identical"] or not report["exact"] else 1)
