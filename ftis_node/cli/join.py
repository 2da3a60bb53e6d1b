"""``ftis-node join``: the daemon, in the foreground."""

from __future__ import annotations

import functools
import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node.cli.common import DEFAULT_HOME, HomeOption, addresses_in, parse_pairs, print_json, printable
from ftis_node.errors import UsageError
from ftis_node.settings import Settings, collect
from ftis_node.store.home import Home

if TYPE_CHECKING:
    from ftis_node.dry_run import Settle
    from ftis_node.node import JoinOptions

LOG_BYTES = 10 << 20
NOTICE = (
    "First start in %s. What leaves this machine, for anyone to read: its network address, and the token ids and "
    "log-probs that its model samples for the run's public prompts. Never the model, its gradients or your files."
)


def join(
    model: Annotated[
        str | None, typer.Option(help="A short name (qwen2.5-3b), a hub id, a local folder, or tiny-a, -b, -c.")
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Addresses of nodes to join, separated by commas; none: start a run of one's own.")
    ] = "",
    run: Annotated[Path | None, typer.Option(help="A run file; without it the peers are asked for theirs.")] = None,
    task: Annotated[str | None, typer.Option(help="arithmetic, gsm8k, or the path of a .jsonl file.")] = None,
    data: Annotated[Path | None, typer.Option(help="A local training file of the task.")] = None,
    eval_data: Annotated[Path | None, typer.Option(help="A local file of held-out examples.")] = None,
    home: HomeOption = DEFAULT_HOME,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Train LoRA layers only, or everything; default: what fits.")
    ] = None,
    objective: Annotated[str | None, typer.Option(help="The loss: ftis, grpo (own samples only), nois, …")] = None,
    own_share: Annotated[
        float | None, typer.Option(help="Part of each batch generated here; 0 only listens. Default: 1/nodes.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="End after so many steps in all; default: never.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP and UDP port to listen on; 0 means any.")] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(help="An address to tell others in place of its own, /ip4/…/tcp/…; repeatable."),
    ] = None,
    relay: Annotated[
        list[str] | None, typer.Option(help="A node to be reached through if nobody can dial this one; repeatable.")
    ] = None,
    upload: Annotated[
        float | None, typer.Option(help="Mbit/s that peers may take from this node; 0: no limit. Default: 20.")
    ] = None,
    vram: Annotated[float | None, typer.Option(help="GB of the GPU's memory to use; default: what is free.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling and LoRA initialisation.")] = None,
    settings: Annotated[Path | None, typer.Option("--settings", help="A TOML file of settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set KEY=VALUE, repeatable.")] = None,
    name: Annotated[str, typer.Option(help="A name for logs and pictures; it stays on this machine.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
) -> None:
    """Trains a model together with a swarm. The same command again goes on from the last checkpoint.

    What leaves this machine: its address, and the token ids and log-probs that its model samples. Never the model.
    """
    flags = parse_pairs(set_ or []) | {
        key: value
        for key, value in {
            "model": model,
            "lora": lora,
            "objective": objective,
            "own_share": own_share,
            "steps": steps,
            "host": host,
            "port": port,
            "announce": announce or None,
            "relays": relay or None,
            "upload_mbit": upload,
            "device": device,
            "vram_gb": vram,
            "seed": seed,
        }.items()
        if value is not None
    }
    home = home.expanduser()
    settle = functools.partial(_settle, flags=flags, file=settings)
    chosen = settle(task or "arithmetic")  # wrong settings are told before anything heavy is imported
    from ftis_node.policy.names import resolve

    resolve(chosen.model)
    if json and not dry_run:
        raise UsageError("--json is for --dry-run: a daemon answers nothing.", "Ask it with `ftis-node status --json`.")
    first = not Home(home).run_file.exists()
    if not dry_run:
        _log_to(home)
        if first:
            logging.getLogger(__name__).info(NOTICE, home)
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    import uvloop

    from ftis_node.node import JoinOptions, Node

    options = JoinOptions(
        home=home,
        task=task,
        data=data,
        eval_data=eval_data,
        peers=addresses_in(peers),
        run=run,
        name=name,
    )
    if dry_run:
        _say(options, functools.partial(_layers, flags=flags, file=settings), json=json)
        return
    sys.exit(uvloop.run(Node(options, settle).run()))


def _settle(task: str, *, flags: dict[str, object], file: Path | None) -> Settings:
    return collect(task=task, flags=flags, file=file)[0]


def _layers(task: str, *, flags: dict[str, object], file: Path | None) -> tuple[Settings, dict[str, str]]:
    return collect(task=task, flags=flags, file=file)


def _say(options: JoinOptions, settle: Settle, *, json: bool) -> None:
    """What would be done; ends as `join` would if it could not be."""
    from ftis_node.dry_run import DryRun, in_words

    found = DryRun(options, settle).look()
    if json:
        print_json(found.report)
    else:
        print("\n".join(map(printable, in_words(found.report).splitlines())), flush=True)
    if found.problems:
        raise found.problems[0]


def _log_to(home: Path) -> None:
    """Logs go to stderr and, if the home can be written, to its node.log."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    try:
        home.mkdir(parents=True, exist_ok=True)
        handlers.append(RotatingFileHandler(home / "node.log", maxBytes=LOG_BYTES, backupCount=2, encoding="utf-8"))
    except OSError:
        pass  # opening the home will say what is wrong with it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=handlers)
    for noisy in ("httpx", "transformers", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
