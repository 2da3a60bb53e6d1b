"""Commands that change what the running daemon does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.asking import ask_daemon
from ftis_node.cli.common import HomeOption, JsonOption, parse_pairs, print_answer
from ftis_node.errors import UserError
from ftis_node.observe.answers import NodeState
from ftis_node.store.home import DEFAULT_HOME, Home

POLL_SECONDS = 0.5
PATIENCE = 30.0
ENDING_SECONDS = 5.0
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Return only when it is done.")]


def stop(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """Ask the node to finish its step, save and end, all within half a minute."""
    _end(home, "stop", "The node finishes its step, saves and ends.", wait=wait, json=json)


def finish(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """End after the running step, however long that takes, so that nothing of it is lost."""
    _end(home, "finish", "The node completes its step, saves and ends.", wait=wait, json=json)


def pause(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """Save after this step and free the GPU (or cores); the node goes on serving its peers."""
    answer = _command(home, "pause", wait=wait)
    said = {"PAUSED": "The node is paused.", "STOPPING": "The node ends."}
    _say(answer, said.get(answer.state, "The node completes its step and pauses."), json=json)


def resume(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """Load the model again and go on from the last checkpoint."""
    answer = _command(home, "resume", wait=wait)
    _say(answer, "The node ends." if answer.state == "STOPPING" else "The node goes on.", json=json)


def set_(
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE…", help="KEY=default takes a value back.")],
    home: HomeOption = DEFAULT_HOME,
    json: JsonOption = False,
) -> None:
    """Change settings of the running node, until it ends. docs/settings.md marks those that can be."""
    answer = ask_daemon(home, "/set", dict, order=parse_pairs(pairs))
    lines = (f"{name} = {'default' if value is None else value}" for name, value in answer.items())
    print_answer(answer, *lines, json=json)


def _command(home: Path, name: str, *, wait: bool = False) -> NodeState:
    """The node's answer; wait: that of a node that has paused, or trains again."""
    answer, pausing = ask_daemon(home, f"/{name}", NodeState, action=True), name == "pause"
    while wait and (answer.state != "PAUSED" if pausing else answer.state in ("PAUSED", "LOADING")):
        if answer.pausing != pausing or answer.finishing or answer.state == "STOPPING":
            raise UserError(f"The node does not {name}: it is {answer.state}.", "Ask it with `ftis-node status`.")
        time.sleep(POLL_SECONDS)
        answer = ask_daemon(home, "/status", NodeState, timeout=PATIENCE)
    return answer


def _end(home: Path, name: str, text: str, *, wait: bool, json: bool) -> None:
    place = Home(home.expanduser())
    record = place.runtime()
    answer = _command(home, name)
    while wait and place.in_use():
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + ENDING_SECONDS  # it has let go of its home, so its process is about to end
    while wait and place.lives(record) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 10)
    _say(answer, "The node has ended." if wait else text, json=json)


def _say(answer: NodeState, text: str, *, json: bool) -> None:
    print_answer({name: getattr(answer, name) for name in ("state", "pausing", "finishing")}, text, json=json)
