"""The daemons of a week, each in a namespace with a clock of its own, and what can be done to one of them."""

import contextlib
import ctypes
import os
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from ftis_node.lab.bench.namespaces import namespaces, run_tool
from ftis_node.observe.api import link, read_token
from tests.manual.week.diary import SMALL_DISK, WATCH, Role
from tests.support.daemons import Daemon, gone, run_cli

PREFIX = "week"
BRIDGE = f"{PREFIX}-bridge"
DISK_MB = 100
GRACE_SECONDS = 30.0  # after something happened to a node, in which it may catch up


@contextlib.contextmanager
def within(namespace: str) -> Iterator[None]:
    """Sockets of this thread, and processes that it starts, are in a network namespace until the block ends."""
    enter = ctypes.CDLL(None).setns
    with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        assert enter(there.fileno(), 0) == 0, namespace
        try:
            yield
        finally:
            enter(here.fileno(), 0)


class Member:
    """A daemon and what was done to it.

    up: it runs and is not frozen. away: from when to when (unix seconds) something was done to it, and `GRACE_SECONDS`.
    deeds: how often. number: of its namespace. interface: the outer end of its own.
    """

    def __init__(self, role: Role, folder: Path, number: int):
        self.role = role
        self.number = number
        self.trains = role.name != WATCH
        self.namespace = f"{PREFIX}-{number}"
        self.interface = f"{PREFIX}-v{number}"
        self.up = False
        self.deeds = 0
        self.away = []
        self.id = ""
        self._clock = folder / "clock" / role.name
        self._shifts = []
        self._environment = {"WEEK_CLOCK": str(self._clock), "PYTHONPATH": str(self._clock.parent)}
        set_clock = [f"{key}={value}" for key, value in self._environment.items()]
        prefix = ("ip", "netns", "exec", self.namespace, "env", *set_clock, "setpriv", "--pdeathsig", "KILL")
        self.daemon = Daemon(folder / "homes" / role.name, prefix=prefix, host="0.0.0.0")
        self.daemon.words = self.daemon.words if self.trains else ("watch",)
        self.shift(0.0)

    def start(self):
        """Returns, of one that trains or is paused, when it does; at its first start sooner."""
        self.daemon.start(new_group=True)
        self.up = True
        if self.id:
            self.daemon.wait(lambda s: s.get("step") is not None or s["state"] == "PAUSED", "it goes on")

    def stop(self) -> int:
        """Ends it as its owner would; returns its exit code."""
        self.up = False
        return self.daemon.stop(120)

    def kill(self):
        self.up = False
        gone(self.daemon.kill(), 60)

    def freeze(self):
        self.up = False
        self.daemon.freeze()

    def thaw(self):
        self.daemon.thaw()
        self.up = True

    @property
    def ahead(self) -> float:
        """Seconds by which its clock is ahead of this machine's."""
        return self._shifts[-1][1]

    def shift(self, ahead: float):
        """Sets its clock. It is written in place: its processes have the file's memory."""
        with os.fdopen(os.open(self._clock, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(struct.pack("d", ahead))
        self._shifts.append((time.time(), ahead))

    def real(self, told: float) -> float:
        """This machine's time when the node's clock told a time; all are unix seconds."""
        return next((told - ahead for since, ahead in reversed(self._shifts) if told - ahead >= since), told)

    def was_away(self, begin: float, end: float) -> bool:
        """Whether something was done to it between two times, in unix seconds."""
        return any(began <= end and ended >= begin for began, ended in self.away)

    def page(self) -> str | None:
        """The link to its page."""
        if not self.trains:
            printed = re.findall(r"Page: (\S+)\n", self.daemon.log())
            return printed[-1] if printed else None
        address = self.daemon.status().get("page")
        if address is None:
            return None
        return link(address, read_token(self.daemon.home.page_token))

    def cli(self, *words: str) -> str:
        """What a command prints that its owner types, by its clock."""
        done = run_cli(*words, "--home", str(self.daemon.home.path), timeout=240.0, **self._environment)
        assert done.returncode == 0, f"{self.role.name}, {words}: {done.stderr}"
        return done.stdout.strip()


class Fleet:
    """All members, by name. stranger: a namespace for whoever is hostile."""

    def __init__(self, folder: Path, roles: Sequence[Role]):
        self.folder = folder
        self.stranger = f"{PREFIX}-{len(roles)}"
        self.members = {role.name: Member(role, folder, number) for number, role in enumerate(roles)}

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def of(self, run: str) -> list[Member]:
        """Those of a run that train; the first began it."""
        return [member for member in self if member.role.run == run and member.trains]

    def start(self):
        """Returns when all are there, and each has taken a step or keeps its hours."""
        for member in self:
            member.daemon.flags = (*member.role.line, *self._first(member))
            member.start()
            if member.trains:
                member.id = member.daemon.address().rpartition("/p2p/")[2]
            if member.role.run == "own":
                member.daemon.flags = member.role.line
        for member in filter(lambda one: one.trains, self):
            member.daemon.wait(lambda s: (s.get("step") or 0) >= 1 or s["state"] == "PAUSED", "a first step")

    def _first(self, member: Member) -> list[str]:
        """Flags by which a member finds its run. An invitation, and that a run is private, are told once."""
        run = member.role.run
        first = self.of(member.role.run)[0]
        if first is not member and run == "own":
            first.daemon.wait(lambda status: status.get("run"), "a run")
            return [first.cli("invite")]
        if first is not member:
            return ["--peers", first.daemon.address()]
        if member.role.file:
            run_cli("run", "new", *member.role.file, "-o", str(self.folder / f"{run}.toml")).check_returncode()
            return ["--run", str(self.folder / f"{run}.toml")]
        return ["--private"] if run == "own" else []

    def left(self) -> list[str]:
        """What is still there of members that have ended: processes, and directories of sockets."""
        alive = [pid for member in self for pid in in_namespace(member.namespace)]
        homes = [member.daemon.home.runtime() for member in self]
        return [*map(str, alive), *(home.directory for home in homes if home is not None)]

    def clean_up(self):
        for member in self:
            for process in in_namespace(member.namespace):
                process.kill()
            member.daemon.clean_up()


def in_namespace(name: str) -> list[psutil.Process]:
    """The processes of a network namespace."""
    pids = subprocess.check_output(["ip", "netns", "pids", name], text=True).split()
    return [psutil.Process(int(pid)) for pid in pids]


def sweep():
    """Removes what a week that was killed has left."""
    names = f"ip netns | grep -o '^{PREFIX}-[0-9]*' | xargs -rn1 ip netns del; ip link del {BRIDGE} 2>/dev/null"
    subprocess.run(names, shell=True)


@contextlib.contextmanager
def fleet(folder: Path, roles: Sequence[Role]) -> Iterator[Fleet]:
    """Members of these roles, not started yet; all is gone afterwards but what is in the folder."""
    sweep()
    (folder / "clock").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("shifted.py"), folder / "clock" / "sitecustomize.py")
    found = Fleet(folder, roles)
    with contextlib.ExitStack() as stack:
        stack.enter_context(namespaces(len(roles) + 1, None, PREFIX))
        if SMALL_DISK in found.members:
            home = found.members[SMALL_DISK].daemon.home.path
            home.mkdir(parents=True)
            run_tool("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(home))
            stack.callback(run_tool, "umount", "--lazy", str(home))
            stack.callback(shutil.copytree, home, folder / f"{SMALL_DISK}-kept", dirs_exist_ok=True)
        stack.callback(found.clean_up)
        yield found
