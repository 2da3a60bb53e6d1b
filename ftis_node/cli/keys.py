"""``ftis-node keys``: a node's identity."""

import typer

from ftis_node.cli.common import HomeOption, JsonOption, print_answer
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.swarm.identity import Identity

app = typer.Typer(no_args_is_help=True)


@app.command("new")
def new(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Print the peer id of a home, and first make its key if it has none. A run file may need it early."""
    place = Home(home)
    identity = Identity.load_or_create(place.key)
    print_answer({"id": identity.peer_id, "home": str(place.path)}, identity.peer_id, json=json)
