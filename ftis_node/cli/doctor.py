"""``ftis-node doctor``: what is wrong, and what to do about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node.cli.common import DEFAULT_HOME, HomeOption, JsonOption, parse_pairs, print_json
from ftis_node.errors import UserError

if TYPE_CHECKING:
    from ftis_node.doctor import Finding
    from ftis_node.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Looks for what is wrong and says what to do.")


@app.callback()
def _root() -> None:
    """Without this, a single command would have no name."""


@app.command("net")
def net(
    peers: Annotated[str, typer.Option(help="Addresses of nodes to dial, separated by commas.")] = "",
    home: HomeOption = DEFAULT_HOME,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP and UDP port to listen on; 0 means any.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to wait for what peers find out.")] = 30.0,
    settings: Annotated[Path | None, typer.Option("--settings", help="A TOML file of settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set KEY=VALUE, repeatable.")] = None,
    json: JsonOption = False,
) -> None:
    """Whether this machine can reach peers and they can reach it. Asks the node on this home if one runs."""
    from ftis_node.doctor import of_a_running_node
    from ftis_node.observe.api import ask
    from ftis_node.settings import collect
    from ftis_node.store.home import Home

    flags = parse_pairs(set_ or []) | {k: v for k, v in {"host": host, "port": port}.items() if v is not None}
    chosen = collect(task="arithmetic", flags=flags, file=settings)[0]
    addresses = [part.strip() for part in peers.split(",") if part.strip()]
    found: list[Finding] = []
    try:
        status = ask(Home(home.expanduser()).api_socket(), "/status") if not addresses else None
    except UserError:
        status = None
    if status is not None:
        found = of_a_running_node(status)
        if not json:
            for finding in found:
                _print(finding)
    else:
        found = _look(chosen, addresses, seconds, told=not json)
    if json:
        print_json({"findings": [dataclasses.asdict(finding) for finding in found]})
    raise typer.Exit(1 if any(finding.verdict == "problem" for finding in found) else 0)


def _look(settings: Settings, peers: list[str], seconds: float, *, told: bool) -> list[Finding]:
    import os

    import uvloop

    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    from ftis_node.doctor import look_around

    found: list[Finding] = []

    async def look() -> None:
        async for finding in look_around(settings, peers, seconds):
            found.append(finding)
            if told:
                _print(finding)

    uvloop.run(look())
    return found


def _print(finding: Finding) -> None:
    print(f"{finding.verdict:8} {finding.subject}: {finding.text}", flush=True)
    if finding.advice:
        print(f"         → {finding.advice}", flush=True)
