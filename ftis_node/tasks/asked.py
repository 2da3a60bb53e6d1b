"""A process that judges strangers' text, and is killed when one verdict takes too long.

Pebble's process pool also kills late workers, but its parent unpickles what a worker sends. A worker taken over by a
stranger's text would run code here. So this process answers in bytes and JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftis_node.errors import UserError
from ftis_node.tasks.rewards import Scorer

UNANSWERED_A_GROUP = 3
"""So many answers of a group may get no verdict, or be wrong after half of the time. The rest is wrong unasked, or a
group would take a minute."""


START_SECONDS = 60.0
_CHILD = Path(__file__).with_name("judge_child.py")
_REPLY_BYTES = 1 << 16


class Asked(Scorer):
    """Owns the process, which starts with the first answer and ends with `close`."""

    def __init__(self, rule: str, seconds: float, start_seconds: float = START_SECONDS, memory: int = 0) -> None:
        """
        Args:
            rule: math, regex, or the name of a task whose function returns a reward function.
            seconds: wall time that an answer may take; start_seconds: until the process is ready.
            memory: bytes of address space of the process; 0: no limit.
        """
        self.started = 0  # processes, up to now
        self.unanswered = 0  # answers that are wrong because nothing was said of them
        self._left: int | None = None  # of what may go unanswered in this group; None: answers come one by one
        self._rule, self._memory = rule, memory
        self._seconds, self._start_seconds = seconds, start_seconds
        self.process: subprocess.Popen[bytes] | None = None  # while there is one
        self._connection: socket.socket | None = None

    def begin(self) -> None:
        self._left = UNANSWERED_A_GROUP

    def close(self) -> None:
        process, connection = self.process, self._connection
        self.process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def _ask(self, *request: str | bool) -> Any:
        """Return the verdict: None where the process takes too long or dies, and after too many of these in a group.

        Raises:
            UserError: the process cannot be started.
        """
        if self._left == 0:
            self.unanswered += 1
            return None
        if self.process is not None and self.process.poll() is not None:
            self.close()  # it died between two answers: the next one has no part in that
        connection = self._connection or self._start()
        began = time.monotonic()
        try:
            connection.settimeout(self._seconds)  # of the whole sendall, and then of the wait
            connection.sendall(json.dumps(request).encode() + b"\n")
            verdict, grown = json.loads(_reply(connection))
        except (OSError, ValueError):  # a timeout is the former, a reply that is cut short the latter
            verdict, grown = None, True
        except BaseException:  # interrupted: the verdict that is still to come must not be taken for the next one's
            self.close()
            raise
        self.unanswered += verdict is None
        if self._left is not None:  # what a jail inside has ended is wrong, and took long
            self._left -= verdict is None or (not verdict and time.monotonic() - began > self._seconds / 2)
        if grown:
            self.close()
        return verdict

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._connection = ours
        self.started += 1
        try:
            with theirs:
                self.process = self._spawn(theirs)
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

    def _command(self) -> list[str]:
        """The child's command line. -P: neither the script's folder nor the current one has modules for it."""
        limits = (os.getpid(), self._seconds, self._memory)
        return [sys.executable, "-P", str(_CHILD), *map(str, limits), self._rule]

    @abstractmethod
    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        """Start `_command` with the connection as its stdin; it says R when it is ready."""

    @abstractmethod
    def _did_not_start(self) -> UserError:
        """The error for a process that cannot be started."""


def _reply(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.readline(_REPLY_BYTES)
