"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ftis_node.errors import UsageError

DEFAULT_HOME = Path("~/.ftis-node")

HomeOption = Annotated[
    Path, typer.Option("--home", envvar="FTIS_HOME", help="The node's directory: key, checkpoints, logs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value))


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """``--set key=value`` options as text; the settings know their types.

    Raises:
        UsageError: there is no ``=``.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise UsageError(f"--set {pair} has no value.", "Write --set KEY=VALUE.")
        values[key] = text
    return values


def addresses_in(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def printable(text: str) -> str:
    """Text that may hold words of peers, without anything that a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)
