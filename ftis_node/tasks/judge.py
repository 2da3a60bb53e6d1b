"""Whether an answer is right, told in a process that can be killed: by math-verify, or by a regular expression.

A regular expression may backtrack for longer than anybody lives, and holds the GIL all the while. math-verify builds
and simplifies whatever the text says: `9^{9^9}` takes all memory or for ever, and holds the GIL all the while. So
they run in processes of their own, with limits on memory and time; one that fails to answer is killed, its answer is
wrong, and the next answer gets a new process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

from ftis_node.errors import UsageError, UserError
from ftis_node.tasks.rewards import TEXT_CHARACTERS

SECONDS: Mapping[str, float] = {"math": 1.0, "regex": 0.5}
MEMORY_BYTES = 1 << 30
ANSWER_CHARACTERS = 300  # of mathematics; the longest gold of MATH-500 has 53
_LONGEST: Mapping[str, int] = {"math": ANSWER_CHARACTERS, "regex": TEXT_CHARACTERS}

UNANSWERED_A_GROUP = 3
"""So many answers of a group may get no verdict; the rest of it is wrong unasked, or a group would take a minute."""

_START_SECONDS = 60.0
_CHILD = Path(__file__).with_name("judge_child.py")
# The rest of the environment, tokens and passwords with it, is none of its business.
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT")


class Judge:
    """Owns the process, which starts with the first answer and ends with `close`. For one thread at a time."""

    def __init__(
        self, rule: Literal["math", "regex"] = "math", *, seconds: float | None = None, memory: int = MEMORY_BYTES
    ) -> None:
        """
        Args:
            seconds: of wall time that an answer may take; by default those of `SECONDS`.
            memory: bytes of address space of the process.

        Raises:
            UsageError: math-verify is not installed.
        """
        if rule == "math" and importlib.util.find_spec("math_verify") is None:
            raise UsageError(
                "Judging mathematics needs math-verify, which is not installed.", "Run: pip install 'ftis-node[math]'"
            )
        self.started = 0  # processes, up to now
        self.unanswered = 0  # answers that are wrong because nothing was said of them
        self._left: int | None = None  # of what may go unanswered in this group; None: answers come one by one
        self._rule = rule
        self._seconds = SECONDS[rule] if seconds is None else seconds
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """The answers that follow, up to the next `begin`, are of one group (see `UNANSWERED_A_GROUP`)."""
        self._left = UNANSWERED_A_GROUP

    def same(self, gold: str, answer: str, *, loose: bool = False) -> bool:
        """Whether `answer` is worth what `gold`, an expression in LaTeX, is, or matches the regular expression `gold`.

        False for what is too long, takes too long or too much memory, or ends the process, and for the rest of a group
        (see `begin`) of which too many answers did.

        Args:
            loose: `answer` is text to find an expression in, rather than one expression.

        Raises:
            UserError: the process cannot be started.
        """
        if len(answer) > _LONGEST[self._rule]:
            return False
        if self._left == 0:
            self.unanswered += 1
            return False
        connection = self._connection or self._start()
        request = json.dumps([gold, answer, loose]).encode() + b"\n"
        try:
            connection.settimeout(self._seconds)  # of the whole sendall, and then of the wait
            connection.sendall(request)
            letter = connection.recv(1)
        except OSError:  # a timeout is one too
            letter = b""
        except BaseException:  # interrupted: the verdict that is still to come must not be taken for the next one's
            self.close()
            raise
        if letter == b"":
            self.unanswered += 1
            self._left = None if self._left is None else self._left - 1
        if letter not in (b"0", b"1"):
            self.close()
        return letter in (b"1", b"y")

    def close(self) -> None:
        """Ends the process, whatever it is doing; another answer starts another."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._connection = ours
        self.started += 1
        try:
            with theirs:
                self._process = self._spawn(theirs)
            ours.settimeout(_START_SECONDS)
            ready = ours.recv(1)
        except OSError:
            ready = b""
        except BaseException:
            self.close()
            raise
        if ready != b"R":
            self.close()
            library = {"math": "math_verify", "regex": "re"}[self._rule]
            raise UserError(
                f"The process that judges answers by the rule {self._rule} did not start.",
                f"Try whether Python can `import {library}`, within {self._memory >> 20} MiB of memory.",
            )
        return ours

    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        # -P: neither the script's folder nor the one a person happens to be in has modules for it. A session of its
        # own: Ctrl-C is for the parent.
        return subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(os.getpid()), str(self._seconds), str(self._memory), self._rule],
            stdin=connection.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ} | {"PYTHONHASHSEED": "0"},
            cwd="/",
            start_new_session=True,
        )
