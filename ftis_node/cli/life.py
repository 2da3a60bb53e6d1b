"""Commands that change what the running daemon does."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from ftis_node.cli.common import DEFAULT_HOME, HomeOption, JsonOption, print_json
from ftis_node.errors import UserError
from ftis_node.observe.api import ask
from ftis_node.store.home import Home

POLL_SECONDS = 0.5
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Return only when it is done.")]


def stop(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """Asks the node to finish its step, save and end, all within half a minute."""
    answer = _command(home, "stop")
    if wait:
        _until_gone(Home(home.expanduser()))
    _say(answer, json, "The node has ended." if wait else "The node finishes its step, saves and ends.")


def finish(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """As stop, but the running step may take as long as it takes, so that nothing of it is lost."""
    answer = _command(home, "finish")
    if wait:
        _until_gone(Home(home.expanduser()))
    _say(answer, json, "The node has ended." if wait else "The node completes its step, saves and ends.")


def pause(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """After this step the node saves and lets go of its GPU (or cores); it stays in the swarm and serves its peers."""
    answer = _command(home, "pause")
    if wait:
        answer = _until(Home(home.expanduser()), "PAUSED")
    done = wait or answer["state"] == "PAUSED"
    _say(
        answer, json, "The node is paused." if done else "The node completes its step and pauses; resume with: resume."
    )


def resume(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Loads the model again and goes on from the last checkpoint."""
    _say(_command(home, "resume"), json, "The node goes on.")


def _command(home: Any, name: str) -> dict[str, Any]:
    return ask(Home(home.expanduser()).api_socket(), f"/{name}", action=True)


def _say(answer: dict[str, Any], json: bool, text: str) -> None:
    if json:
        print_json(answer)
    else:
        print(text)


def _until(home: Home, state: str) -> dict[str, Any]:
    """Waits until the daemon is in this state; raises UserError if it ends instead."""
    while (answer := ask(home.api_socket(), "/status"))["state"] != state:
        time.sleep(POLL_SECONDS)
    return {"state": answer["state"]}


def _until_gone(home: Home) -> None:
    while home.runtime() is not None:
        try:
            ask(home.api_socket(), "/status")
        except UserError:
            if not home.in_use():
                return
        time.sleep(POLL_SECONDS)
