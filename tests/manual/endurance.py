"""Swarms of real daemons for a long time: `make chaos` and `make soak`.

Each daemon has a network namespace of its own, so that the network can be cut in two; that takes root. What is found is
one JSON object on stdout; the exit code is 1 if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ftis_node.lab.bench.namespaces import namespaces, partition
from ftis_node.observe.metrics import read_events
from tests.manual.kills import Loss, loss
from tests.manual.views import Observer, halves
from tests.support.daemons import Daemon, gone, kind_of

PORT, ANY = 4001, "0.0.0.0"
MODELS = ("tiny-a", "tiny-b", "tiny-c")
MINUTES = (0.0, 0.1)  # between checkpoints, of every other node
GAP_SECONDS, GAP_MEDIANS = 15.0, 3.0
APART_SECONDS = 60.0
SAMPLE_SECONDS = 10.0
WARMING = 0.4


@dataclass
class Member:
    """A daemon and what was done to it. frozen: from when to when, in the wall clock's seconds."""

    daemon: Daemon
    name: str
    address: str
    id: str = ""
    down: bool = False
    frozen: list[tuple[float, float]] = field(default_factory=list)
    killed: int = 0

    def wait_for(self, what: str, condition: Callable[[dict[str, Any]], Any], seconds: float = 180) -> dict[str, Any]:
        return self.daemon.wait(condition, f"{self.name}: {what}", seconds)


class Swarm:
    """Daemons in namespaces; the first is everybody's bootstrap, and like a public one it dials nobody in a LAN."""

    def __init__(self, path: Path, places: Sequence[tuple[str, str]], flags: Sequence[str]) -> None:
        self.members: list[Member] = []
        self.family: dict[int, psutil.Process] = {}
        self.sockets: set[Path] = set()
        for number, (namespace, address) in enumerate(places):
            peers = ["--peers", self.members[0].address] if self.members else []
            daemon = Daemon(
                path / f"node-{number}",
                *("--model", MODELS[number % len(MODELS)], "--port", str(PORT), *peers, *flags),
                *("--set", f"checkpoint_minutes={MINUTES[number % len(MINUTES)]}"),
                prefix=("ip", "netns", "exec", namespace),
                host=address if self.members else ANY,
            )
            member = Member(daemon, f"node-{number}", "")
            self.members.append(member)
            daemon.start()
            if number == 0:
                member.address = daemon.address()
        for member in self.members:
            status = member.wait_for("first step", lambda status: (status.get("step") or 0) >= 1)
            member.id = status["addresses"][0].rpartition("/p2p/")[2]
        self.remember()

    def remember(self) -> None:
        """All processes and socket directories there ever were, so that none is left in the end."""
        for member in self.members:
            if (runtime := member.daemon.home.runtime()) is not None:
                self.sockets.add(Path(runtime.directory))
            for process in member.daemon.pids():
                self.family.setdefault(process.pid, process)

    def stop(self) -> list[int]:
        """Ends all daemons as a person would; returns their exit codes."""
        self.remember()
        for member in self.members:
            assert member.daemon.process is not None
            member.daemon.process.send_signal(signal.SIGTERM)
        return [member.daemon.process.wait(60) for member in self.members if member.daemon.process is not None]

    def clean_up(self) -> None:
        for member in self.members:
            member.daemon.clean_up()


@contextlib.contextmanager
def swarm(nodes: int, flags: Sequence[str]) -> Iterator[Swarm]:
    """A running swarm on fresh homes."""
    with tempfile.TemporaryDirectory(prefix="endurance-") as scratch, namespaces(nodes, None) as places:
        started = Swarm(Path(scratch), places, flags)
        try:
            yield started
        finally:
            started.clean_up()


# --- chaos ------------------------------------------------------------------------------------------------------------


