"""``ftis-node join``: the daemon, in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from ftis_node.cli import pace
from ftis_node.cli.common import (
    AnswerOption,
    DataOption,
    EvalDataOption,
    HomeOption,
    QuestionOption,
    RewardOption,
    TemplateOption,
    addresses_in,
    note,
    print_json,
)
from ftis_node.cli.flags import Given, with_settings
from ftis_node.cli.invitations import invitation_in, keep_invitation, tell_invitation
from ftis_node.cli.runs import the_run
from ftis_node.config.profiles import TASK_KINDS
from ftis_node.config.settings import FLAGS, HOME, group_of
from ftis_node.errors import UsageError, UserError, raise_all
from ftis_node.host.doing import doing
from ftis_node.host.loading import loading
from ftis_node.node.options import JoinOptions
from ftis_node.observe.logs import as_text, begin_output, last_lines, log_to, noting
from ftis_node.observe.terminal import console, shown_work
from ftis_node.preflight.case import Case, Layers
from ftis_node.preflight.checks import refused
from ftis_node.preflight.report import as_json, dry_run_lines
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.tasks import with_columns
from ftis_node.text import say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ftis_node.node.daemon import Node

LINES = 6
VIEW_SECONDS = 1.0
HINT = "Ctrl-C: finish the step, save and end. In another terminal: ftis-node pause, resume, peers, top%s."
NOTICE = (
    "First start in %s. What leaves this machine, for anyone to read, in a private run for its members: its network "
    "address; the texts that its model samples for the run's prompts, with log-probs; and a self-report a minute (the "
    "model's name, figures, and --name if you gave one; none with --set self_report=never). Never the model, its "
    "gradients or your files."
)
# The options that `--help` shows, and the panels in which `--help-all` shows the rest; a setting's is its group.
FEW = ("invitation", "model", "task", "home", "port", "lan", "set_", "name", "background", "private", "dry_run")
PANELS = {
    "The run": ("peers", "run", "task", "data", "eval_data", "question", "answer", "reward", "template"),
    "Data of your own": ("own_data", "own_reward"),
    "The start": ("settings", "view", "paused", "json"),
}


class Command(TyperCommand):
    """`join`, which has two helps."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the options of `FEW`, or all by theme if `--help-all` asks."""
        panels = {name: panel for panel, names in PANELS.items() for name in names}
        options: Any = self.params
        for option in options:
            option.hidden = option.name not in (*FEW, "help_all") and ctx.obj != "all"
            if option.name not in (*FEW, "help_all"):
                option.rich_help_panel = panels.get(option.name) or group_of(option.name)
        super().format_help(ctx, formatter)


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.obj = "all"
        ctx.get_help()
        raise typer.Exit


