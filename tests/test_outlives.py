"""However a command ends, on a signal or with its terminal, nothing that it started stays."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support.daemons import ENVIRONMENT, command, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SECONDS = 60.0  # until the last one is gone; most are at once
ROOT = Path(__file__).parents[1]
NO_TERMINAL = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)


def demo(path):
    return command("demo", "--output", str(path / "out"))


def bench(path):
    return command("bench", "swarm", "--nodes", "3", "--per-process", "1")


def daemon(path):
    """On two devices, with a tracker that does not end, and a rule that runs answers."""
    hangs = "import time\ninit = log = lambda *given, **named: None\nfinish = lambda: time.sleep(10000)\n"
    (path / "trackio.py").write_text(hangs)
    rows = path / "rows.jsonl"
    sums = [{"prompt": f"{a}+{b}=", "answer": [f"assert {a + b} == 1"]} for a in range(10) for b in range(12)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums))
    place = ("--home", str(path / "home"), "--host", "127.0.0.1", "--model", "tiny-a", "--devices", "cpu,cpu", "--full")
    small = ("--set", "batch_groups=4", "--set", "eval_prompts=4")
    return command("join", *place, "--task", str(rows), "--reward", "tests", "--track", "trackio", *small)


def descendants(pid):
    found = {}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found[process] = f"{process.name()} {' '.join(process.cmdline())}"
    return found


def ends(process, wanted, end):
    """Wait until there are so many descendants of each kind, end the process, and wait until all are gone."""
    deadline = time.monotonic() + 900
    family = {}
    try:
        while any(sum(word in line for line in family.values()) < count for word, count in wanted.items()):
            assert process.poll() is None and time.monotonic() < deadline, f"not {wanted}: {family}"
            time.sleep(0.2)
            family = descendants(process.pid)
        end()
        process.wait(SECONDS)
        gone([*family], SECONDS)
    finally:
        for one in [*family, *descendants(process.pid), process]:
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (demo, {"p2pd -": 3, "ftis_node.worker": 3}),
        (bench, {"p2pd -": 3, "bench.host": 3}),
        (daemon, {"p2pd -": 1, "ftis_node.worker": 2, "judge_child": 1, "jail.py": 1, "tracking_child": 1}),
    ],
)
def test_a_signal_ends_all(tmp_path, line, wanted, number):
    told = os.environ | ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(line(tmp_path), cwd=ROOT, env=told, start_new_session=True, **NO_TERMINAL)
    ends(process, wanted, lambda: process.send_signal(number))


def test_a_compute_process_that_is_stopped_dies_with_its_killed_daemon(tmp_path):
    told = os.environ | ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(daemon(tmp_path), cwd=ROOT, env=told, start_new_session=True, **NO_TERMINAL)

    def stop_and_kill():
        log = tmp_path / "home" / "metrics.jsonl"
        while not (log.exists() and '"event": "step"' in log.read_text()):  # then both have loaded
            time.sleep(0.2)
        for child, line in descendants(process.pid).items():
            if "ftis_node.worker" in line:
                child.suspend()
        process.kill()

    ends(process, {"ftis_node.worker": 2, "judge_child": 1}, stop_and_kill)


@pytest.mark.parametrize("shell", [True, False])
@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("demo", {"p2pd -": 3}),
        ("unit", {"p2pd -": 2, "ftis_node.worker": 2}),
    ],
)
def test_a_terminal_that_is_closed_ends_make(target, wanted, shell):
    """shell: one is there, which tells all that it started."""
    ours, theirs = pty.openpty()
    line = ["setsid", "--ctty", "make", "-o", ".venv/.dev", "-o", ".venv/.installed", target]
    told = os.environ | {"PYTEST_ADDOPTS": "-k 'test_daemons or test_demo'"}
    with open(os.ttyname(theirs), "r+b", buffering=0) as one:
        process = subprocess.Popen(line, cwd=ROOT, env=told, stdin=one, stdout=one, stderr=one)
    os.close(theirs)

    def close():
        if shell:
            os.killpg(process.pid, signal.SIGHUP)
        os.close(ours)

    ends(process, wanted, close)
