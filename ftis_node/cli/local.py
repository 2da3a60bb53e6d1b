"""Commands that ask the running daemon, and ``id``."""

from __future__ import annotations

from typing import Any

from ftis_node.cli.common import DEFAULT_HOME, HomeOption, JsonOption, print_json
from ftis_node.observe.api import ask
from ftis_node.store.home import Home


def status(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """What the node on this home is doing."""
    answer = ask(Home(home.expanduser()).api_socket(), "/status")
    if json:
        print_json(answer)
    else:
        _print_table(answer)


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


def stop(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Asks the node to finish its step, save and end."""
    answer = ask(Home(home.expanduser()).api_socket(), "/stop", action=True)
    if json:
        print_json(answer)
    else:
        print("The node finishes its step, saves and ends.")


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
