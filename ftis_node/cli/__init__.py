"""The command line: one file a command group, no logic."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

import ftis_node
from ftis_node.errors import FtisError, UsageError, UserError, one_by_one
from ftis_node.text import say

# A command's module and function, or a group's module, which has it as `app`; and what `--help` says of it.
_COMMANDS = {
    "bugreport": ("bugreport.bugreport", "Pack what helps to find a mistake into one file; send nothing."),
    "demo": ("demo.demo", "Three different small models, a real swarm on this machine, live. Ctrl-C ends everything."),
    "eval": (
        "eval.evaluate",
        "Greedy pass@1 with its 95 % interval; beside it the rate of right formats, and accuracy whatever the format.",
    ),
    "export": (
        "export.export",
        "Write a trained model as a folder that plain transformers loads, or an adapter that plain peft loads.",
    ),
    "fit": ("fit.fit", "Say whether and how a model can be trained in so much memory. Exit code 1: it cannot."),
    "join": (
        "join.join",
        "Train a model together with a swarm. The same command again goes on from the last checkpoint.",
    ),
    "status": ("local.status", "Show what the node on this home is doing."),
    "health": (
        "local.health",
        "Whether the node's loop goes on: exit code 0, or 1 if it does not answer or is stalled. Supervisors use it.",
    ),
    "peers": ("local.peers", "Show the peers it works with, and those left out and why."),
    "top": (
        "top.top",
        "The node on this home at a glance, live: state, learning, peers, traffic, and what it said last.",
    ),
    "page": (
        "local.page",
        "The link to the node's page. Its holder can see everything the node shows, and change nothing.",
    ),
    "watch": (
        "watch.watch",
        "Show a whole swarm on a page: who is there, what they claim, who taught whom. It needs no model.",
    ),
    "logs": ("logs.logs", "The last lines of the log of the node on this home, also after it has ended."),
    "pause": (
        "life.pause",
        "After this step the node saves and lets go of its GPU (or cores); it stays in the swarm and serves its peers.",
    ),
    "resume": ("life.resume", "Load the model again and go on from the last checkpoint."),
    "finish": (
        "life.finish",
        "As stop, but the running step may take as long as it takes, so that nothing of it is lost.",
    ),
    "stop": ("life.stop", "Ask the node to finish its step, save and end, all within half a minute."),
    "set": (
        "life.set_",
        "Change settings of the running node, until it ends. docs/settings.md marks those that can be.",
    ),
    "id": ("local.show_id", "This node's peer id, and its addresses if it is running."),
    "invite": (
        "invitations.invite",
        "Print an invitation to this node's run: one line for `ftis-node join`. The node must run when it is used.",
    ),
    "members": ("invitations.members", "List the members of a private run that this node knows, and those removed."),
    "remove": ("invitations.remove", "Remove a member from a private run. What it has received already stays with it."),
    "runs": ("runs.runs", "List the open runs of the local network, whose nodes were started with --lan."),
    "run": ("run", "The public contract of a swarm."),
    "config": ("config", "The settings, layer upon layer."),
    "keys": ("keys", "A node's key: whoever has it is that node."),
    "doctor": ("doctor", "Looks for what is wrong and says what to do."),
    "bench": ("bench", "Measurements."),
    "lab": ("lab", "Many nodes in one place: experiments and what they show."),
}


@functools.cache
def _made(name: str) -> Any:
    module, _, function = _COMMANDS[name][0].partition(".")
    found, alone = import_module(f"{__name__}.{module}"), typer.Typer(pretty_exceptions_enable=False)
    if function:
        alone.command(name)(getattr(found, function))
    else:
        alone.add_typer(found.app, name=name)
    return get_group(alone).commands[name]


class _Commands(TyperGroup):
    """Imports a command's module when it is called, so that none pays for what another needs."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: Any = dict.fromkeys(_COMMANDS)

    def get_command(self, ctx: object, name: str) -> Any:
        """The command of this name, or None."""
        return _made(name) if name in _COMMANDS else None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of all commands together, without importing one."""
        listed: Any = {name: TyperCommand(name, help=says) for name, (_, says) in _COMMANDS.items()}
        TyperGroup(commands=listed, params=self.params, help=self.help).format_help(ctx, formatter)


app = typer.Typer(
    name="ftis-node",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(ftis_node.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Different language models learn from one another, peer to peer."""


def main() -> None:
    """Run the command line; exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        try:
            _refuse_misplaced(sys.argv[1:])
            app()
        finally:
            sys.stdout.flush()  # or a closed pipe is met when nobody can answer for it any more
    except UserError as error:
        _tell(error)
    except FtisError as error:
        say(f"error: {error}", error=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `ftis-node status | head -1`; what Python still holds back goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a path that a person named, or a disk that is full, in whichever command
        what = f"{error.filename or 'A file'} cannot be used: {error.strerror or error}."
        _tell(UserError(what, "Check the path, its permissions, and that its disk has room."))


def _refuse_misplaced(words: Sequence[str]) -> None:
    """Refuse an empty word after an option, mostly a variable that is not set (--peers= is empty on purpose), and an
    invitation."""
    for option, value in pairwise(words):
        if option.startswith("--") and not value.strip():
            raise UsageError(f"{option} is followed by an empty value.", "Leave it out, or set the variable behind it.")
        if option in ("--peers", "--task", "--run") and value.startswith("ftis:"):
            raise UsageError(f"{option} was given an invitation.", "It stands alone: `ftis-node join ftis:…`.")


def _tell(error: UserError) -> NoReturn:
    """Two sentences on stderr for each mistake; what a peer or a file put into them moves no terminal."""
    for one in one_by_one(error):
        say(f"error: {one.what}", f"       {one.fix}", error=True)
    sys.exit(error.exit_code)
