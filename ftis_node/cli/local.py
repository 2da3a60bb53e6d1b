"""Commands that ask the running daemon, and ``id``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ftis_node.cli.common import DEFAULT_HOME, HomeOption, JsonOption, print_json
from ftis_node.observe.api import ask
from ftis_node.store.home import Home


def status(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """What the node on this home is doing."""
    answer = ask(Home(home.expanduser()).api_socket(), "/status")
    if json:
        print_json(answer)
        return
    from rich.console import Console

    from ftis_node.observe.live import node_view

    Console().print(node_view(answer))
    for name, value in (("run", answer["run"]), ("page", answer["page"])):
        print(f"{name:10} {value or 'none'}")
    print("\n".join(f"{'' if index else 'addresses':10} {text}" for index, text in enumerate(answer["addresses"])))


def health(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Whether the node's loop goes on: exit code 0, or 1 if it does not answer or is stalled. For supervisors."""
    answer = ask(Home(home.expanduser()).api_socket(), "/status")
    if json:
        print_json({key: answer[key] for key in ("state", "reason", "advice", "stalled")})
    else:
        print(f"{answer['state']}: {answer['reason']}")
    sys.exit(1 if answer["stalled"] else 0)


def peers(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Who it works with, and who was left out and why."""
    answer = ask(Home(home.expanduser()).api_socket(), "/peers")
    if json:
        print_json(answer)
        return
    for peer in answer["peers"]:
        print(peer["id"])
        _print_table({key: value for key, value in peer.items() if key != "id"}, indent="  ")
    for peer in answer["left_out"]:
        print(f"{peer['id']}\n  left out: {peer['reason']!a}")
    if not answer["peers"] and not answer["left_out"]:
        print("no peers")


def page(
    home: HomeOption = DEFAULT_HOME,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Also open it in a browser.")] = False,
    json: JsonOption = False,
) -> None:
    """The link to the node's page. Who has it can look at everything the node shows, and change nothing."""
    import webbrowser

    from ftis_node.errors import UserError
    from ftis_node.observe.web import link, read_token

    place = Home(home.expanduser())
    address = ask(place.api_socket(), "/status").get("page")
    if address is None:
        raise UserError("The node on this home serves no page.", "Start it without --set page=false.")
    found = link(address, read_token(place.page_token))
    # Every user of the machine can read a browser's command line: it gets a link that opens once, never the token.
    opened = open_ and webbrowser.open(ask(place.api_socket(), "/page")["link"])
    if json:
        print_json({"page": found, "opened": opened})
        return
    print(found)
    if open_ and not opened:
        print("note: no browser could be opened here; open the link yourself.", file=sys.stderr)


def show_id(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """This node's peer id, and its addresses if it is running."""
    from ftis_node.errors import UserError
    from ftis_node.swarm.identity import Identity

    place = Home(home.expanduser())
    identity = Identity.load(place.key)
    try:
        addresses = ask(place.api_socket(), "/status")["addresses"]
    except UserError:
        addresses = []
    if json:
        print_json({"id": identity.peer_id, "addresses": addresses})
    else:
        print("\n".join([identity.peer_id, *addresses]))


def _print_table(answer: dict[str, Any], indent: str = "") -> None:
    """One key a line; text from peers is escaped, so that it cannot drive the terminal."""
    for key, value in answer.items():
        if isinstance(value, float):
            value = f"{value:.4g}"
        elif isinstance(value, str) and not value.isprintable():
            value = ascii(value)
        elif isinstance(value, (list, dict)):
            value = ascii(value) if value else "none"
        print(f"{indent}{key.replace('_', ' '):24} {'–' if value is None else value}")
