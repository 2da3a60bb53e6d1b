"""Commands for the daemon on a home: they ask it, order it, or read what it wrote; and ``id``."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption, JsonOption, parse_pairs, print_answer, print_facts, print_json, waiting
from ftis_node.errors import UserError
from ftis_node.observe.answers import Kind, PeerRow, Peers, Status
from ftis_node.observe.api import NoDaemon, ask, link, read_token
from ftis_node.observe.logs import as_object, as_text, last_lines, last_words, read_log
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.text import called, counted, duration, escaped, in_json, say, with_names

ANSWER_SECONDS = 5.0
STARTING_SECONDS = 60.0  # loading PyTorch takes some, on a loaded machine many
POLL_SECONDS = 0.3
LOOK_SECONDS = 1.0  # between two looks of `top`
PATIENCE = 30.0
ENDING_SECONDS = 5.0
LINES = 6
HINT = "Ctrl-C ends this view; the node goes on. pause, finish and stop are commands of their own."
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Return only when it is done.")]


def ask_daemon(
    home: Path,
    route: str,
    kind: type[Kind],
    *,
    timeout: float = ANSWER_SECONDS,
    starting: float = STARTING_SECONDS,
    order: Mapping[str, str] | None = None,
) -> Kind:
    """Return the answer of the daemon on a home; see `observe.api.ask`.

    Args:
        starting: seconds for which a daemon that holds the home, but does not answer yet, is waited for.
        order: what an order is sent with.

    Raises:
        UserError: there is no such home, none runs on it, it does not answer, or refuses the order.
    """
    place = Home(home)
    deadline = time.monotonic() + starting
    told = False
    while True:
        try:
            return ask(place.api_socket(), route, kind, timeout=timeout, order=order)
        except NoDaemon:
            if not place.in_use() or place.observes:
                raise _none(place) from None
            if time.monotonic() > deadline:
                raise UserError(
                    f"The daemon on {place.path} is starting, or ending, and does not answer.",
                    f"`ftis-node logs{place.flag}` says what it does.",
                ) from None
        if not told:
            say(f"note: the daemon on {place.path} does not answer yet; waiting for it.", error=True)
            told = True
        time.sleep(POLL_SECONDS)


def _none(place: Home) -> UserError:
    place.refuse_missing()
    if place.observes:
        return UserError(
            f"The home {place.path} is an observer's, which has no node to ask.",
            f"`ftis-node watch{place.flag}` shows its page.",
        )
    what = f"No ftis-node daemon is running on the home {place.path}."
    words = last_words(place.path)
    if words:
        what += f" The last one ended with: {escaped(words)}"
    return UserError(what, place.to_start)


# --- asking it --------------------------------------------------------------------------------------------------------


def status(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Show what the node on this home is doing."""
    if json:
        print_json(ask_daemon(home, "/status", dict))
        return
    from ftis_node.observe.live import node_view
    from ftis_node.observe.terminal import console

    answer = ask_daemon(home, "/status", Status)
    console().print(node_view(answer))
    plan = answer.plan
    if plan is not None:
        held = f"{answer.kind}, {plan.dtype}, quantisation {plan.quantisation}; objective {answer.objective}"
        print_facts({"computes": [held, *plan.reasons[-1:]]})
    print_facts({key: getattr(answer, key) or "none" for key in ("run", "page", "addresses")})


