"""systemd hears that a node is up, how it is, and that its loop goes on; a stalled one keeps silent about that."""

import asyncio
import itertools
import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ftis_node.observe.notify import IDLE_SECONDS, Notifier


@pytest.fixture
def manager(tmp_path) -> Iterator[socket.socket]:
    """What listens at the other end, as systemd does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


async def heard(manager, datagrams):
    """The next datagrams, by lines."""
    loop = asyncio.get_running_loop()
    return [(await loop.sock_recv(manager, 4096)).decode().split("\n") for _ in range(datagrams)]


def speaks(manager):
    """Whether a datagram waits to be read."""
    return bool(select.select([manager], [], [], 0)[0])


@contextmanager
def accompanied(environment, stalled=0.0, status=lambda: "ONLINE: Training\nalone."):
    task = Notifier(environment).start(status, lambda: stalled)
    yield task
    task.cancel()


async def test_it_says_that_the_node_is_up_and_then_again_and_again_that_it_goes_on(manager):
    environment = {
        "NOTIFY_SOCKET": manager.getsockname(),
        "WATCHDOG_USEC": "20000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    with accompanied(environment):
        assert await heard(manager, 3) == [["READY=1"], *[["STATUS=ONLINE: Training alone.", "WATCHDOG=1"]] * 2]
    assert environment == {}, "what the node starts does not speak in its name"


async def test_a_stalled_node_says_how_it_is_and_nothing_to_the_watchdog(manager):
    with accompanied({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000"}, stalled=7201.0):
        told = await heard(manager, 3)
    assert [line.partition("=")[0] for lines in told for line in lines] == ["READY", "STATUS", "STATUS"]


async def test_a_blocked_loop_says_nothing(manager):
    with accompanied({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000"}):
        await heard(manager, 2)
        while speaks(manager):
            manager.recv(4096)
        deadline = asyncio.get_running_loop().time() + 0.1
        while asyncio.get_running_loop().time() < deadline:
            pass  # what a bug, or a call that should have been in a thread, does to the loop
        assert not speaks(manager)


async def test_an_abstract_socket_is_spoken_to(tmp_path):
    name = f"@ftis-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:])
        listener.setblocking(False)
        Notifier({"NOTIFY_SOCKET": name}).tell("READY=1")
        assert await heard(listener, 1) == [["READY=1"]]


async def test_without_a_manager_or_after_its_end_the_node_is_not_disturbed(tmp_path):
    with accompanied({}) as task:
        await task
    times = itertools.count()
    again = asyncio.Event()

    def status():
        if next(times):
            again.set()
        return "ONLINE"

    with accompanied({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "10000"}, status=status):
        await again.wait()


def test_a_watchdog_of_another_process_sets_no_pace():
    assert Notifier({"WATCHDOG_USEC": "60000000"}).interval == 30.0
    assert Notifier({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}).interval == IDLE_SECONDS
    assert Notifier({"WATCHDOG_USEC": "soon"}).interval == IDLE_SECONDS
