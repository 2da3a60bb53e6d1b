"""What is measured again and again: what processes hold, what nodes heard, who sees whom; and pages in a browser."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from selenium.common.exceptions import WebDriverException

from ftis_node.errors import UserError
from ftis_node.observe.answers import Peers
from ftis_node.observe.api import ask
from tests.manual.week.diary import STEPS
from tests.manual.week.fleet import Fleet, Member, within
from tests.support.browser import Browser
from tests.support.daemons import kind_of
from tests.support.looking import SIZES, faults

_SIZES = re.compile(r"^(Pss|Anonymous): +(\d+) kB", re.M)


@contextlib.contextmanager
def repeated(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Until the block ends, does something every so many seconds in a thread. Raises what that raised."""
    over = threading.Event()

    def run():
        while not over.wait(seconds):
            action()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield
        finally:
            over.set()
        running.result()


class Gauges:
    """Samples of all members, which are in `samples.jsonl`, too."""

    def __init__(self, fleet: Fleet):
        self.rows: list[dict[str, Any]] = []
        self._fleet = fleet

    def sample(self):
        """Nothing of a member that is down or frozen."""
        found = [row for member in self._fleet if member.up for row in sample(member)]
        with (self._fleet.folder / "samples.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        self.rows += found


def sample(member: Member) -> list[dict[str, Any]]:
    """A row for each process with what it holds, and one for the node with its disk, step, and what it heard."""
    rows = []
    status = member.daemon.status()
    base = {"at": time.time(), "name": member.role.name}
    for place, process in enumerate(member.daemon.pids()):
        with contextlib.suppress(psutil.Error, OSError):
            kind = kind_of(process)
            if kind == "network" and place > 0:
                kind = "child"  # a tracker's, say
            facts = {"process": kind, "pid": process.pid, "born": process.create_time()}
            rows.append(base | facts | held(process))
    size = subprocess.run(["du", "-sk", member.daemon.home.path], capture_output=True, text=True).stdout.split()[0]
    node = {
        "process": "node",
        "step": status.get("step"),
        "state": status.get("state"),
        "heard": heard(member),
        "blocks": status.get("process", {}).get("python_blocks"),
        "disk_mb": int(size) / 1024,
    }
    return [*rows, base | node]


def held(process: psutil.Process) -> dict[str, float]:
    """Proportional and anonymous memory, open files, sockets, threads. Only anonymous memory can leak, and it does not
    change when another process that shares a library ends."""
    place = Path("/proc") / str(process.pid)
    sizes = {name: int(kilobytes) / 1024 for name, kilobytes in _SIZES.findall((place / "smaps_rollup").read_text())}
    links = [os.readlink(file) for file in (place / "fd").iterdir()]
    counts = {"files": len(links), "sockets": sum(link.startswith("socket:") for link in links)}
    return {
        "pss_mb": sizes["Pss"],
        "memory_mb": sizes["Anonymous"],
        **counts,
        "threads": process.num_threads(),
    }


def heard(member: Member) -> dict[str, int]:
    """The groups that each author has announced, as far as this member heard; its own are all of its own."""
    page = member.page()
    if page is None:
        return {}
    address, _, token = page.partition("?token=")
    place = address.rpartition("/")[0]
    with contextlib.suppress(OSError, ValueError), within(member.namespace):
        asked = urllib.request.Request(f"{place}/swarm.json", headers={"Authorization": f"Bearer {token}"})
        answer = json.load(urllib.request.urlopen(asked, timeout=5.0))
        return {node["id"]: node["groups"] for node in answer.get("nodes", [])}
    return {}


class Apart:
    """For each pair of nodes of a run that are up and can reach each other: since when it is not in each other's view.

    times: of pairs that met again, how long that took. late: pairs that were apart for too long, and for how long.
    """

    def __init__(self, most: float):
        """
        Args:
            most: seconds for which a pair may be apart.
        """
        self.times = []
        self.late = {}
        self._most = most
        self._since = {}

    def note(self, now: float, views: Mapping[str, set[str] | None], half: Collection[str]):
        """Takes a sample.

        Args:
            now: in seconds. views: of each node that is up the peers in its view; None: it did not answer. half: who is
                cut off from all others.
        """
        before = self._since
        self._since = {}
        for one, other in itertools.combinations(sorted(views), 2):
            here = views[one]
            there = views[other]
            apart = now - before.get((one, other), now)
            if here and there and other in here and one in there:
                if apart > 0:
                    self.times.append(apart)
            elif one not in half and other not in half:
                self._since[one, other] = now - apart
                if apart > self._most:
                    self.late[one, other] = apart

    def sample(self, members: Collection[Member], half: Collection[str]):
        """Asks the members of a run. One that has not joined its run yet is not up."""
        views = {}
        for member in members:
            status = member.daemon.status()
            if member.up and (not status or status.get("step") is not None):
                views[member.id] = None
                with contextlib.suppress(UserError):
                    answer = ask(member.daemon.home.api_socket(), "/peers", Peers)
                    views[member.id] = {known.id for known in answer.peers}
        self.note(time.monotonic(), views, half)


class Album:
    """Looks at the pages of all members after some steps, and in the end; `faults` has what is wrong with them."""

    def __init__(self, fleet: Fleet):
        self.faults: list[str] = []
        self.due = {member.role.name: list(STEPS) for member in fleet}
        self._out = fleet.folder / "pictures"
        self._fleet = fleet
        self._out.mkdir()

    def look_if_due(self):
        """An observer has the steps of who began its run."""
        for member in self._fleet:
            counts = member if member.trains else self._fleet.of(member.role.run)[0]
            step = counts.daemon.status().get("step") or 0
            due = self.due[member.role.name]
            passed = [steps for steps in due if steps <= step]
            if passed and member.up and self.look(member, str(passed[-1])):
                del due[: len(passed)]

    def look(self, member: Member, when: str) -> bool:
        """At both pages of a node, its own and the swarm's. Returns whether nothing was done to it meanwhile: else what
        was seen does not count."""
        before = member.deeds
        name = f"{member.role.name}-{when}"
        link = member.page() or ""
        found = []
        pages = {name: link}
        if member.trains:
            pages[f"{name}-swarm"] = link.replace("/?", "/watch.html?")
        try:
            with within(member.namespace), Browser(1280, 900) as browser:
                for page, url in pages.items():
                    found += faults(browser, url, page, self._out, SIZES[::3])  # a desk's, light; a phone's, dark
        except WebDriverException as error:
            found.append(f"{name}: {error}")
        calm = member.deeds == before and member.up
        if calm:
            self.faults += found
        return calm
