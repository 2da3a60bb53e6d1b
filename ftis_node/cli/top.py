"""``ftis-node top``: the running daemon at a glance, live."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ftis_node.cli.asking import ask_daemon
from ftis_node.cli.common import HomeOption, print_json
from ftis_node.observe.answers import Peers, Status
from ftis_node.observe.logs import last_lines
from ftis_node.store.home import DEFAULT_HOME, Home

LINES = 6
HINT = "Ctrl-C ends this view; the node goes on. pause, finish and stop are commands of their own."


def top(
    home: HomeOption = DEFAULT_HOME,
    seconds: Annotated[float, typer.Option(min=0.1, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Once, as one JSON object: status and peers.")] = False,
) -> None:
    """Show the node on this home live: state, learning, peers, traffic and its last log lines."""
    from rich.console import RenderableType
    from rich.live import Live

    from ftis_node.observe.live import node_view
    from ftis_node.observe.terminal import console

    if json:
        print_json({"status": ask_daemon(home, "/status", dict), **ask_daemon(home, "/peers", dict)})
        return
    place = Home(home.expanduser())

    def look() -> RenderableType:
        status = ask_daemon(home, "/status", Status)
        peers = ask_daemon(home, "/peers", Peers).peers
        return node_view(status, peers, last_lines(place.log, LINES), "" if once else HINT, whole=once)

    terminal = console()
    if once:
        terminal.print(look())
        return
    with Live(look(), console=terminal, auto_refresh=False, screen=terminal.is_terminal) as live:
        while True:
            time.sleep(seconds)
            live.update(look(), refresh=True)
