"""The process that judges answers written by strangers; `judge` runs this file as a script and kills it at will.

It imports nothing of this package but files beside it, and a rule's library. A person's reward function is imported
with all that it needs. Requests come as JSON lines over the socket that is its stdin: `[gold, answer, loose]`, or
`[text, answer]` for a function. Each gets a JSON line `[verdict, grown]`; grown: the process is too large to be
trusted with another answer. R: ready.
"""

import functools
import importlib.util
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GROWN = 0.5  # of the address space that is allowed; beyond it honest answers might run into the limit


def main(seconds: float, memory: int, rule: str) -> None:
    """Serve until the other end is closed, as by the parent's end, or an answer takes twice `seconds`.

    Args:
        memory: bytes of address space, for imports and answers together; 0: neither memory nor files are limited.
        rule: `math`, `regex`, `tests`, or the name of a task of a package, or of a person's with a reward function.
    """
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The kernel ends this process at the alarm whatever Python is busy with, and even if nobody is left to kill it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    kind, _, task = rule.partition(":")
    known: dict[str, Callable[[], Callable[..., object]]] = {
        "math": lambda: _in_a_fork(_beside("math_child").load(), seconds),
        "regex": lambda: _in_a_fork(_matches, seconds),
        "tests": lambda: _locked().examiner(0.8 * seconds),
        "reasoning-gym": lambda: _beside("gym_child").judge(_locked(), 0.8 * seconds),
        "verifiers": lambda: _beside("verifiers_child").judge(_locked(), 0.8 * seconds, task),
    }
    if kind in known:
        verdict = known[kind]()
    else:
        verdict = _own(rule)
    if memory:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    connection.sendall(b"R")
    for line in connection.makefile("rb"):
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        reply = verdict(*json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        grown = memory > 0 and _address_space() > _GROWN * memory
        connection.sendall(json.dumps([reply, grown]).encode() + b"\n")


def _address_space() -> int:
    """Bytes now in use. Not rusage's largest resident size: a new process has its parent's, and that is a model's."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _matches(gold: str, answer: str, _: bool) -> bool:
    """Whether the whole answer matches the regular expression `gold`; one that is none matches nothing."""
    try:
        return re.fullmatch(gold, answer) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _in_a_fork(verdict: Callable[[str, str, bool], bool], seconds: float) -> Callable[[str, str, bool], bool]:
    """The same verdict, each given by a fork that is locked in; by this process where nothing can lock it in."""
    jail = _beside("jail")
    if not jail.can_lock_in():
        return verdict

    def right(gold: str, answer: str, loose: bool) -> bool:
        pid = jail.locked_in(lambda: verdict(gold, answer, loose) or os._exit(1), set(), 2 * seconds)
        return bool(jail.ended_well(pid))

    return right


def _beside(name: str) -> Any:
    """A module of this folder, without its package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _locked() -> Any:
    """The jail; ends this process where nothing can be locked in."""
    jail = _beside("jail")
    if not jail.can_lock_in():
        sys.exit("This machine cannot lock code in.")
    return jail


def _own(name: str) -> Callable[[str, str], list[object] | str]:
    """Imports a person's task; answers the function that gives its verdict on a text and a gold answer."""
    sys.path.insert(0, os.getcwd())  # as `python -m` has it, which the compute process is run by
    from ftis_node.tasks.own import call, judged

    scorer = call(name)[1].scorer
    if scorer is None:
        sys.exit(f"{name} has no reward function any more.")
    return functools.partial(judged, scorer)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
