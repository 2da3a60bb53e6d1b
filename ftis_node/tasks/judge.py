"""Whether an answer is right, told in a process that can be killed: math-verify, a regular expression, unit tests.

A regular expression may backtrack for longer than anybody lives, and holds the GIL all the while. math-verify builds
and simplifies whatever the text says: `9^{9^9}` takes all memory or for ever, and holds the GIL all the while. So they
run in processes of their own, with limits on memory and time. One that fails to answer is killed, its answer is wrong,
and the next answer gets a new process. Answers that are Python code run in a jail besides (`jail`).
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
from collections.abc import Mapping
from typing import Literal

from ftis_node.errors import UsageError, UserError
from ftis_node.host.quiet import QUIET
from ftis_node.tasks.asked import Asked
from ftis_node.tasks.rewards import TEXT_CHARACTERS

SECONDS: Mapping[str, float] = {"math": 1.0, "regex": 0.5, "tests": 3.0}
MEMORY_BYTES = 1 << 30
ANSWER_CHARACTERS = 300  # of mathematics; the longest gold of MATH-500 has 53
_LONGEST: Mapping[str, int] = {"math": ANSWER_CHARACTERS, "regex": TEXT_CHARACTERS, "tests": TEXT_CHARACTERS}
Rule = Literal["math", "regex", "tests"]

# The rest of the environment, tokens and passwords with it, is none of its business.
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT")


class Judge(Asked):
    """Tells whether answers are right."""

    def __init__(self, rule: Rule = "math", *, seconds: float | None = None, memory: int = MEMORY_BYTES) -> None:
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
        super().__init__(rule, SECONDS[rule] if seconds is None else seconds, memory=memory)

    def same(self, gold: str, answer: str, *, loose: bool = False) -> bool:
        """Whether `answer` is worth what `gold`, an expression in LaTeX, is, matches the regular expression `gold`, or
        is Python code that passes the tests `gold`.

        False if the answer is too long, takes too much time or memory, or ends the process. After too many of these,
        also for the rest of the group (see `begin`).

        Args:
            loose: `answer` is text to find an expression in, rather than one expression.

        Raises:
            UserError: the process cannot be started.
        """
        return len(answer) <= _LONGEST[self._rule] and self._ask(gold, answer, loose) is True

    def _did_not_start(self) -> UserError:
        if self._rule == "tests":
            return UserError(
                "Code cannot be judged here: nothing can lock it in.",
                "The rule tests needs Linux on x86-64 with seccomp and landlock (5.13); in containers, a new engine.",
            )
        library = {"math": "math_verify", "regex": "re"}[self._rule]
        return UserError(
            f"The process that judges answers by the rule {self._rule} did not start.",
            f"Try whether Python can `import {library}`, within {self._memory >> 20} MiB of memory.",
        )

    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C is for the parent.
        return subprocess.Popen(
            self._command(),
            stdin=connection.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ} | {"PYTHONHASHSEED": "0", **QUIET},
            cwd="/",
            start_new_session=True,
        )
