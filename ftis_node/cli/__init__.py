"""The command line: one file a command group, no logic."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, NoReturn

import typer

import ftis_node
from ftis_node.cli import (
    bench,
    bugreport,
    config,
    demo,
    doctor,
    eval,
    export,
    fit,
    invitations,
    join,
    keys,
    lab,
    life,
    local,
    logs,
    run,
    runs,
    task,
    top,
    watch,
)
from ftis_node.errors import FtisError, UsageError, UserError, one_by_one
from ftis_node.swarm import invitation
from ftis_node.text import say

app = typer.Typer(
    name="ftis-node",
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


app.command("bugreport")(bugreport.bugreport)
app.command("demo")(demo.demo)
app.command("eval")(eval.evaluate)
app.command("export")(export.export)
app.command("fit")(fit.fit)
app.command("join")(join.join)
app.command("status")(local.status)
app.command("health")(local.health)
app.command("peers")(local.peers)
app.command("top")(top.top)
app.command("page")(local.page)
app.command("watch")(watch.watch)
app.command("logs")(logs.logs)
app.command("pause")(life.pause)
app.command("resume")(life.resume)
app.command("finish")(life.finish)
app.command("stop")(life.stop)
app.command("set")(life.set_)
app.command("id")(local.show_id)
app.command("invite")(invitations.invite)
app.command("members")(invitations.members)
app.command("remove")(invitations.remove)
app.command("runs")(runs.runs)
app.add_typer(run.app, name="run")
app.add_typer(task.app, name="task")
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(doctor.app, name="doctor")
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")


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
        if option in ("--peers", "--task", "--run") and value.startswith(invitation.PREFIX):
            raise UsageError(f"{option} was given an invitation.", "It stands alone: `ftis-node join ftis:…`.")


def _tell(error: UserError) -> NoReturn:
    """Two sentences on stderr for each mistake; what a peer or a file put into them moves no terminal."""
    for one in one_by_one(error):
        say(f"error: {one.what}", f"       {one.fix}", error=True)
    sys.exit(error.exit_code)