class Chaos:
    """What goes wrong, when."""

    def __init__(self, swarm: Swarm, seconds: float, rng: random.Random) -> None:
        self.swarm = swarm
        self.seconds = seconds
        self.rng = rng
        self.log: list[str] = []
        self.began = time.time()
        self._cut_off: list[str] = []
        members = {member.id: member for member in swarm.members}
        self.observer = Observer(
            {peer: member.daemon for peer, member in members.items()},
            live=lambda peer: not members[peer].down,
            cut=lambda one, other: halves(self._cut_off)(one, other),
        )

    def run(self) -> None:
        """Every 20 s a kill, in the second fifth a partition of a minute, in the fourth a frozen node for a minute."""
        long = min(60.0, self.seconds / 6)
        with contextlib.ExitStack() as stack:
            events = [(at, self.kill) for at in np.arange(10.0, self.seconds - 30.0, 20.0)]
            half = list(range(0, len(self.swarm.members), 2))
            cut = contextlib.ExitStack()
            stack.push(cut)
            at = 0.2 * self.seconds
            cut.callback(self._cut_off.clear)
            events += [(at, lambda: self.cut(cut, half)), (at + long, cut.close)]
            frozen = self.swarm.members[1]
            at = 0.6 * self.seconds
            events += [(at, lambda: self.freeze(frozen)), (at + long, lambda: self.thaw(frozen))]
            for when, action in sorted(events, key=lambda event: event[0]):
                time.sleep(max(0.0, self.began + when - time.time()))
                action()
        time.sleep(max(0.0, self.began + self.seconds - time.time()))

    def say(self, what: str, _: object = None) -> None:
        self.log.append(f"{time.time() - self.began:.0f} s: {what}")
        print(self.log[-1], file=sys.stderr, flush=True)

    def cut(self, stack: contextlib.ExitStack, half: Sequence[int]) -> None:
        """Half of the swarm is cut off, until the stack is closed."""
        self._cut_off += [self.swarm.members[number].id for number in half]
        self.say("partition", stack.enter_context(partition(half)))

    def kill(self) -> None:
        """A node, its p2pd, or the bootstrap."""
        kind = self.rng.choice(("node", "p2pd", "bootstrap"))
        others = [member for member in self.swarm.members[1:] if not member.down]
        member = self.swarm.members[0] if kind == "bootstrap" else self.rng.choice(others)
        self.swarm.remember()
        self.say(f"kill -9 of {member.name}'s p2pd" if kind == "p2pd" else f"kill -9 of {member.name}")
        if kind == "p2pd":
            for process in member.daemon.pids():
                with contextlib.suppress(psutil.Error):
                    if process.name() == "p2pd":
                        process.kill()
            return
        member.down = True
        gone(member.daemon.kill()[1:], 20)
        time.sleep(1.0)
        member.daemon.start()
        member.down = False
        member.killed += 1

    def freeze(self, member: Member) -> None:
        self.say(f"{member.name} is frozen")
        member.down = True
        for process in member.daemon.pids():
            process.suspend()
        member.frozen.append((time.time(), float("inf")))

    def thaw(self, member: Member) -> None:
        self.say(f"{member.name} goes on")
        for process in reversed(member.daemon.pids()):
            process.resume()
        member.frozen[-1] = (member.frozen[-1][0], time.time())
        member.down = False


def examine(member: Member) -> dict[str, Any]:
    """What a node's own log says of its life."""
    events = read_events(member.daemon.home.metrics, "step", "started")
    steps = [event for event in events if event["event"] == "step"]
    foreign = [digest for event in steps for digest in event["batch"]["foreign"]]
    number = int(member.name.removeprefix("node-"))
    lost = _lost(events, MINUTES[number % len(MINUTES)])
    times = [event["time"] for event in steps]
    gaps = [(a, b) for a, b in itertools.pairwise(times) if not _down(member, a, b, events)]
    lengths = [b - a for a, b in gaps]
    median = statistics.median(lengths)
    return {
        "steps": len(steps),
        "median_step": median,
        "longest_gap": max(lengths),
        "gap_limit": max(GAP_SECONDS, GAP_MEDIANS * median),
        "kills": member.killed,
        "steps_lost_per_start": [one.steps for one in lost],
        "lost_too_much": [problem for one in lost if (problem := one.problem()) is not None],
        "foreign_groups": len(foreign),
        "trained_twice": len(foreign) - len(set(foreign)),
        "files": sorted(path.name for path in member.daemon.home.path.iterdir()),
        "checkpoints": sorted(path.name for path in member.daemon.home.checkpoints.iterdir()),
    }


def _lost(events: Sequence[dict[str, Any]], minutes: float) -> list[Loss]:
    """What every start after the first had to take again."""
    found, life = [], list[dict[str, Any]]()
    for event in events:
        if event["event"] == "step":
            life.append(event)
            continue
        if life:
            found.append(loss(life, event["step"], minutes))
        life = []
    return found


def _down(member: Member, a: float, b: float, events: Sequence[dict[str, Any]]) -> bool:
    """Whether the node was frozen between two steps, or was started anew."""
    started = any(event["event"] == "started" and a < event["time"] <= b for event in events)
    return started or any(start < b and end > a for start, end in member.frozen)


def chaos(nodes: int, seconds: float, seed: int) -> dict[str, Any]:
    problems = []
    with swarm(nodes, ("--set", "batch_groups=6", "--set", "eval_prompts=16", "--set", "eval_every=50")) as running:
        trouble = Chaos(running, seconds, random.Random(seed))
        with trouble.observer:
            trouble.run()
            time.sleep(APART_SECONDS)  # whoever is apart in the end has a minute, too
        apart = trouble.observer.apart
        ends = {}
        for member in running.members:
            before = member.wait_for("being online", lambda status: status.get("state") == "ONLINE")["step"]
            status = member.wait_for(
                "all peers and two steps after all is over",
                lambda status, step=before: status.get("peers") == nodes - 1 and (status.get("step") or 0) >= step + 2,
            )
            ends[member.name] = {"state": status["state"], "restarts_of_p2pd": status["network"]["p2pd_restarts"]}
        codes = running.stop()
        left = [process.pid for process in running.family.values() if _alive(process)]
        told = {member.name: examine(member) | ends[member.name] for member in running.members}
        tracebacks = {m.name: found for m in running.members if (found := _tracebacks(m.daemon.log()))}
    if any(codes):
        problems.append(f"exit codes {codes}")
    if left:
        problems.append(f"processes left: {left}")
    if sockets := [str(path) for path in running.sockets if path.exists()]:
        problems.append(f"socket directories left: {sockets}")
    if apart.worst[0] > APART_SECONDS:
        problems.append(f"{apart.worst[1]} were not in each other's view for {apart.worst[0]:.0f} s")
    for name, found in told.items():
        if found["longest_gap"] > found["gap_limit"]:
            problems.append(f"{name}: {found['longest_gap']:.1f} s between two steps")
        if found["trained_twice"]:
            problems.append(f"{name}: {found['trained_twice']} groups trained on twice")
        problems += [f"{name}: {problem}" for problem in found["lost_too_much"]]
        if len(found["checkpoints"]) > 3:
            problems.append(f"{name}: checkpoints {found['checkpoints']}")
    meetings = {
        "worst_seconds": apart.worst[0],
        "median_seconds": statistics.median(apart.times) if apart.times else None,
        "times": len(apart.times),
    }
    return {"problems": problems, "meetings": meetings, "events": trouble.log, "tracebacks": tracebacks, "nodes": told}


