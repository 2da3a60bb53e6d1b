"""Whether an answer is right, told in a process that can be killed: math-verify, a regular expression, unit tests.

A regular expression may backtrack for longer than anybody lives, and holds the GIL all the while. math-verify builds
and simplifies whatever the text says: `9^{9^9}` takes all memory or for ever, and holds the GIL all the while. So they
run in processes of their own, with limits on memory and time. One that fails to answer is killed, its answer is wrong,
and the next answer gets a new process. Answers that are Python code run in a jail besides (`jail`).

Pebble's process pool also kills late workers, but its parent unpickles what a worker sends. A worker taken over by a
stranger's text would run code here. So these processes answer in bytes and JSON.
"""

import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from ftis_node.errors import UsageError, UserError
from ftis_node.host.quiet import QUIET
from ftis_node.installed import to_install
from ftis_node.tasks import rewards
from ftis_node.tasks.rewards import ANSWER_CHARACTERS, TEXT_CHARACTERS, Score, Scorer

UNANSWERED_A_GROUP = 3
"""So many answers of a group may get no verdict, or be wrong after half of the time. The rest is wrong unasked, or a
group would take a minute."""
START_SECONDS = 60.0
_CHILD = Path(__file__).with_name("judge_child.py")
_REPLY_BYTES = 1 << 16
SECONDS: Mapping[str, float] = {"math": 1.0, "regex": 0.5, "tests": 3.0, "reasoning-gym": 3.0, "verifiers": 5.0}
MEMORY_BYTES = 1 << 30
_MEMORY_BYTES_OF: Mapping[str, int] = {"verifiers": 4 << 30}  # bytes of address space; it imports much
_STARTING: Mapping[str, float] = {"reasoning-gym": 120.0, "verifiers": 600.0}  # seconds; some load a dataset
_LONGEST: Mapping[str, int] = {"math": ANSWER_CHARACTERS, "regex": TEXT_CHARACTERS, "tests": TEXT_CHARACTERS}

logger = logging.getLogger(__name__)
_JAIL = Path(__file__).with_name("jail.py")
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")

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


class Asked(Scorer):
    """A scorer by a process, which starts with the first answer and ends with `close`, or with a slow verdict."""

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
        self._rule = rule
        self._memory = memory
        self._seconds = seconds
        self._start_seconds = start_seconds
        self.process: subprocess.Popen[bytes] | None = None  # while there is one
        self._connection: socket.socket | None = None

    def begin(self) -> None:
        self._left = UNANSWERED_A_GROUP

    def close(self) -> None:
        connection = self._connection
        process = self.process
        self._connection = None
        self.process = None
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
            connection.settimeout(self._seconds)  # of the whole sendall
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = b""
            while not reply.endswith(b"\n"):  # a child that was taken over may send a byte now and then
                connection.settimeout(began + self._seconds - time.monotonic())
                reply += connection.recv(_REPLY_BYTES - len(reply)) or b"\n"
            verdict, grown = json.loads(reply)
        except (OSError, ValueError):  # a timeout; one that is negative, or a reply that is cut short
            verdict = None
            grown = True
        except BaseException:  # interrupted: the verdict that is still to come must not be taken for the next one's
            self.close()
            raise
        self.unanswered += verdict in (None, "")
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
                # A session of its own: Ctrl-C is for the parent.
                self.process = subprocess.Popen(
                    self._command(), stdin=theirs.fileno(), start_new_session=True, **self._surroundings()
                )
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
        return [sys.executable, "-P", str(_CHILD), str(self._seconds), str(self._memory), self._rule]

    @abstractmethod
    def _surroundings(self) -> dict[str, Any]:
        """What `Popen` gives the child beside its stdin; it says R there when it is ready."""

    @abstractmethod
    def _did_not_start(self) -> UserError:
        """The error for a process that cannot be started."""


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
        kind = rewards.kind_of(rule)
        if rule in rewards.RULES:
            self.form = rewards.form_of(rule)
        if kind == "math" and importlib.util.find_spec("math_verify") is None:
            raise UsageError("Judging mathematics needs math-verify.", f"Run: {to_install('ftis-node[math]')}")
        self._named = rule
        self._kind = kind
        self.takes_gold = kind not in ("tests", "verifiers")
        if seconds is None:
            seconds = SECONDS[kind]
        memory = memory or _MEMORY_BYTES_OF.get(kind, MEMORY_BYTES)
        super().__init__(task or kind, seconds, _STARTING.get(kind, START_SECONDS), memory)

    def another(self) -> Self:
        return type(self)(self._named, self._rule, seconds=self._seconds, memory=self._memory)

    def __call__(self, text: str, answer: str) -> Score:
        if self._kind == "math":
            return rewards.score_mathematics(self.same, text, answer, self.form)
        if self._kind == "tests":
            return rewards.score_text(lambda given: self.same(answer, rewards.code_in(given)), text)
        return rewards.score_text(lambda given: self.same(answer, given), text)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.unanswered:
            logger.warning("%d answers were given no verdict; they count as wrong.", self.unanswered)

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
        what = f"The process that judges answers by {self._rule} did not start."
        within = f"{self._memory >> 20} MiB of memory and {self._start_seconds:.0f} s"
        return UserError(what, f"Try whether Python can `import {library}`, within {within}.")

    def _surroundings(self) -> dict[str, Any]:
        return {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": bare_environment(), "cwd": "/"}
