"""A process that is forked for a test is, to all who can see it, one that was started."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.daemons import ENVIRONMENT, run_cli
from tests.support.zygote import MODULES, NAME, _children


def seen(folder):
    """What can be seen of a compute process, and how it ends."""
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-m", "ftis_node.worker", str(theirs.fileno())]
    with ours, theirs, (folder / "log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        end = {
            "pass_fds": (theirs.fileno(),),
            "cwd": folder,
            "start_new_session": True,
            "env": environment,
        }
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **end)
        child = psutil.Process(process.pid)
        ends = [os.readlink(f"/proc/{process.pid}/fd/{end}") for end in (0, 1, 2, theirs.fileno())]
        facts = (ends, child.ppid(), child.cwd(), child.nice(), child.rlimit(psutil.RLIMIT_NOFILE), child.name())
        while not (line := child.cmdline()):  # an exec closes descriptors before it writes the words
            time.sleep(0.01)
        more = (os.getsid(process.pid) == process.pid, line[1:3], child in psutil.Process().children())
        process.kill()
        return (*facts, *more, process.wait())


def test_it_has_the_same_parent_descriptors_limits_and_end(tmp_path, monkeypatch):
    for _ in range(2):
        forked = seen(tmp_path)
    assert NAME in [child.name() for child in _children(psutil.Process())], "the last one was forked"
    with monkeypatch.context() as patch:
        patch.setenv("TESTS_START_PLAIN", "1")
        plain = seen(tmp_path)
    sockets = forked[0].pop(), plain[0].pop()
    assert all(name.startswith("socket:") for name in sockets)
    assert forked == plain
    assert plain[-1] == -signal.SIGKILL
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == plain[4]


def test_commands_print_and_end_alike():
    assert "ftis_node" in MODULES
    for words, code in (
        (("--version",), 0),
        (("status", "--home", "/nowhere"), 1),
        (("jion",), 2),
    ):
        forked = [run_cli(*words) for _ in range(2)][-1]
        plain = run_cli(*words, TESTS_START_PLAIN="1")
        assert forked.returncode == code
        assert forked.stdout == plain.stdout
        assert forked.stderr == plain.stderr


def test_what_cannot_be_started_raises_the_same(tmp_path):
    run_cli("--version"), run_cli("--version")
    with pytest.raises(FileNotFoundError):
        subprocess.run([sys.executable, "-m", "ftis_node"], cwd=tmp_path / "none", env=os.environ | ENVIRONMENT)
