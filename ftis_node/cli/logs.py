"""``ftis-node logs``: what the daemon on a home wrote down."""

from __future__ import annotations

from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption
from ftis_node.errors import UserError
from ftis_node.observe.logs import as_object, as_text, read_log
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.text import in_json, say


def logs(
    home: HomeOption = DEFAULT_HOME,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show what is added, until the daemon ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")] = False,
) -> None:
    """Print the last lines of the log of the node on this home, also after it has ended."""
    place = Home(home.expanduser())
    try:
        for line in read_log(place.log, lines, (lambda: place.lives(place.runtime())) if follow else None):
            say(*([in_json(as_object(line))] if json else as_text(line).split("\n")), flush=follow)
    except FileNotFoundError:
        raise UserError(f"There is no log in {place.path}.", "Start a node there, or name its --home.") from None
    except OSError as error:
        raise UserError(f"The log {place.log} cannot be read: {error.strerror}.", "Name another --home.") from None
