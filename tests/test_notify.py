"""systemd hears that a node is up, how it is, and that its loop goes on; a stalled one keeps silent about that."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftis_node.observe.notify import IDLE_SECONDS, Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """What listens at the other end, as systemd does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def heard(manager: socket.socket) -> list[list[str]]:
    """The datagrams that have come, by lines."""
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode().split("\n"))
        except BlockingIOError:
            return found


async def accompanied(environment: dict[str, str], stalled: float, seconds: float = 0.05) -> None:
    task = Notifier(environment).start(lambda: "ONLINE: Training\nwith 2 peers.", lambda: stalled)
    await asyncio.sleep(seconds)
    task.cancel()


async def test_it_says_that_the_node_is_up_and_then_again_and_again_that_it_goes_on(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}
    await accompanied(environment, stalled=0.0)
    up, *alive = heard(manager)
    assert up == ["READY=1"]
    assert len(alive) > 1
    assert all(lines == ["STATUS=ONLINE: Training with 2 peers.", "WATCHDOG=1"] for lines in alive)
    assert environment == {}, "what the node starts does not speak in its name"


async def test_a_stalled_node_says_how_it_is_and_nothing_to_the_watchdog(manager: socket.socket) -> None:
    await accompanied({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000"}, stalled=7201.0)
    assert {line.partition("=")[0] for lines in heard(manager) for line in lines} == {"READY", "STATUS"}


async def test_a_blocked_loop_says_nothing(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000"}
    task = Notifier(environment).start(lambda: "ONLINE", lambda: 0.0)
    await asyncio.sleep(0.03)
    heard(manager)
    deadline = asyncio.get_running_loop().time() + 0.1
    while asyncio.get_running_loop().time() < deadline:
        pass  # what a bug, or a call that should have been in a thread, does to the loop
    assert heard(manager) == []
    task.cancel()


async def test_an_abstract_socket_is_spoken_to(tmp_path: Path) -> None:
    name = f"@ftis-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:])
        listener.setblocking(False)
        Notifier({"NOTIFY_SOCKET": name}).tell("READY=1")
        assert heard(listener) == [["READY=1"]]


async def test_without_a_manager_or_after_its_end_the_node_is_not_disturbed(tmp_path: Path) -> None:
    await accompanied({}, stalled=0.0)
    await accompanied({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "10000"}, stalled=0.0)


def test_a_watchdog_of_another_process_sets_no_pace() -> None:
    assert Notifier({"WATCHDOG_USEC": "60000000"}).interval == 30.0
    assert Notifier({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}).interval == IDLE_SECONDS
    assert Notifier({"WATCHDOG_USEC": "soon"}).interval == IDLE_SECONDS
