"""Commands that ask the running daemon, and ``id``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ftis_node.cli.asking import ask_daemon
from ftis_node.cli.common import HomeOption, JsonOption, print_answer, print_facts, print_json
from ftis_node.errors import UserError
from ftis_node.observe.answers import PeerRow, Peers, Status
from ftis_node.observe.api import link, read_token
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.text import called, counted, duration, say, with_names


def status(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Show what the node on this home is doing."""
    if json:
        print_json(ask_daemon(home, "/status", dict))
        return
    from ftis_node.observe.live import node_view
    from ftis_node.observe.terminal import console

    answer = ask_daemon(home, "/status", Status)
    console().print(node_view(answer))
    if (plan := answer.plan) is not None:
        held = f"{answer.kind}, {plan.dtype}, quantisation {plan.quantisation}; objective {answer.objective}"
        print_facts({"computes": [held, *plan.reasons[-1:]]})
    print_facts({key: getattr(answer, key) or "none" for key in ("run", "page", "addresses")})


def health(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Tell a supervisor whether the node's loop goes on: exit code 1 if it is stalled or silent."""
    answer = ask_daemon(home, "/status", Status, starting=0.0)
    told = {key: getattr(answer, key) for key in ("state", "reason", "advice", "stalled")}
    print_answer(told, f"{answer.state}: {answer.reason}", json=json)
    sys.exit(1 if answer.stalled else 0)


def peers(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Show the peers that the node works with, and those left out and why."""
    if json:
        print_json(ask_daemon(home, "/peers", dict))
        return
    answer = ask_daemon(home, "/peers", Peers)
    for peer in sorted(answer.peers, key=lambda peer: -peer.used):
        say(called(peer.id, answer.names), *_told(peer))
    for refused in answer.left_out:
        say(called(refused.id, answer.names), f"  left out: {with_names(refused.reason, answer.names)}")
    if not answer.peers and not answer.left_out:
        say("no peers")


def page(
    home: HomeOption = DEFAULT_HOME,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Also open it in a browser.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the link to the node's page. Its holder can see everything the node shows, and change nothing."""
    import webbrowser

    place = Home(home.expanduser())
    address = ask_daemon(home, "/status", Status).page
    if address is None:
        raise UserError("The node on this home serves no page.", "Start it without --set page=false.")
    found = link(address, read_token(place.page_token))
    # Every user of the machine can read a browser's command line: it gets a link that opens once, never the token.
    opened = open_ and webbrowser.open(ask_daemon(home, "/page", dict[str, str])["link"])
    print_answer({"page": found, "opened": opened}, found, json=json)
    if open_ and not opened and not json:
        say("note: no browser could be opened here; open the link yourself.", error=True)


def show_id(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Print this node's peer id, and its addresses if it is running."""
    from ftis_node.swarm.identity import Identity

    place = Home(home.expanduser())
    identity = Identity.load(place.key)
    try:
        addresses = ask_daemon(home, "/status", Status).addresses
    except UserError:
        addresses = []
    if json:
        print_json({"id": identity.peer_id, "addresses": addresses})
    else:
        print_facts({"peer id": identity.peer_id, "addresses": addresses or "known while its daemon runs"})


def _told(peer: PeerRow) -> list[str]:
    """About a peer, in a few lines."""
    refused = sum(peer.refused.values())
    came_of_it = f"since this start {counted(peer.accepted, 'group')} accepted, {refused} refused"
    came_of_it += f"; {peer.used} used in all"
    megabytes = f"{peer.bytes_in / 1e6:.2f} MB in, {peer.bytes_out / 1e6:.2f} out"
    lines = [f"standing: {peer.standing}", came_of_it, megabytes]
    lines.append(f"last seen {duration(peer.seconds_since_seen)} ago, calls itself {peer.agent}")
    return [f"  {line}" for line in [*lines, *peer.addresses]]
