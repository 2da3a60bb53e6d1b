"""The command line: one file a command group, no logic. A command's docstring is its help; it raises UserError for what
a person can mend, and ends with `sys.exit` or `typer.Exit` where its exit code is not 0."""

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
from ftis_node.host.files import no_home_folder
from ftis_node.text import in_lines, say

# The commands and groups in panels, in the order in which a person meets them, and what `--help` says of each.
# A group is the `app` of the module of its name.
_PANELS = {
    "Start": {
        "demo": "Run a real swarm of three different small models on this machine, live. Ctrl-C ends everything.",
        "doctor": "Find what is wrong, and say what to do.",
        "fit": "Say whether and how a model can be trained in so much memory. Exit code 1: it cannot.",
        "join": "Train a model together with a swarm. The same command again goes on from the last checkpoint.",
    },
    "Watch": {
        "status": "Show what the node on this home is doing.",
        "top": "Show the node on this home live: state, learning, peers, traffic and its last log lines.",
        "page": "Print the link to the node's page. Its holder can see everything the node shows, and change nothing.",
        "logs": "Print the last lines of the log of the node on this home, also after it has ended.",
        "peers": "Show the peers that the node works with, and those left out and why.",
    },
    "Control": {
        "pause": "Save after this step and free the GPU (or cores); the node goes on serving its peers.",
        "resume": "Load the model again and go on from the last checkpoint.",
        "save": "Save what the node has learned now, so that `export` and `eval` have it.",
        "finish": "End after the running step, however long that takes, so that nothing of it is lost.",
        "stop": "Ask the node to finish its step, save and end, all within half a minute.",
        "set": "Change settings of the running node, until it ends. docs/settings.md marks those that can be.",
    },
    "Friends": {
        "invite": "Print a line for `ftis-node join` that invites to this node's run. The node must run meanwhile.",
        "members": "List the members of a private run that this node knows, and those removed.",
        "remove": "Remove a member from a private run. What it has received already stays with it.",
        "runs": "List the open runs of the local network, whose nodes were started with --lan.",
        "watch": "Show a whole swarm on a page: who is there, what they claim, who taught whom. It needs no model.",
    },
    "Results": {
        "eval": "Measure greedy pass@1 with its 95 % interval; also right formats, and accuracy in any format.",
        "ask": "Ask a trained model, beside its base model with --compare.",
        "export": "Write a trained model as a folder for plain transformers, an adapter for peft, or a GGUF file.",
        "task": "Check a task's rows, and what a model can learn from them; keep those that teach.",
    },
    "Trouble": {
        "health": "Tell a supervisor whether the node's loop goes on: exit code 1 if it is stalled or silent.",
        "bugreport": "Pack what helps to find a mistake into one file; send nothing.",
    },
    "Experts": {
        "run": "Make or show a run, the public contract of a swarm.",
        "config": "Show the settings, layer upon layer.",
        "keys": "Make a node's key: whoever has it is that node.",
        "id": "Print this node's peer id, and its addresses if it is running.",
        "lab": "Run experiments with many nodes in one place, and report on them.",
        "bench": "Measure speed and traffic.",
    },
}
_COMMANDS = {name: says for panel in _PANELS.values() for name, says in panel.items()}
_ASKING = (
    "status",
    "health",
    "peers",
    "page",
    "top",
    "logs",
    "pause",
    "resume",
    "save",
    "finish",
    "stop",
)
# Where a command is that is not the function of its name in the module of its name.
_PLACES = {
    "eval": "eval.evaluate",
    "id": "local.show_id",
    "set": "local.set_",
    **{name: f"local.{name}" for name in _ASKING},
    **{name: f"invitations.{name}" for name in ("invite", "members", "remove")},
}


# Commands, and the names that other programs have for them.
_OTHERS = {
    "ask": "chat talk generate sample predict",
    "eval": "evaluate",
    "join": "train start restart init",
    "remove": "kick ban",
    "status": "list ls ps",
    "stop": "quit kill",
}
_OF_A_RUN = ("--completion-tokens", "--completions", "--group", "--temperature", "--any-tokenizer", "--chat")
_MEANT = {other: name for name, others in _OTHERS.items() for other in others.split()}


@functools.cache
def _made(name: str) -> Any:
    module, function = _PLACES.get(name, f"{name}.{name}").split(".")
    found = import_module(f"{__name__}.{module}")
    alone = typer.Typer(pretty_exceptions_enable=False)
    if hasattr(found, "app"):
        alone.add_typer(found.app, name=name, help=_COMMANDS[name])
    else:
        alone.command(name, cls=getattr(found, "Command", None))(getattr(found, function))
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
        panels = [(panel, *one) for panel, commands in _PANELS.items() for one in commands.items()]
        listed: Any = {name: TyperCommand(name, help=says, rich_help_panel=panel) for panel, name, says in panels}
        TyperGroup(commands=listed, params=self.params, help=self.help).format_help(ctx, formatter)


app = typer.Typer(name="ftis-node", cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


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
    except RuntimeError as error:
        if "home directory" not in str(error):  # as pathlib says it where a path begins with ~
            raise
        _tell(no_home_folder())
    except OSError as error:  # a path that a person named, or a disk that is full, in whichever command
        _tell(
            UserError(
                f"{error.filename or 'A file'} cannot be used: {error.strerror or error}.",
                "Check the path, its permissions, and that its disk has room.",
            )
        )


def _refuse_misplaced(words: Sequence[str]) -> None:
    """Refuse an empty word after an option, mostly a variable that is not set (--peers= is on purpose; --home= would be
    this folder), an invitation, an option of `run new`, and a command that has another name."""
    meant = _MEANT.get(words[0] if words else "")
    if meant:
        raise UsageError(f"There is no command {words[0]!r}.", f"You may mean `ftis-node {meant}`: {_COMMANDS[meant]}")
    of_a_run = [word for word in words if word.partition("=")[0] in _OF_A_RUN]
    if of_a_run and words[0] == "join":
        raise UsageError(
            f"{of_a_run[0]} belongs to a run, which is fixed when it begins.",
            "Make the run first: `ftis-node run new --help` has it, and prints the line to join it.",
        )
    for option, value in (*pairwise(words), *((word, "") for word in words if word == "--home=")):
        if option.startswith("--") and not value.strip():
            raise UsageError(f"{option} is followed by an empty value.", "Leave it out, or set the variable behind it.")
        if option in ("--peers", "--task", "--run") and value.startswith("ftis:"):
            raise UsageError(f"{option} was given an invitation.", "It stands alone: `ftis-node join ftis:…`.")


def _tell(error: UserError) -> NoReturn:
    """Two sentences on stderr for each mistake; what a peer or a file put into them moves no terminal."""
    for one in one_by_one(error):
        say(*in_lines(one.what), f"       {one.fix}", error=True)
    sys.exit(error.exit_code)