def health(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Tell a supervisor whether the node's loop goes on: exit code 1 if it is stalled or silent."""
    answer = ask_daemon(home, "/status", Status, starting=0.0)
    told = {key: getattr(answer, key) for key in ("state", "reason", "advice", "stalled")}
    print_answer(told, f"{answer.state}: {answer.reason}", json=json)
    sys.exit(int(answer.stalled))


def peers(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Show the peers that the node works with, and those left out and why."""
    if json:
        print_json(ask_daemon(home, "/peers", dict))
        return
    answer = ask_daemon(home, "/peers", Peers)
    for peer in sorted(answer.peers, key=lambda peer: -peer.used):
        say(called(peer.id, answer.names), *_told(peer))
    for refused in answer.left_out:
        say(called(refused.id, answer.names), f"  left out: {with_names(refused.reason, answer.names)}")
    for observer in answer.observers:
        say(called(observer, answer.names), "  an observer")
    if not answer.peers and not answer.left_out and not answer.observers:
        say("no peers")


def page(
    home: HomeOption = DEFAULT_HOME,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Also open it in a browser.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the link to the node's page. Its holder can see everything the node shows, and change nothing."""
    import webbrowser

    place = Home(home)
    address = ask_daemon(home, "/status", Status).page
    if address is None:
        raise UserError("The node on this home serves no page.", "Start it without --set page=false.")
    found = link(address, read_token(place.page_token))
    # Every user of the machine can read a browser's command line: it gets a link that opens once, never the token.
    opened = open_ and webbrowser.open(ask_daemon(home, "/page", dict[str, str])["link"])
    print_answer({"page": found, "opened": opened}, found, json=json)
    if open_ and not opened and not json:
        say("note: no browser could be opened here; open the link yourself.", error=True)


def show_id(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Print this node's peer id, and its addresses if it is running."""
    from ftis_node.swarm.identity import Identity

    place = Home(home)
    place.refuse_missing()
    identity = Identity.load(place.key)
    try:
        addresses = ask_daemon(home, "/status", Status).addresses
    except UserError:
        addresses = []
    if json:
        print_json({"id": identity.peer_id, "addresses": addresses})
    else:
        print_facts({"peer id": identity.peer_id, "addresses": addresses or "known while its daemon runs"})


def _told(peer: PeerRow) -> list[str]:
    """About a peer, in a few lines."""
    refused = sum(peer.refused.values())
    came_of_it = f"since this start {counted(peer.accepted, 'group')} accepted, {refused} refused"
    came_of_it += f"; {peer.used} used in all"
    megabytes = f"{peer.bytes_in / 1e6:.2f} MB in, {peer.bytes_out / 1e6:.2f} out"
    lines = [f"standing: {peer.standing}", came_of_it, megabytes]
    lines.append(f"last seen {duration(peer.seconds_since_seen)} ago, calls itself {peer.agent}")
    return [f"  {line}" for line in [*lines, *peer.addresses]]


def top(home: HomeOption = DEFAULT_HOME) -> None:
    """Show the node on this home live: state, learning, peers, traffic and its last log lines."""
    from rich.console import RenderableType
    from rich.live import Live

    from ftis_node.observe.live import node_view
    from ftis_node.observe.terminal import console

    place = Home(home)
    terminal = console()

    def look() -> RenderableType:
        status = ask_daemon(home, "/status", Status)
        peers = ask_daemon(home, "/peers", Peers)
        return node_view(status, peers, last_lines(place.log, LINES), HINT, height=terminal.height)

    if not terminal.is_terminal:
        terminal.print(look())
        return
    with Live(look(), console=terminal, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(LOOK_SECONDS)
            live.update(look(), refresh=True)


def logs(
    home: HomeOption = DEFAULT_HOME,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show what is added, until the daemon ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")] = False,
) -> None:
    """Print the last lines of the log of the node on this home, also after it has ended."""
    place = Home(home)

    def may_grow() -> bool:
        return follow and place.lives(place.runtime())

    try:
        for line in read_log(place.log, lines, may_grow):
            shown = as_text(line).split("\n")
            if json:
                shown = [in_json(as_object(line))]
            say(*shown, flush=follow)
    except FileNotFoundError:
        place.refuse_missing()
        raise UserError(f"There is no log in {place.path}.", place.to_start) from None


# --- ordering it ------------------------------------------------------------------------------------------------------


def stop(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """Ask the node to finish its step, save and end, all within half a minute."""
    _end(home, "stop", "The node finishes its step, saves and ends.", wait=wait, json=json)


def finish(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """End after the running step, however long that takes, so that nothing of it is lost."""
    _end(home, "finish", "The node completes its step, saves and ends.", wait=wait, json=json)


def pause(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """Save after this step and free the GPU (or cores); the node goes on serving its peers."""
    answer = _command(home, "pause", wait=wait)
    said = {
        "PAUSED": "The node is paused.",
        "STOPPING": "The node ends.",
        "LOADING": "The node pauses once it has loaded.",
    }
    _say(answer, said.get(answer.state, "The node completes its step and pauses."), json=json)


def save(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """Save what the node has learned now, so that `export` and `eval` have it."""
    status = saved(home)
    step = status.checkpoint.step
    told = "There is no step to save yet."
    if step is not None:
        told = f"Step {step} is saved."
    print_answer({"state": status.state, "step": step}, told, json=json)


def resume(home: HomeOption = DEFAULT_HOME, wait: WaitOption = False, json: JsonOption = False) -> None:
    """Load the model again and go on from the last checkpoint."""
    answer = _command(home, "resume", wait=wait)
    text = "The node goes on."
    if answer.state == "STOPPING":
        text = "The node ends."
    _say(answer, text, json=json)


def set_(
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE…", help="KEY=default: as at its start.")],
    home: HomeOption = DEFAULT_HOME,
    json: JsonOption = False,
) -> None:
    """Change settings of the running node, until it ends. docs/settings.md marks those that can be."""
    answer = ask_daemon(home, "/set", dict, order=parse_pairs(pairs))
    lines = []
    for name, value in answer.items():
        if value is None:
            value = "default"
        lines.append(f"{name} = {value}")
    print_answer(answer, *lines, json=json)


def saved(home: Path) -> Status:
    """Let the daemon on a home save, and wait for it; return its status then.

    Raises:
        UserError: there is no such daemon, or its disk has no room.
    """
    status = ask_daemon(home, "/save", Status, order={})
    while status.checkpoint.asked and status.state != "STOPPING":  # which saves, too
        time.sleep(POLL_SECONDS)
        status = ask_daemon(home, "/status", Status, timeout=PATIENCE)
    return status


def _command(home: Path, name: str, *, wait: bool = False) -> Status:
    """The node's answer; wait: that of a node that has paused, or trains again."""
    answer = ask_daemon(home, f"/{name}", Status, order={})
    pausing = name == "pause"

    def done() -> bool:
        if pausing:
            return answer.state == "PAUSED"
        return answer.state not in ("PAUSED", "LOADING")

    while wait and not done():
        if answer.pausing != pausing or answer.finishing or answer.state == "STOPPING":
            raise UserError(f"The node does not {name}: it is {answer.state}.", "Ask it with `ftis-node status`.")
        time.sleep(POLL_SECONDS)
        answer = ask_daemon(home, "/status", Status, timeout=PATIENCE)
    return answer


def _end(home: Path, name: str, text: str, *, wait: bool, json: bool) -> None:
    place = Home(home)
    record = place.runtime()
    answer = _command(home, name)
    if wait:
        with waiting(text.removesuffix(".")):
            while place.in_use():
                time.sleep(POLL_SECONDS)
            deadline = time.monotonic() + ENDING_SECONDS  # it has let go of its home, so its process is about to end
            while place.lives(record) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 10)
        text = "The node has ended."
    _say(answer, text, json=json)


def _say(answer: Status, text: str, *, json: bool) -> None:
    print_answer({name: getattr(answer, name) for name in ("state", "pausing", "finishing")}, text, json=json)
