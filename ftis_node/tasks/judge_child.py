"""The process that judges answers written by strangers; `judge` runs this file as a script and kills it at will.

It knows nothing of this package: stdlib and math-verify only. Requests come as JSON lines `[gold, answer, loose]` over
the socket that is its stdin, verdicts leave as single letters: 1 right, 0 wrong; y and n say the same and that this
process has grown too large to be trusted with another answer. R: ready.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

_IDLE_SECONDS = 5.0  # between looks whether the parent is still there
_GROWN = 0.5  # of the address space that is allowed; beyond it honest answers might run into the limit
_BRACKETS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), (r"\fbox{", "}"))
_BRACKET = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed|\\fbox")  # not \$, which is money


def main(parent: int, seconds: float, memory: int, rule: str) -> None:
    """Serve until the other end is closed, the process `parent` is gone, or an answer takes twice `seconds`.

    Args:
        memory: bytes of address space, for imports and answers together.
        rule: `math` or `regex`.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The kernel ends this process at the alarm whatever Python is busy with, and even if nobody is left to kill it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    verdict = _load() if rule == "math" else _matches
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    connection = socket.socket(fileno=os.dup(0))
    connection.sendall(b"R")
    while (line := next_line(connection, parent)) is not None:
        gold, answer, loose = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        right = verdict(gold, answer, loose)
        signal.setitimer(signal.ITIMER_REAL, 0)
        grown = _address_space() > _GROWN * memory
        connection.sendall((b"y" if right else b"n") if grown else (b"1" if right else b"0"))


def _address_space() -> int:
    """Bytes now in use. Not rusage's largest resident size: a new process has its parent's, and that is a model's."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def next_line(connection: socket.socket, parent: int) -> bytes | None:
    """The next request; None if the other end is closed, or the process `parent` is gone."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not select.select([connection], [], [], _IDLE_SECONDS)[0]:
            if os.getppid() != parent:
                return None
            continue
        part = connection.recv(1 << 16)
        if not part:
            return None
        line += part
    return bytes(line)


def _matches(gold: str, answer: str, _: bool) -> bool:
    """Whether the whole answer matches the regular expression `gold`; one that is none matches nothing."""
    try:
        return re.fullmatch(gold, answer) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _load() -> Callable[[str, str, bool], bool]:
    """Import math-verify; return the function that decides whether an answer is worth the gold one."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()
    latex = [LatexExtractionConfig()]

    def verdict(gold: str, answer: str, loose: bool) -> bool:
        right: list[Any] = parse(f"${gold}$", latex, parsing_timeout=None)
        if loose and verify(right, parse(answer, parsing_timeout=None), timeout_seconds=None):
            return True
        bare = _bare(answer)
        given: list[Any] = [] if bare is None else parse(f"${bare}$", latex, parsing_timeout=None)
        return bool(verify(right, given, timeout_seconds=None))

    # Parsers and caches are built at first use: not within the time of somebody's answer.
    for text in (
        r"\frac{\sqrt{2}x^2}{3}+1",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"(3,\pi]",
        r"x=\text{yes}",
        "1,000",
    ):
        verdict(text, text, False)
        verdict(text, f"The answer is ${text}$, 1/2.", True)
    return verdict


def _bare(answer: str) -> str | None:
    """One expression without the brackets of mathematics around it; None for several: an answer must not hedge."""
    answer = answer.strip()
    for opening, closing in _BRACKETS:
        if answer.startswith(opening) and answer.endswith(closing) and len(answer) >= len(opening + closing):
            answer = answer[len(opening) : -len(closing)].strip()
    if answer.startswith("$") and answer.count("$") == 1:
        answer = answer[1:]  # money again
    return None if _BRACKET.search(answer) or not answer else answer


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
