"""Pictures for the documents: ``python -m tests.manual.pictures`` runs a small swarm and photographs one node.

Three daemons on loopback with the built-in models, as in the demo; Chromium without a window. Writes docs/img/page.png
(its beginning), page-light.png, page-dark.png, page-phone.png, the terminal's view as top.png, and the swarm's page as
watch-3.png. watch-30.png shows thirty nodes of a simulation, whose pass@1 is made up.
"""

import asyncio
import io
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from PIL import Image
from rich.console import Console

from ftis_node.cli.local import HINT, LINES
from ftis_node.lab.simulation.scenario import Scenario
from ftis_node.observe.answers import Peers, Status
from ftis_node.observe.api import ask, link, read_token
from ftis_node.observe.live import node_view
from ftis_node.observe.logs import last_lines
from ftis_node.observe.web import Route, Web
from tests.support.browser import Browser
from tests.support.daemons import WHOLE, Daemon
from tests.support.watched import watched

OUT = Path("docs/img")
STEPS = 60
BEGINNING = 1148  # pixels
TOKEN = "t" * 43
FULL_SPEED = ("--set", "learning_rate=2e-4")
LORA_SPEED = ("--set", "learning_rate=3e-3")
KINDS = {
    "A": ("--model", "tiny-a", "--full", *FULL_SPEED),
    "B": ("--model", "tiny-b", "--full", *FULL_SPEED),
    "C": ("--model", "tiny-c", "--lora", *LORA_SPEED),
}


@contextmanager
def swarm(place: Path) -> Iterator[Daemon]:
    """Three daemons that learn from one another; A, after its steps. All are ended afterwards."""
    with ExitStack() as stack:
        daemons = []
        for number, (name, flags) in enumerate(KINDS.items()):
            own = ("--name", name, "--seed", str(number))
            daemon = Daemon(place / name.lower(), *flags, *own, "--set", "min_peers=2", "--set", "patience=90", *WHOLE)
            if daemons:
                daemon.flags += ("--peers", daemons[0].address())
            stack.callback(daemon.clean_up)
            daemons.append(daemon.start())
        daemons[0].wait(lambda status: status.get("step", 0) >= STEPS, f"{STEPS} steps", seconds=280)
        yield daemons[0]


def link_of(daemon: Daemon) -> str:
    """The link to a daemon's page."""
    address = daemon.wait(lambda status: status.get("page"), "a page")["page"]
    return link(address, read_token(daemon.home.page_token))


def take(url: str):
    """Light and dark at a desk's width, and the beginning at a phone's."""
    for name, width, dark, end in (
        ("page-light", 1280, False, "footer"),
        ("page-dark", 1280, True, "footer"),
        ("page-phone", 360, False, ".chart:nth-child(4)"),
    ):
        with Browser(width, 900, dark=dark) as browser:
            browser.open(url)
            browser.wait("return document.querySelectorAll('.group').length > 1 && document.querySelector('path.line')")
            browser.picture(OUT / f"{name}.png", end)
        shrink(OUT / f"{name}.png")
    with Image.open(OUT / "page-light.png") as picture:
        picture.crop((0, 0, picture.width, BEGINNING)).save(OUT / "page.png", optimize=True)


def terminal(daemon: Daemon, place: Path):
    """What `ftis-node top` shows, as a picture."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    socket = daemon.home.api_socket()
    status = ask(socket, "/status", Status)
    peers = ask(socket, "/peers", Peers)
    console.print(node_view(status, peers, last_lines(daemon.home.log, LINES), HINT))
    page = place / "top.html"
    page.write_text(
        f"<meta charset='utf-8'><body style='margin:0'>{console.export_svg(title='ftis-node top')}<footer></footer>"
    )
    with Browser(1240, 900) as browser:
        browser.open(page.as_uri())
        browser.picture(OUT / "top.png", "footer")
    shrink(OUT / "top.png")


def watch(url: str, name: str, click: str = ""):
    """The swarm's page down to the graph and the first nodes. click: what leads to it from the page at `url`."""
    with Browser(1280, 900) as browser:
        browser.open(url)
        if click:
            browser.wait(f"return document.querySelector('.tile') && document.querySelector(`{click}`)")
            browser.run(f"document.querySelector(`{click}`).click()")
        browser.wait("return document.querySelectorAll('.taught').length > 2", 150)  # reports come each minute
        browser.picture(OUT / f"{name}.png", ".nodes tbody tr:nth-child(8), footer")
    shrink(OUT / f"{name}.png")


def thirty():
    """Thirty simulated nodes, two of which say nothing of themselves, on the real page."""
    seen = watched(
        Scenario(nodes=30, seconds=1500.0, seed=3, session_seconds=60_000.0), lambda number: number not in (7, 19)
    )
    later = time.time() - seen.facts.at  # a simulation has a clock of its own
    history = [[(row[0] or 0.0) + later, *row[1:]] for row in seen.facts.history]
    shifted = {
        "at": seen.facts.at + later,
        "since": seen.facts.since + later,
        "history": history,
    }
    facts = msgspec.to_builtins(seen.facts) | shifted

    async def answer() -> dict[str, object]:
        return facts

    async def serve():
        server = Web(TOKEN, [Route("/swarm.json", answer)], "watch.html")
        await server.start("127.0.0.1", 0)
        await asyncio.to_thread(watch, link(server.address, TOKEN), "watch-30")
        await server.close()

    asyncio.run(serve())


def shrink(path: Path):
    """A palette is enough for a page, and a third of the bytes."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main():
    place = Path(tempfile.mkdtemp(prefix="ftis-pictures-"))
    began = time.monotonic()
    try:
        with swarm(place) as daemon:
            OUT.mkdir(parents=True, exist_ok=True)
            take(link_of(daemon))
            terminal(daemon, place)
            watch(link_of(daemon), "watch-3", "a[href='watch.html']")
        thirty()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{OUT}: seven pictures in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
