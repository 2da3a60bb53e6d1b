"""Findings and checks, and the doctor's way to run checks: none of them can end or hold up the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ftis_node.errors import UserError, brief, one_by_one
from ftis_node.preflight.case import Case

# warn: it works, or may, and a person should know. fail: it does not.
Verdict = Literal["ok", "warn", "fail"]
View = Literal["join", "dry-run", "doctor"]

_OURS = "This is a mistake of the doctor's, not of this machine's: please report it with `ftis-node bugreport`."


@dataclass(frozen=True)
class Finding:
    """The result of a check. advice: what to do; empty if nothing."""

    subject: str
    verdict: Verdict
    text: str
    advice: str = ""


Look = Callable[[Case], Iterable[Finding | UserError] | None]


@dataclass(frozen=True)
class Check:
    """A subject and how to check it.

    Attributes:
        look: yields or raises UserError for a reason not to start, and yields findings that only the doctor shows.
        seconds: the most that it may take in the doctor; None: it has limits of its own.
        views: the commands that make it.
    """

    subject: str
    look: Look
    seconds: float | None = 5.0
    views: Sequence[View] = ("doctor",)


def refusals(case: Case, checks: Sequence[Check]) -> Iterator[UserError]:
    """The errors that a start would end with, one by one."""
    for check in checks:
        try:
            for found in check.look(case) or ():
                if isinstance(found, UserError):
                    yield from one_by_one(found)
        except UserError as error:
            yield from one_by_one(error)


def noted(refuse: Callable[[], object]) -> Iterator[UserError]:
    """The error that a function raises, so that the check can go on after it."""
    try:
        refuse()
    except UserError as error:
        yield error


def examine(case: Case, checks: Sequence[Check]) -> Iterator[Finding]:
    """The findings of all checks, each as soon as it is known. A check that raises or hangs is a finding too."""
    for check in checks:
        found = _guarded(check, case)
        yield from found if check.seconds is None else _bounded(check, found, check.seconds)


def failed(findings: Sequence[Finding]) -> bool:
    """Whether any of them is a `fail`."""
    return any(finding.verdict == "fail" for finding in findings)


def _guarded(check: Check, case: Case) -> Iterator[Finding]:
    try:
        for one in check.look(case) or ():
            yield one if isinstance(one, Finding) else Finding(check.subject, "fail", one.what, one.fix)
    except UserError as error:
        yield Finding(check.subject, "fail", error.what, error.fix)
    except Exception as error:  # a broken machine can raise anything
        yield Finding(check.subject, "fail", f"This check itself failed: {brief(error)}.", _OURS)


def _bounded(check: Check, found: Iterator[Finding], seconds: float) -> Iterator[Finding]:
    """The findings of a thread, which is left behind if a name service, a disk or a driver hangs."""
    ready: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def look() -> None:
        for finding in found:
            ready.put(finding)
        ready.put(None)

    threading.Thread(target=look, daemon=True).start()
    deadline = time.monotonic() + seconds
    while True:
        try:
            finding = ready.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            advice = "Something hangs: a disk, a name service or a driver. Mend that and ask again."
            yield Finding(check.subject, "fail", f"It was not known within {seconds:g} s.", advice)
            return
        if finding is None:
            return
        yield finding
