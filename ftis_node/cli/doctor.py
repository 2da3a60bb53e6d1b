"""``ftis-node doctor``: what is wrong, and what to do about it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import KINDS, HomeOption, JsonOption, addresses_in, print_json, say_finding
from ftis_node.cli.flags import Given, with_settings
from ftis_node.errors import UsageError, UserError
from ftis_node.host.doing import doing
from ftis_node.node.options import JoinOptions
from ftis_node.observe.answers import Peers, Status
from ftis_node.observe.api import ask
from ftis_node.observe.terminal import shown_work
from ftis_node.preflight.case import Finding, case_of, failed
from ftis_node.preflight.checks import examined
from ftis_node.store.home import DEFAULT_HOME, Home

PeersOption = Annotated[str, typer.Option(help="Addresses of nodes to dial, separated by commas.")]
app = typer.Typer(invoke_without_command=True)


@app.callback()
@with_settings("model", "lora", "vram_gb", "device", "host", "port")
def doctor(
    *,
    context: typer.Context,
    home: HomeOption = DEFAULT_HOME,
    peers: PeersOption = "",
    run: Annotated[Path | None, typer.Option(help="A run file that shall be joined.")] = None,
    task: Annotated[str | None, typer.Option(help=KINDS)] = None,
    given: Given,
    json: JsonOption = False,
) -> None:
    """Look for what is wrong with this machine, its home and its network, and say what to do.

    Nothing is changed. Exit code 1: something would keep a node from working.
    """
    if context.invoked_subcommand is not None:
        named = [option.opts[0] for option in context.command.params if _named(context, option.name or "")]
        if named:
            raise UsageError(
                f"Options before `{context.invoked_subcommand}` belong to `doctor` itself.",
                f"Write them after it: ftis-node doctor {context.invoked_subcommand} {named[0]} …",
            )
        return
    options = JoinOptions(Home(home), task=task, run=run, peers=addresses_in(peers))
    case = case_of(options, given.on(options.home))
    raise typer.Exit(_report(examined(case), json=json))


@app.command("net")
@with_settings("host", "port")
def net(
    *,
    peers: PeersOption = "",
    home: HomeOption = DEFAULT_HOME,
    seconds: Annotated[float, typer.Option(min=0, help="How long to wait for what peers find out.")] = 30.0,
    given: Given,
    json: JsonOption = False,
) -> None:
    """Whether this machine can reach peers and they can reach it. Asks the node on this home if one runs."""
    from ftis_node.preflight.net import look_around, looked_around, of_a_running_node

    at = Home(home)
    chosen = given.on(at)("arithmetic")[0]
    addresses = addresses_in(peers)
    found = None
    if not addresses:
        with suppress(UserError):
            status = ask(at.api_socket(), "/status", Status)
            found = of_a_running_node(status, ask(at.api_socket(), "/peers", Peers))
    if found is None:
        found = looked_around(look_around(chosen, at, addresses, seconds))
    raise typer.Exit(_report(found, json=json))


def _named(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _report(findings: Iterator[Finding], *, json: bool) -> int:
    """Print each finding when it is known; return the exit code."""
    found = []
    while True:
        with shown_work(), doing("checking this machine"):
            finding = next(findings, None)
        if finding is None:
            break
        found.append(finding)
        if not json:
            say_finding(finding)
    if json:
        print_json({"findings": [asdict(finding) for finding in found]})
    return int(failed(found))
