"""What is done to the members of a fleet: each event of the diary by name."""

import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import uvloop

from ftis_node.config.hours import is_open, read_hours
from ftis_node.lab.bench.namespaces import run_tool
from ftis_node.observe.metrics import read_events
from ftis_node.store.checkpoints import CheckpointError, verify
from ftis_node.store.home import Home
from ftis_node.swarm.identity import Identity
from tests.hostile.attack import Attack, striking
from tests.hostile.attacks import chosen
from tests.hostile.peer import hostile
from tests.manual.week.diary import AWAY, HOURS, NIGHT, Event
from tests.manual.week.fleet import BRIDGE, GRACE_SECONDS, Fleet, Member, within

WRITE_SECONDS = 60.0  # for which a step and a checkpoint may take on a busy machine; it counts once it is written
AHEAD_SECONDS = 600.0  # of a clock that is set wrong, until the night
ROWS = "1,4,5,6,8,9,10,11,12,13,32"  # of tests/hostile, which fit token runs and text runs
TOUCH_ALL = (NIGHT, "cut_in_two")
TOUCH_NONE = ("attack", "set", AWAY)  # nothing may be lost by these; any other deed touches one member


class Deeds:
    """Does them, one after another; `problems` has what went wrong at once.

    half: ids of those that are cut off from all others.
    """

    def __init__(self, fleet: Fleet, seed: int):
        self.fleet = fleet
        self.problems = []
        self.half = set()
        self._chance = random.Random(seed)
        self._addresses = itertools.count(101)
        self._began = time.time()

    def do(self, event: Event):
        """Does what an event says. An error of the deed itself is a problem, and the week goes on."""
        began = time.time()
        member = self.fleet.members.get(event.who)
        touched = []
        if event.what in TOUCH_ALL:
            touched = list(self.fleet)
        elif member is not None and event.what not in TOUCH_NONE:
            touched = [member]
        for one in touched:
            one.deeds += 1
        print(f"{began - self._began:7.0f} s: {event.what} {event.who}", flush=True)
        try:
            getattr(self, event.what)(member, event.seconds)
        except Exception as error:
            self.problems.append(f"{event.what} {event.who}: {error}")
        ended = time.time()
        for one in touched:
            one.away.append((began, ended + GRACE_SECONDS))
        with (self.fleet.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(asdict(event) | {"began": began, "ended": ended}) + "\n")

    def night(self, _: None, ahead: float):
        """All sleep, and wake up a day later. Who keeps hours must have kept them."""
        for member in self.fleet:
            now = datetime.fromtimestamp(time.time() + member.ahead)
            state = member.daemon.status().get("state")
            may = HOURS not in member.role.flags or is_open(read_hours(HOURS), now)
            if state in ("ONLINE", "ALONE", "PAUSED") and may == (state == "PAUSED"):
                self.problems.append(f"{member.role.name} is {state} at {now:%a %H:%M}")
            member.freeze()
        ahead += min(member.ahead for member in self.fleet)
        for member in self.fleet:
            member.shift(ahead)
            member.thaw()

    def kill(self, member: Member, _: float):
        """What it takes must be within what the minutes between checkpoints allow."""
        home = member.daemon.home
        before = sound_step(home)
        member.kill()
        saved = sound_step(home)
        began = read_events(home.metrics, "started")[-1]["time"]
        steps = [one for one in read_events(home.metrics, "step") if one["time"] > began]
        lost = [member.real(one["time"]) for one in steps if one["step"] > saved >= 0]
        seconds = lost[-1] - lost[0] if lost else 0.0
        member.start()
        assert saved >= before, f"the newest sound checkpoint was of step {before}, and is of {saved}"
        # of two steps one may be being written while the other ends
        assert len(lost) <= 2 or member.role.minutes > 0, f"{len(lost)} steps lost where each is saved"
        assert seconds < 60 * member.role.minutes + WRITE_SECONDS, f"{seconds:.0f} s lost"

    def kill_p2pd(self, member: Member, _: float):
        for process in member.daemon.pids():
            if process.name() == "p2pd":
                process.kill()

    def restart(self, member: Member, _: float):
        code = member.stop()
        member.start()
        assert code == 0, f"it ended with {code}"

    def sleep(self, member: Member, seconds: float):
        member.freeze()
        time.sleep(seconds)
        member.thaw()

    def new_address(self, member: Member, _: float):
        """Its interface has another one."""
        run_tool("ip", "-n", member.namespace, "-4", "addr", "flush", "dev", "eth0")
        address = f"10.203.0.{next(self._addresses)}/24"
        run_tool("ip", "-n", member.namespace, "addr", "add", address, "dev", "eth0")

    def unplug(self, member: Member, seconds: float):
        """It has no network for a while, and then another interface with another address."""
        end = member.interface
        self.half.add(member.id)
        run_tool("ip", "link", "del", end)
        time.sleep(seconds)
        run_tool("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", member.namespace)
        run_tool("ip", "link", "set", end, "master", BRIDGE, "up")
        run_tool("ip", "-n", member.namespace, "link", "set", "eth0", "up")
        self.new_address(member, 0.0)
        self.half.clear()

    def cut_in_two(self, _: Member, seconds: float):
        """The first of each run is cut off from the others; its interface stays."""
        self._cut([one for one in self.fleet if one is self.fleet.of(one.role.run)[0]], seconds)

    def lone_peer_away(self, member: Member, seconds: float):
        """The only peer of another member has no network for a while; its interface stays."""
        self._cut([member], seconds)

    def _cut(self, members: Sequence[Member], seconds: float):
        self.half |= {member.id for member in members}
        for member in members:
            run_tool("ip", "link", "set", member.interface, "nomaster")
        time.sleep(seconds)
        for member in members:
            run_tool("ip", "link", "set", member.interface, "master", BRIDGE)
        self.half.clear()

    def fill_disk(self, member: Member, seconds: float):
        """Its disk is full until it has ended, or for some seconds; then there is room again."""
        filler = member.daemon.home.path / "filler"
        process = member.daemon.process
        assert process is not None
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        filler.unlink()
        if process.returncode is not None:
            member.start()
        assert process.returncode in (None, 1), f"it ended with {process.returncode}"

    def attack(self, member: Member, seconds: float):
        """A hostile peer in the run of a member plays an attack against all of it."""
        addresses = []
        for one in self.fleet.of(member.role.run):
            if one.up:
                named = one.daemon.status()["addresses"]
                addresses.append(next(address for address in named if "/tcp/" in address))
        version = 2 if member.role.run == "text" else 1
        kind = self._chance.choice(chosen(ROWS, version))
        with within(self.fleet.stranger):
            uvloop.run(self._strike(kind, addresses, seconds))

    async def _strike(self, kind: type[Attack], addresses: Sequence[str], seconds: float):
        identity = Identity(self._chance.randbytes(32))
        with tempfile.TemporaryDirectory(prefix="week-hostile-") as folder:
            async with (
                hostile(Path(folder) / "home", addresses, identity, host="0.0.0.0") as peer,
                striking([kind(peer)]),
            ):
                await asyncio.sleep(seconds)

    def set(self, member: Member, _: float):
        wait = self._chance.choice((5.0, 10.0, 20.0))
        assert json.loads(member.cli("set", f"wait={wait}", "--json")) == {"wait": wait}

    def pause(self, member: Member, seconds: float):
        member.cli("pause", "--wait")
        before = member.daemon.status()
        time.sleep(seconds)
        after = member.daemon.status()
        assert before["state"] == after["state"] == "PAUSED" and before["step"] == after["step"], after
        member.cli("resume", "--wait")

    def clock_ahead(self, member: Member, _: float):
        member.shift(member.ahead + AHEAD_SECONDS)

    def leave_and_join(self, member: Member, seconds: float):
        """It finishes, and after a while joins again."""
        member.up = False
        member.cli("finish", "--wait")
        time.sleep(seconds)
        member.start()


def sound_step(home: Home) -> int:
    """The step of the newest sound checkpoint; -1 if there is none."""
    steps = []
    for directory in home.checkpoints.glob("step-*"):
        if directory.suffix:
            continue  # it is being written
        with contextlib.suppress(CheckpointError):
            steps.append(int(verify(directory)["progress"]["step"]))
    return max(steps, default=-1)
