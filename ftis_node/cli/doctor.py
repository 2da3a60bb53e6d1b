"""``ftis-node doctor``: what is wrong, and what to do about it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.common import HomeOption, JsonOption, addresses_in, parse_pairs, print_json, settled
from ftis_node.errors import UsageError, UserError
from ftis_node.store.home import DEFAULT_HOME
from ftis_node.text import say

if TYPE_CHECKING:
    from ftis_node.preflight.case import Case
    from ftis_node.preflight.finding import Finding

app = typer.Typer(invoke_without_command=True, help="Looks for what is wrong and says what to do.")


@app.callback()
def doctor(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="As for join; default: the model of the home.")] = None,
    home: HomeOption = DEFAULT_HOME,
    peers: Annotated[str, typer.Option(help="Addresses of nodes to dial, separated by commas.")] = "",
    run: Annotated[Path | None, typer.Option(help="A run file that shall be joined.")] = None,
    task: Annotated[str | None, typer.Option(help="arithmetic, gsm8k, or the path of a .jsonl file.")] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--full", help="Train LoRA layers only, or everything.")] = None,
    vram: Annotated[float | None, typer.Option(help="GB of the GPU's memory to use; default: what is free.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP and UDP port to listen on; 0 means any.")] = None,
    settings: Annotated[Path | None, typer.Option("--settings", help="A TOML file of settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set KEY=VALUE, repeatable.")] = None,
    json: JsonOption = False,
) -> None:
    """Looks for what is wrong with this machine, its home and its network, and says what to do.

    Nothing is changed. Exit code 1: something would keep a node from working.
    """
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if _given(context, name)]
        if given:
            raise UsageError(
                f"Options before `{context.invoked_subcommand}` belong to `doctor` itself.",
                f"Write them after it: ftis-node doctor {context.invoked_subcommand} --{given[0].rstrip('_')} …",
            )
        return
    flags = {"model": model, "lora": lora, "vram_gb": vram, "device": device, "host": host, "port": port}
    chosen = parse_pairs(set_ or []) | {key: value for key, value in flags.items() if value is not None}
    case = case_of(home, chosen, task=task, run=run, file=settings, peers=addresses_in(peers))
    from ftis_node.preflight.checks import examined

    raise typer.Exit(_report(examined(case), json=json))


def case_of(
    home: Path,
    flags: dict[str, Any],
    *,
    task: str | None = None,
    run: Path | None = None,
    file: Path | None = None,
    peers: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Case:
    """The case of the doctor; what nobody named is as the home has it, as far as that can be read.

    Args:
        environment: by default the process's own.

    Raises:
        UsageError: wrong settings or addresses, or a run file that cannot be read.
    """
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    from ftis_node.config.run import load_run_file
    from ftis_node.policy.names import resolve
    from ftis_node.swarm.addresses import parse_address

    case = bare_case(home)
    place = case.home
    case.options = replace(case.options, task=task, run=run, peers=peers)
    case.layers = functools.partial(settled, home=place, flags=flags, file=file, environment=environment)
    named = load_run_file(run) if run is not None else None
    with suppress(UserError, OSError):  # the check of the home says that its file is damaged
        if place.run_file.exists():
            case.runs.append(("the home", load_run_file(place.run_file)))
    if named is not None:
        case.runs.append(("--run", named))
    if case.origins["model"] != "home":  # the checks of the model say that its folder is gone
        resolve(case.settings.model)
    for text in peers:
        parse_address(text)
    return case


def bare_case(home: Path) -> Case:
    """A home, and nothing that anybody set: for a report on what cannot be read."""
    from ftis_node.config.settings import Settings
    from ftis_node.node.options import JoinOptions
    from ftis_node.preflight.case import Case
    from ftis_node.store.home import Home

    defaults = Settings()
    origins = dict.fromkeys(defaults.model_dump(), "default")
    return Case(JoinOptions(Home(home.expanduser())), lambda _: (defaults, origins))


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
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    from ftis_node.config.settings import collect
    from ftis_node.observe.api import ask
    from ftis_node.preflight.net import looked_around, of_a_running_node
    from ftis_node.store.home import Home

    flags = parse_pairs(set_ or []) | {k: v for k, v in {"host": host, "port": port}.items() if v is not None}
    chosen = collect(task="arithmetic", flags=flags, file=settings)[0]
    addresses = addresses_in(peers)
    try:
        status = ask(Home(home.expanduser()).api_socket(), "/status") if not addresses else None
    except UserError:
        status = None
    found = looked_around(chosen, addresses, seconds) if status is None else iter(of_a_running_node(status))
    raise typer.Exit(_report(found, json=json))


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _report(findings: Iterator[Finding], *, json: bool) -> int:
    """Prints each finding when it is known; the exit code."""
    from ftis_node.preflight.finding import failed

    found = []
    for finding in findings:
        found.append(finding)
        if not json:
            say(f"{finding.verdict:5}{finding.subject}: {finding.text}", flush=True)
            if finding.advice:
                say(f"     → {finding.advice}", flush=True)
    if json:
        print_json({"findings": [asdict(finding) for finding in found]})
    return 1 if failed(found) else 0