@with_settings(*FLAGS)
def join(
    invitation: Annotated[
        str | None, typer.Argument(help="An invitation, ftis:…; a file of it; or - for stdin.")
    ] = None,
    *,
    peers: Annotated[str, typer.Option(help="Addresses of nodes to join, separated by commas.")] = "",
    run: Annotated[Path | None, typer.Option(help="A run file; without it the peers are asked for theirs.")] = None,
    task: Annotated[str | None, typer.Option(help=f"{TASK_KINDS}. Default: the run's.")] = None,
    data: DataOption = None,
    eval_data: EvalDataOption = None,
    question: QuestionOption = None,
    answer: AnswerOption = None,
    reward: RewardOption = None,
    template: TemplateOption = None,
    own_data: Annotated[Path | None, typer.Option(help="A .jsonl file for a part of each batch.")] = None,
    own_reward: Annotated[str | None, typer.Option(help="The reward rule of --own-data; default: integer.")] = None,
    home: HomeOption = DEFAULT_HOME,
    given: Given,
    name: Annotated[str | None, typer.Option(help="A name for logs and pictures; self-reports carry it, too.")] = None,
    view: Annotated[bool | None, typer.Option("--view/--no-view", help="Live view; default: on a terminal.")] = None,
    paused: Annotated[bool, typer.Option("--paused", help="Serve, and train nothing until `resume`.")] = False,
    background: Annotated[bool, typer.Option("--detach", help="Go to the background, with the model loaded.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Begin a run for members, whom `invite` lets in.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
    help_all: Annotated[
        bool, typer.Option("--help-all", callback=_help_all, is_eager=True, help="All options.")
    ] = False,
) -> None:
    """Train a model together with a swarm. The same command again goes on from the last checkpoint.

    This leaves your machine: its address; texts that its model samples, with
    log-probs; a self-report a minute: the model's name, figures, --name (none
    with --set self_report=never). Never the model.
    """
    if json and not dry_run:
        raise UsageError("--json is for --dry-run: a daemon answers nothing.", "Ask it with `ftis-node status --json`.")
    place = Home(home)
    if place.in_use():
        raise place.taken()
    layers = given.on(place)
    invited = None
    if invitation is not None:
        invited = invitation_in(invitation, place)
    named = addresses_in(peers)
    alone = not (named or invited or run or private or place.run_file.exists())
    options = JoinOptions(
        home=place,
        task=with_columns(task, question, answer),
        data=data,
        eval_data=eval_data,
        reward=reward,
        template=template,
        own_data=own_data,
        own_reward=own_reward,
        peers=named,
        on_lan=_on_lan(layers) if alone else (),
        run=run,
        name=name and name.encode(errors="replace").decode(),  # another coding's bytes are no text
        paused=paused,
        private=private,
        invitation=invited,
        kept=given.to_keep(place),
    )
    if private and options.bootstraps:
        raise UsageError("--private begins a run, and peers have one.", "Leave out one of the two.")
    case = Case(options, layers, starting=True)
    problems = refused(case, "join")  # before anything heavy is imported
    if dry_run and json and problems:
        print_json(as_json(case, whole=False))
    with contextlib.nullcontext() if dry_run else noting(place.path):
        raise_all(problems)
    if invited is not None:
        tell_invitation(invited)
    if case.origins["model"] == "default":
        say(f"No --model is named: {case.settings.model} is trained, a toy for arithmetic.", error=True)
    kept = [f"{name}={value}" for name, value in options.kept.items() if case.origins.get(name) == HOME]
    if kept and not dry_run:
        note(f"This home keeps {', '.join(kept)} from earlier starts; `--set NAME=default` forgets one.")
    if name is None and case.options.name and not dry_run:
        note(f"This home keeps the name {case.options.name}; `--name ''` forgets it.")
    if dry_run:
        _print_report(case, json=json)
    elif background:
        _detach(options, invitation)
    else:
        if view is None:
            view = sys.stderr.isatty()
        logs_json = case.settings.log_format == "json"
        del case, problems  # rows, own ones too, are for the compute process only
        _run(options, layers, view=view, as_json=logs_json)


def _on_lan(layers: Layers) -> tuple[str, ...]:
    """The addresses of the one run of the local network, if the settings ask for it; wrong settings are told later."""
    try:
        settings = layers("arithmetic")[0]
    except UserError:
        return ()
    if not settings.lan:
        return ()
    return the_run(settings.host)


def _run(options: JoinOptions, layers: Layers, *, view: bool, as_json: bool) -> NoReturn:
    """Run the node until it ends.

    Args:
        view: show it on the terminal, in place of its log. as_json: write the log for programs.
    """
    place = options.home
    first = not place.schema.exists()
    place.open()  # before what takes seconds to import: other commands then know that it is starting
    log_to(place.path, as_json=as_json, quiet=view)
    if first:
        logging.getLogger(__name__).info(NOTICE, place.path)
    if view:
        if first:  # the view cuts the log's lines
            say(NOTICE % place.path, error=True)
        say("Starting; Ctrl-C ends it, and the same command goes on from there.", error=True, flush=True)
        options = replace(options, output=begin_output(place.path))
    with loading():
        import uvloop

        from ftis_node.node.daemon import Node

    with noting(place.path):
        node = Node(options, lambda task: layers(task)[0])
        sys.exit(uvloop.run(_watched(node) if view else node.run()))


def _detach(options: JoinOptions, invitation: str | None) -> None:
    from ftis_node.cli.detach import detach

    home = options.home
    if not home.schema.exists():
        say(NOTICE % home.path, error=True)
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    if options.invitation is not None:  # every user of the machine can read a command line
        keep_invitation(home, options.invitation)
        arguments = [str(home.invitation) if argument == invitation else argument for argument in arguments]
    status, pid = detach(home.path, arguments, lambda line: say(line, error=True, flush=True), options.bootstraps)
    say(f"{status.state}: {status.reason}")
    if pid is not None:
        say(f"The daemon runs as process {pid} on {home.path}; it ends with `ftis-node stop{home.flag}`.")


async def _watched(node: Node) -> int:
    """Run the node with a live view on the terminal, in place of its log."""
    from rich.live import Live

    from ftis_node.observe.answers import Peers, read
    from ftis_node.observe.live import node_view

    terminal = console(stderr=True)

    def look() -> RenderableType:
        peers = read(node.peers(), Peers)
        lines = last_lines(node.home.log, LINES)
        return node_view(node.status(), peers, lines, HINT % node.home.flag, height=terminal.height)

    running = asyncio.create_task(node.run())
    try:
        with Live(look(), console=terminal, auto_refresh=False, transient=True) as live:
            while not running.done():
                await asyncio.wait({running}, timeout=VIEW_SECONDS)
                live.update(look(), refresh=True)
    except Exception as error:  # a terminal may go away in many ways; the node goes on
        logging.getLogger(__name__).warning("The view has ended, the node goes on: %r", error)
    code = await running
    with contextlib.suppress(OSError):
        for line in last_lines(node.home.log, LINES):
            say(*as_text(line).split("\n"), error=True)
    return code


def _print_report(case: Case, *, json: bool) -> None:
    """Print what a start would do. Raises the errors that it would end with."""
    from ftis_node.preflight.models import workload

    seconds = None
    with shown_work(), doing("checking what a start would do"):
        problems = refused(case, "dry-run")
        if case.plan is not None and case.shape is not None and case.task is not None and not problems:
            questions = min(case.settings.eval_prompts, len(case.task.held_out))
            card = pace.card_here(case.settings.devices[0], case.plan, case.shape)
            seconds = pace.seconds_of(case.shape, case.plan, workload(case), questions, card)
    if json:
        print_json(as_json(case, whole=True) | {"seconds": seconds})
    else:
        say(*dry_run_lines(case), flush=True)
        if seconds is not None:
            say(f"takes     {pace.step_seconds_text(seconds)}")
    raise_all(problems)
