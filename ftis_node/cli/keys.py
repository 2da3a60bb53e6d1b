"""``ftis-node keys``: a node's identity, taken along to another home or machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption, JsonOption, print_answer
from ftis_node.errors import UsageError
from ftis_node.host.files import write_private
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.swarm.identity import Identity
from ftis_node.text import say

app = typer.Typer(no_args_is_help=True, help="Make or move a node's key: whoever has it is that node.")


@app.command("new")
def new(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Print the peer id of a home, and first make its key if it has none. A run file may need it early."""
    place = Home(home.expanduser())
    identity = Identity.load_or_create(place.key)
    print_answer({"id": identity.peer_id, "home": str(place.path)}, identity.peer_id, json=json)


@app.command("export")
def export(
    to: Annotated[Path, typer.Argument(help="The file to write; it must not exist yet.")],
    home: HomeOption = DEFAULT_HOME,
    json: JsonOption = False,
) -> None:
    """Copy the key of a home into a file that only you can read."""
    identity = Identity.load(Home(home.expanduser()).key)
    write_private(to, identity.to_bytes(), "Name another file")
    line = f"The key of {identity.peer_id} is in {to}."
    print_answer({"id": identity.peer_id, "file": str(to)}, line, json=json)
    if not json:
        say("note: keep it secret, and never run two nodes with one key at a time.", error=True)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="FROM", help="A file that `keys export` wrote.")],
    home: HomeOption = DEFAULT_HOME,
    json: JsonOption = False,
) -> None:
    """Give a home the key in a file. A home that has another key keeps it."""
    try:
        identity = Identity.from_bytes(source.read_bytes())
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}.", "Check the path.") from None
    except ValueError as error:
        raise UsageError(f"{source} holds no key: {error}.", "Name one that `ftis-node keys export` wrote.") from None
    place = Home(home.expanduser())
    kept = identity.keep(place.key)
    if kept.author != identity.author:
        what = f"The home {place.path} has a key of its own, of {kept.peer_id}."
        raise UsageError(what, f"Name another --home; or, to give that identity up for good, remove {place.key}.")
    line = f"The node on {place.path} is {identity.peer_id}."
    print_answer({"id": identity.peer_id, "home": str(place.path)}, line, json=json)
