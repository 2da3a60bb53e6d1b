"""Whether an answer is right, told in a process that can be killed: math-verify, a regular expression, unit tests.

A regular expression may backtrack for longer than anybody lives, and holds the GIL all the while. math-verify builds
and simplifies whatever the text says: `9^{9^9}` takes all memory or for ever, and holds the GIL all the while. So they
run in processes of their own, with limits on memory and time. One that fails to answer is killed, its answer is wrong,
and the next answer gets a new process. Answers that are Python code run in a jail besides (`jail`).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from ftis_node.errors import UsageError, UserError
from ftis_node.host.quiet import QUIET
from ftis_node.installed import to_install
from ftis_node.tasks.asked import START_SECONDS, Asked
from ftis_node.tasks.rewards import ANSWER_CHARACTERS, TEXT_CHARACTERS, Score, code_in, score_mathematics, score_text

SECONDS: Mapping[str, float] = {"math": 1.0, "regex": 0.5, "tests": 3.0, "reasoning-gym": 3.0, "verifiers": 5.0}
MEMORY_BYTES = 1 << 30
_LARGER: Mapping[str, int] = {"verifiers": 4 << 30}  # bytes of address space; it imports much
_STARTING: Mapping[str, float] = {"reasoning-gym": 120.0, "verifiers": 600.0}  # seconds; some load a dataset
_LONGEST: Mapping[str, int] = {"math": ANSWER_CHARACTERS, "regex": TEXT_CHARACTERS, "tests": TEXT_CHARACTERS}

logger = logging.getLogger(__name__)
_JAIL = Path(__file__).with_name("jail.py")
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT")

JAILED = ("tests", "reasoning-gym", "verifiers")
"""The rules that run code of peers, and only in a jail."""


def bare_environment() -> dict[str, str]:
    """The environment of processes that read what strangers wrote: no tokens, no passwords."""
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PYTHONHASHSEED": "0", **QUIET}


def refuse_unjailed(rule: str) -> None:
    """Raise UsageError if a rule needs the jail and this machine has none: it is tried."""
    if rule in JAILED and subprocess.run([sys.executable, "-P", str(_JAIL)]).returncode:
        raise UsageError(
            f"What {rule} judges is run, and nothing can lock it in here.",
            "That needs Linux on x86-64 with seccomp and landlock (5.13); in containers, a new engine.",
        )


class Judge(Asked):
    """Scores by a rule of `JUDGED_RULES`."""

    def __init__(
        self, rule: str = "math", task: str = "", *, seconds: float | None = None, memory: int | None = None
    ) -> None:
        """
        Args:
            task: of a package, whose scorers judge.
            seconds: of wall time that an answer may take; by default those of `SECONDS`.
            memory: bytes of address space of the process; by default 1 GiB, or what the rule needs.

        Raises:
            UsageError: math-verify is not installed.
        """
        if rule == "math" and importlib.util.find_spec("math_verify") is None:
            raise UsageError("Judging mathematics needs math-verify.", f"Run: {to_install('ftis-node[math]')}")
        self._kind = rule
        self.takes_gold = rule not in ("tests", "verifiers")
        memory = memory or _LARGER.get(rule, MEMORY_BYTES)
        starting = _STARTING.get(rule, START_SECONDS)
        super().__init__(task or rule, SECONDS[rule] if seconds is None else seconds, starting, memory)

    def another(self) -> Self:
        return type(self)(self._kind, self._rule, seconds=self._seconds, memory=self._memory)

    def __call__(self, text: str, answer: str) -> Score:
        if self._kind == "math":
            return score_mathematics(self.same, text, answer)
        stripped = code_in if self._kind == "tests" else str
        return score_text(lambda given: self.same(answer, stripped(given)), text)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.unanswered:
            logger.warning("%d answers were given no verdict in time; they count as wrong.", self.unanswered)

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
        return len(answer) <= _LONGEST[self._kind] and self._ask(gold, answer, loose) is True

    def _did_not_start(self) -> UserError:
        try:
            refuse_unjailed(self._kind)
        except UsageError as error:
            return error
        library = {"math": "math_verify", "regex": "re", "tests": "ast"}.get(self._kind, self._kind.replace("-", "_"))
        return UserError(
            f"The process that judges answers by {self._rule} did not start.",
            f"Try whether Python can `import {library}`, within {self._memory >> 20} MiB of memory and "
            f"{self._start_seconds:.0f} s.",
        )

    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C is for the parent.
        return subprocess.Popen(
            self._command(),
            stdin=connection.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=bare_environment(),
            cwd="/",
            start_new_session=True,
        )
