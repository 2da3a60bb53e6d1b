"""systemd is told that the node is up, how it is, and that its loop goes on: sd_notify(3) without a library."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, MutableMapping

IDLE_SECONDS = 10.0  # between reports where nobody set a watchdog
LONGEST_STATUS = 500


class Notifier:
    """Datagrams to the socket that $NOTIFY_SOCKET names; without one, or once it is gone, it says nothing."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Takes its variables out of the environment: what the node starts is not to speak in its name."""
        place = environment.pop("NOTIFY_SOCKET", "")
        pid = environment.pop("WATCHDOG_PID", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        if place.startswith("@"):  # an abstract socket
            place = f"\0{place[1:]}"
        self._place = place
        self.interval = IDLE_SECONDS
        if microseconds.isdecimal() and int(microseconds) > 0 and pid in ("", str(os.getpid())):
            self.interval = int(microseconds) / 2e6

    def tell(self, *lines: str) -> None:
        """Sends assignments, such as ``READY=1``; a manager that does not listen keeps nobody waiting."""
        if not self._place:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
            speaker.setblocking(False)
            speaker.sendto("\n".join(lines).encode(), self._place)

    def start(self, status: Callable[[], str], stalled: Callable[[], float]) -> asyncio.Task[None]:
        """Says that the node is up, and goes on as `accompany` until the task is cancelled."""
        self.tell("READY=1")
        return asyncio.create_task(self.accompany(status, stalled))

    async def accompany(self, status: Callable[[], str], stalled: Callable[[], float]) -> None:
        """How the node is, and, unless it is stalled, that its loop goes on. A loop that is blocked says nothing."""
        while self._place:
            sentence = " ".join(status().split())
            lines = [f"STATUS={sentence[:LONGEST_STATUS]}"]
            if not stalled():
                lines.append("WATCHDOG=1")
            self.tell(*lines)
            await asyncio.sleep(self.interval)
