"""However a command ends, on a signal or with its terminal, nothing that it started stays."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.daemons import ENVIRONMENT, command, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SECONDS = 60.0  # until the last one is gone; most are at once
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
ROOT = Path(__file__).parents[1]
HANGING_TRACKER = """
import time
init = log = lambda *given, **named: None
finish = lambda: time.sleep(10000)
"""


def demo(path: Path) -> list[str]:
    return command("demo", "--output", str(path / "out"))


def bench(path: Path) -> list[str]:
    return command("bench", "swarm", "--nodes", "3", "--per-process", "1")


def daemon(path: Path) -> list[str]:
    """On two devices, with a tracker, and a rule that runs answers."""
    (path / "trackio.py").write_text(HANGING_TRACKER)
    rows = [{"question": f"{a}+{b}=", "answer": [f"assert {a + b} == 1"]} for a in range(10) for b in range(12)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = ("--home", str(path / "home"), "--host", "127.0.0.1", "--model", "tiny-a", "--devices", "cpu,cpu", "--full")
    task = ("--task", str(path / "rows.jsonl"), "--reward", "tests", "--track", "trackio")
    return command("join", *place, *task, "--set", "batch_groups=4", "--set", "eval_prompts=4")


def descendants(pid: int) -> dict[psutil.Process, str]:
    found = {}
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                found[process] = f"{process.name()} {' '.join(process.cmdline())}"
    return found


def grown(pid: int, wanted: dict[str, int], going: Callable[[], object]) -> list[psutil.Process]:
    """All descendants, when there are so many of each kind. going: keeps it going while it has not ended."""
    deadline = time.monotonic() + 900
    while True:
        found = descendants(pid)
        if all(sum(word in line for line in found.values()) >= count for word, count in wanted.items()):
            return list(found)
        assert psutil.pid_exists(pid) and time.monotonic() < deadline, f"not {wanted}: {found}"
        going()
        time.sleep(0.2)


def ends(process: subprocess.Popen[bytes], wanted: dict[str, int], end: Callable[[], None], going: Callable) -> None:
    """Wait until all are there, end it, and wait until all are gone."""
    family: list[psutil.Process] = []
    try:
        family = grown(process.pid, wanted, going)
        end()
        process.wait(SECONDS)
        gone(family, SECONDS)
    finally:
        for one in [*family, *descendants(process.pid), process]:
            with suppress(psutil.Error):
                one.kill()
        process.wait()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (demo, {"p2pd ": 3, "ftis_node.worker": 3}),
        (bench, {"p2pd ": 3, "bench.host": 3}),
        (daemon, {"p2pd ": 1, "ftis_node.worker": 2, "judge_child": 1, "jail.py": 1, "tracking_child": 1}),
    ],
)
def test_a_signal_ends_all(
    tmp_path: Path, line: Callable[[Path], list[str]], wanted: dict[str, int], number: signal.Signals
) -> None:
    told = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            line(tmp_path),
            cwd=ROOT,
            env=told,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    ends(process, wanted, lambda: process.send_signal(number), lambda: process.poll())


@pytest.mark.parametrize(("target", "wanted"), [("demo", {"p2pd ": 3}), ("unit", {"p2pd ": 2, "ftis_node.worker": 2})])
def test_a_terminal_that_is_closed_ends_make(target: str, wanted: dict[str, int]) -> None:
    ours, theirs = pty.openpty()
    with open(os.ttyname(theirs), "r+b", buffering=0) as terminal:
        process = subprocess.Popen(
            ["setsid", "--ctty", "make", "-o", ".venv/.dev", "-o", ".venv/.installed", target],
            cwd=ROOT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=os.environ | {"PYTEST_ADDOPTS": "-k 'test_daemons or test_demo'"},
        )
    os.close(theirs)
    os.set_blocking(ours, False)

    def read() -> None:
        with suppress(BlockingIOError):
            os.read(ours, 1 << 16)

    ends(process, wanted, lambda: os.close(ours), read)
