"""A process that judges strangers' text, and is killed when one verdict takes too long.

Pebble's process pool also kills late workers, but its parent unpickles what a worker sends. A worker taken over by a
stranger's text would run code here. So this process answers in bytes and JSON.
"""

from __future__ import annotations

import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from ftis_node.errors import UserError

UNANSWERED_A_GROUP = 3
"""So many answers of a group may get no verdict; the rest of it is wrong unasked, or a group would take a minute."""


class Asked(ABC):
    """Owns the process, which starts with the first answer and ends with `close`. One thread at a time may use it."""

    def __init__(self, seconds: float, start_seconds: float) -> None:
        """
        Args:
            seconds: of wall time that an answer may take, and start_seconds until it is ready.
        """
        self.started = 0  # processes, up to now
        self.unanswered = 0  # answers that are wrong because nothing was said of them
        self._left: int | None = None  # of what may go unanswered in this group; None: answers come one by one
        self._seconds = seconds
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Pid of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """The answers that follow, up to the next `begin`, are of one group (see `UNANSWERED_A_GROUP`)."""
        self._left = UNANSWERED_A_GROUP

    def close(self) -> None:
        """End the process, whatever it is doing; another answer starts another."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def _ask(self, request: bytes, receive: Callable[[socket.socket], bytes]) -> bytes:
        """Return its answer. It is empty where the process takes too long or dies, and for the rest of a group after
        too many of these.

        Raises:
            UserError: the process cannot be started.
        """
        if self._left == 0:
            self.unanswered += 1
            return b""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it died between two answers: the next one has no part in that
        connection = self._connection or self._start()
        try:
            connection.settimeout(self._seconds)  # of the whole sendall, and then of the wait
            connection.sendall(request)
            reply = receive(connection)
        except OSError:  # a timeout is one too
            reply = b""
        except BaseException:  # interrupted: the verdict that is still to come must not be taken for the next one's
            self.close()
            raise
        if reply == b"":
            self.unanswered += 1
            self._left = None if self._left is None else self._left - 1
            self.close()
        return reply

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._connection = ours
        self.started += 1
        try:
            with theirs:
                self._process = self._spawn(theirs)
            ours.settimeout(self._start_seconds)
            ready = ours.recv(1)
        except OSError:
            ready = b""
        except BaseException:
            self.close()
            raise
        if ready != b"R":
            self.close()
            raise self._did_not_start()
        return ours

    @abstractmethod
    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        """The process, with the connection as its stdin; it says R when it is ready."""

    @abstractmethod
    def _did_not_start(self) -> UserError:
        """The error for a process that cannot be started."""
