"""Real `ftis-node join` daemons for tests: started as a person would, watched through their API, ended by pid."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ftis_node.errors import UserError
from ftis_node.host.loops import PARENT
from ftis_node.observe.api import ask
from ftis_node.observe.metrics import read_events
from ftis_node.store.home import Home

# A learning rate this small keeps the models where they are: one that knows everything has nothing to teach. Steps are
# small, for tests count them.
STILL = ("--set", "learning_rate=1e-7", "--set", "batch_groups=4", "--set", "eval_prompts=4")
WHOLE = ("--set", "batch_groups=24", "--set", "eval_prompts=256")  # what a person's daemon does
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
PATIENCE = 480.0  # seconds until something has come about, however busy the machine is


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "ftis_node", *map(str, args)]


def own_rows(folder: Path) -> str:
    """A file of an owner's own rows, with prompts that no task has."""
    rows = folder / "mine.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"7*8-9={n}+", "answer": n % 9}) for n in range(40)))
    return str(rows)


def run_cli(*args: object, timeout: float = PATIENCE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL,
    )


def program(text: str, *words: object) -> subprocess.Popen[str]:
    """Begins a program that has torch imported already; its stdout is to be read."""
    line = [sys.executable, "-m", "tests.support.program", textwrap.dedent(text), *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT)


def until(condition: Callable[[], Any], what: str, process: subprocess.Popen[Any] | None = None):
    """Polls until the condition holds; fails if that takes too long, or if the process ends before."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, f"it ended before {what}"
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(0.05)


class Daemon:
    """One `ftis-node join` on a home, or what other words say."""

    words: tuple[str, ...] = ("join", *STILL)

    def __init__(self, home: Path, *flags: object, prefix: Sequence[str] = (), host: str = "127.0.0.1"):
        """
        Args:
            prefix: what the command is run by, as in a namespace. host: where it listens.
        """
        self.home = Home(home)
        self.flags = flags
        self.prefix = prefix
        self.host = host
        self.process: subprocess.Popen[bytes] | None = None
        self.children: list[psutil.Process] = []

    def start(self, new_group: bool = False) -> Daemon:
        self.home.path.mkdir(parents=True, exist_ok=True)
        place = ("--home", self.home.path, "--set", f"host={self.host}")
        line = [*self.prefix, *command(*self.words, *place, *self.flags)]
        with (self.home.path / "output.log").open("ab") as log:
            self.process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRONMENT | {PARENT: str(os.getpid())},
                process_group=0 if new_group else None,
            )
        return self

    def status(self) -> dict[str, Any]:
        """The latest answer; {} while there is none."""
        with suppress(UserError):
            return ask(self.home.api_socket(), "/status", dict)
        return {}

    def wait(self, condition: Callable[[dict[str, Any]], Any], what: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Polls the status until the condition holds; fails with the log's end otherwise."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = self.status()
            if status and condition(status):
                return status
            assert self.process.poll() is None, f"ended early: {self.log()[-2000:]}"
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds} s: {what}\n{self.status()}\n{self.log()[-3000:]}")

    def reaches(self, step: int, what: str) -> dict[str, Any]:
        """Wait for this step."""
        return self.wait(lambda status: status.get("step", 0) >= step, what)

    def address(self) -> str:
        return str(self.wait(lambda s: s.get("addresses"), "an address")["addresses"][0])

    def log(self) -> str:
        """What it printed, and what it logged."""
        files = [file for file in (self.home.path / "output.log", self.home.log) if file.exists()]
        return "".join(file.read_text(errors="replace") for file in files)

    def pids(self) -> list[psutil.Process]:
        """The daemon and everything it started."""
        assert self.process is not None
        with suppress(psutil.NoSuchProcess):
            me = psutil.Process(self.process.pid)
            return [me, *me.children(recursive=True)]
        return []

    def freeze(self):
        for process in self.pids():
            process.suspend()

    def thaw(self):
        for process in reversed(self.pids()):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def kill(self) -> list[psutil.Process]:
        """kill -9 of the daemon alone; returns what it had started."""
        family = self.pids()
        self.process.kill()
        self.process.wait()
        return family

    def stop(self, seconds: float = PATIENCE) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        family = self.pids()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        gone(family)
        return code

    def clean_up(self):
        """Whatever a failed test left running."""
        if self.process is not None and self.process.poll() is None:
            for process in reversed(self.pids()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
        runtime = self.home.runtime()
        if runtime is not None:
            shutil.rmtree(runtime.directory, ignore_errors=True)


Join = Callable[..., Daemon]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Starts a daemon on the home of a name, with flags; whatever a failed test left running is ended."""
    running = []

    def start(name: str, *flags: object, new_group: bool = False) -> Daemon:
        running.append(Daemon(tmp_path / name, *flags))
        return running[-1].start(new_group)

    yield start
    for daemon in running:
        daemon.clean_up()


def used_twice(daemon: Daemon) -> int:
    """Groups that more than one step was taken on, also where the first of them was lost."""
    steps = read_events(daemon.home.metrics, "step")
    used = [digest for step in steps for kind in ("own", "foreign") for digest in step["batch"][kind]]
    return len(used) - len(set(used))


def gone(family: list[psutil.Process], seconds: float = PATIENCE):
    """Asserts that all of these processes end within some seconds."""
    _, alive = psutil.wait_procs(family, timeout=seconds)
    assert not alive, f"still running: {alive}"


def kind_of(process: psutil.Process) -> str:
    """Which of a daemon's processes this is."""
    if process.name() == "p2pd":
        return "p2pd"
    return "compute" if "ftis_node.worker" in " ".join(process.cmdline()) else "network"
