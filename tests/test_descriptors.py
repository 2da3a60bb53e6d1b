"""Too many open files are no fault of a disk, and end nothing."""

import asyncio
import contextlib
import errno
import os
import resource
import sqlite3
import subprocess
import sys

import psutil
import pytest
import uvloop

from ftis_node.errors import UserError
from ftis_node.host.descriptors import OutOfFiles, limit, raise_limit, ran_out, wait_for_room
from ftis_node.store.home import Home
from tests.support.daemons import until
from tests.support.steppers import idle_node

NONE_LEFT = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@contextlib.contextmanager
def no_file_left():
    """This process may open none until the block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_row_33_a_node_raises_the_limit_of_open_files_as_far_as_it_may():
    code = (
        "import resource; from ftis_node.host.descriptors import raise_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(__import__('sys').argv[1]))); print(raise_limit())"
    )
    for hard in (64, 300):
        told = subprocess.run([sys.executable, "-c", code, str(hard)], capture_output=True, text=True, check=True)
        assert int(told.stdout) == hard
    assert raise_limit() == limit()


def test_running_out_of_files_is_told_from_other_errors(tmp_path):
    for error in (NONE_LEFT, OSError(errno.ENFILE, "")):
        assert ran_out(error)
    for error in (OSError(errno.ENOSPC, ""), ValueError("x")):
        assert not ran_out(error)

    def unreadable(path):
        with pytest.raises(sqlite3.Error) as error:
            sqlite3.connect(path)
        return error.value

    assert not ran_out(unreadable(tmp_path / "no folder" / "store.sqlite"))
    with no_file_left():
        assert ran_out(unreadable(tmp_path / "store.sqlite"))


async def test_who_runs_out_of_files_waits_until_some_are_closed_or_it_is_to_stop():
    stopping = asyncio.Event()
    with pytest.raises(FileNotFoundError):
        await wait_for_room(FileNotFoundError("x"), stopping)
    assert isinstance(await wait_for_room(NONE_LEFT, stopping), OutOfFiles)
    with no_file_left():
        waiting = asyncio.create_task(wait_for_room(NONE_LEFT, stopping))
        await asyncio.sleep(0)
        assert not waiting.done()
        stopping.set()
        assert isinstance(await waiting, OutOfFiles)


def test_row_33_a_limit_too_low_to_start_with_is_no_full_disk(tmp_path, monkeypatch):
    def none_left(_):
        raise NONE_LEFT

    monkeypatch.setattr(Home, "make_runtime", none_left)
    with pytest.raises(UserError, match=r"more open files than the \d+ that it may have.*ulimit -n"):
        uvloop.run(idle_node(tmp_path).run())


@pytest.mark.slow
def test_row_33_a_daemon_outlives_a_time_without_files(join):
    flags = ("batch_groups=6", "eval_prompts=16", "eval_every=1000", "page=false", "quic=false")
    alone = join("home", "--model", "tiny-a", *(word for pair in flags for word in ("--set", pair)))
    alone.reaches(2, "it trains")
    process = psutil.Process(alone.process.pid)
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    assert soft == min(hard, 65_536)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, hard))
    before = alone.log()
    until(lambda: "Too many files are open" in alone.log()[len(before) :], "it says so", alone.process)
    process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    reached = alone.wait(lambda status: status.get("step"), "it answers again")["step"]
    alone.reaches(reached + 3, "it goes on")
    assert "Make room on its disk" not in alone.log()
