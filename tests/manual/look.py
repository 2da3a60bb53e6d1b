"""Looks at the pages of real nodes in a browser: ``python -m tests.manual.look``, or `make look`.

Nodes on loopback with built-in models: one alone, the founder of a private run, two of different tokenizers in a text
run, and an observer of that run. Their pages, and the swarm's page of each node and of the observer, are looked at as
they start, after 20 and 101 steps that were taken, and after 1,000 and 100,000 that were not: the same nodes are
started again, paused, on histories (`metrics.jsonl`, `swarm.history`) of so many steps and minutes. Each at a desk's
width and a phone's, light and dark; the pictures go to build/look. What is wrong (tests/support/look.js) is printed;
then the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from ftis_node.observe.api import link, read_token
from ftis_node.store.home import Home
from ftis_node.swarm.chronicle import Chronicle
from tests.support.browser import Browser, missing
from tests.support.daemons import ENVIRONMENT, PATIENCE, Daemon, command, run_cli, until
from tests.support.looking import SIZES, STEPS, faults, minutes, write_steps

TAKEN = 101  # steps that the nodes take; longer histories are prepared
COMMON = ("--full", "--set", "learning_rate=2e-4", "--set", "patience=90")
SEEN = ("plain", "private", "mixed")


class Observer:
    """`ftis-node watch` of a node's run."""

    def __init__(self, home: Path) -> None:
        self.home = Home(home)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = home.with_suffix(".log")

    def start(self, address: str) -> str:
        """Start it; return the link to its page."""
        line = command("watch", "--home", str(self.home.path), "--peers", address, "--set", "host=127.0.0.1")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(line, stdout=log, stderr=log, env=os.environ | ENVIRONMENT)
        until(lambda: self._page() is not None, "the observer's page", self._process)
        return self._page() or ""

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(PATIENCE)

    def _page(self) -> str | None:
        found = re.search(r"Page: (\S+\n)", self._log.read_text(errors="replace"))
        return found[1].strip() if found else None


class Swarm:
    """The nodes and the observer, which can be started anew on their homes."""

    def __init__(self, place: Path) -> None:
        run_file = place / "text-run.toml"
        made = run_cli("run", "new", "--any-tokenizer", "-o", str(run_file))
        assert made.returncode == 0, made.stderr
        self._place, self._run = place, ("--run", str(run_file))
        self.nodes: dict[str, Daemon] = {}
        self.observer = Observer(place / "observer")

    def start(self, *flags: str) -> dict[str, str]:
        """Start all; return the links to the pages by name."""
        self._begin("plain", "--model", "tiny-a", *flags)
        self._begin("private", "--model", "tiny-b", "--private", *flags)
        self._begin("mixed", "--model", "tiny-chars", *self._run, *flags)
        address = self.nodes["mixed"].address()
        self._begin("other", "--model", "tiny-numbers", *self._run, "--peers", address, *flags)
        links = {}
        for name in SEEN:
            page = self.nodes[name].wait(lambda status: status.get("page"), "a page")["page"]
            token = read_token(self.nodes[name].home.page_token)
            links[name] = link(page, token)
            links[f"{name}-swarm"] = link(f"{page}watch.html", token)
        return links | {"observer": self.observer.start(address)}

    def wait(self, steps: int) -> None:
        for name, node in self.nodes.items():
            node.wait(lambda status: status.get("step", 0) >= steps, f"{steps} steps of {name}")

    def stop(self) -> None:
        self.observer.stop()
        for node in self.nodes.values():
            node.stop()

    def clean_up(self) -> None:
        self.observer.stop()
        for node in self.nodes.values():
            node.clean_up()

    def prepare(self, steps: int) -> dict[str, str]:
        """Start all anew, paused, on histories of so many steps and minutes; return the links to the pages."""
        self.stop()
        for home in (self.observer.home, *(node.home for node in self.nodes.values())):
            book = msgspec.msgpack.decode(home.swarm_history.read_bytes(), type=Chronicle)
            book.history = minutes(steps, time.time())
            home.swarm_history.write_bytes(msgspec.msgpack.encode(book))
        links = self.start("--paused")
        for name, node in self.nodes.items():
            node.wait(lambda status: status["state"] == "PAUSED" and "step" in status, f"a pause of {name}")
            new = node.home.path / "prepared.jsonl"
            write_steps(new, steps, alone=name in ("plain", "private"))
            new.replace(node.home.metrics)
        return links

    def _begin(self, name: str, *flags: str) -> None:
        again = name in self.nodes and "--private" in flags  # the run is there already
        told = [flag for flag in flags if not (again and flag == "--private")]
        self.nodes[name] = Daemon(self._place / name, "--name", name, *COMMON, *told).start()


def look(place: Path, out: Path) -> list[str]:
    """What is wrong with any page at any time."""
    found: list[str] = []
    swarm = Swarm(place)
    try:
        with Browser(1280, 900) as browser:
            links: dict[str, str] = {}
            for steps in STEPS:
                if steps > TAKEN:
                    links = swarm.prepare(steps)
                elif steps:
                    swarm.wait(steps)
                else:
                    links = swarm.start()
                for name, url in links.items():
                    found += faults(browser, url, f"{name}-{steps}", out)
                print(f"{steps:,} steps: {len(links)} pages, {len(found)} faults so far", flush=True)
    finally:
        swarm.clean_up()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/look"))
    out: Path = parser.parse_args().out
    if (why := missing()) is not None:
        sys.exit(f"make look {why}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    place = Path(tempfile.mkdtemp(prefix="ftis-look-"))
    began = time.monotonic()
    try:
        found = look(place, out)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(*found, sep="\n")
    pictures, seconds = len(list(out.glob("*.png"))), time.monotonic() - began
    print(f"{out}: {pictures // len(SIZES)} pages, {pictures} pictures, {len(found)} faults, {seconds:.0f} s")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