# --- soak -------------------------------------------------------------------------------------------------------------


def soak(nodes: int, seconds: float) -> dict[str, Any]:
    """Memory and open files of every process over time; the slope of each must be lost in its noise.

    The first two fifths are left out: caches, tables and the pool's memory of ten minutes fill.
    """
    samples: dict[str, list[tuple[float, float, float]]] = {}
    blocks: dict[str, list[tuple[float, float]]] = {}
    with swarm(nodes, ("--set", "batch_groups=6", "--set", "eval_prompts=16", "--set", "packet_quota_mb=8")) as running:
        began = time.time()
        while (now := time.time() - began) < seconds:
            for member in running.members:
                held = member.daemon.status().get("process", {}).get("python_blocks")
                if held is not None:
                    blocks.setdefault(f"{member.name} network", []).append((now, held))
                for process in member.daemon.pids():
                    with contextlib.suppress(psutil.Error):
                        kind = kind_of(process)
                        key = f"{member.name} {kind}"
                        samples.setdefault(key, []).append(
                            (now, process.memory_info().rss / 2**20, float(process.num_fds()))
                        )
            print(f"{now:.0f} s", file=sys.stderr, flush=True)
            time.sleep(SAMPLE_SECONDS)
        steps = [member.daemon.status().get("step") for member in running.members]
        codes = running.stop()
    told, problems = {}, [f"exit codes {codes}"] if any(codes) else []
    for key, rows in samples.items():
        settled = [row for row in rows if row[0] > WARMING * seconds]
        told[key] = {
            "memory_mb": [row[1] for row in rows[:: max(1, len(rows) // 12)]],  # to see whether it levels off
            "memory_mb_per_hour": _slope([(t, m) for t, m, _ in settled]),
            **_blocks_told(blocks.get(key, []), WARMING * seconds),
            "files": [row[2] for row in rows[:: max(1, len(rows) // 12)]],
            "files_per_hour": _slope([(t, f) for t, _, f in settled]),
        }
        if settled[-1][1] > 1.1 * settled[0][1] + 10:
            problems.append(f"{key}: memory from {settled[0][1]:.0f} to {settled[-1][1]:.0f} MB")
        if settled[-1][2] > settled[0][2] + 10:
            problems.append(f"{key}: open files from {settled[0][2]:.0f} to {settled[-1][2]:.0f}")
    return {"problems": problems, "steps": steps, "processes": told}


def _blocks_told(rows: Sequence[tuple[float, float]], after: float) -> dict[str, Any]:
    """Of Python's allocator: what a leak of objects would make grow, whatever malloc does."""
    settled = [row for row in rows if row[0] > after]
    if len(settled) < 3:
        return {}
    return {"blocks": [row[1] for row in rows[:: max(1, len(rows) // 12)]], "blocks_per_hour": _slope(settled)}


def _slope(points: Sequence[tuple[float, float]]) -> list[float]:
    """[least squares slope an hour, its standard error]"""
    times, values = (np.array(column) for column in zip(*points, strict=True))
    times = times / 3600
    slope, offset = np.polyfit(times, values, 1)
    residual = values - slope * times - offset
    error = np.sqrt(residual.var() / max(1, len(times) - 2) / times.var())
    return [float(slope), float(error)]


def _tracebacks(log: str) -> list[str]:
    """Each with the line before it: an unforeseen error that something survived."""
    lines = log.splitlines()
    places = [place for place, line in enumerate(lines) if line.startswith("Traceback")]
    return ["\n".join(lines[max(0, place - 1) : place + 40]) for place in places[:5]]


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.manual.endurance", description=__doc__)
    parser.add_argument("what", choices=("chaos", "soak"))
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    subprocess.run(["ip", "-V"], check=True, stdout=subprocess.DEVNULL)
    if options.what == "chaos":
        found = chaos(options.nodes or 8, options.seconds or 600.0, options.seed)
    else:
        found = soak(options.nodes or 4, options.seconds or 3600.0)
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
