"""What a check says, what it is asked about, and how checks are run: none of them can end or hold up the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ftis_node.config.run import RunFile
from ftis_node.config.settings import Settings
from ftis_node.errors import UserError, brief
from ftis_node.store.home import Home

if TYPE_CHECKING:
    from ftis_node.fit.geometry import Geometry
    from ftis_node.fit.plan import Plan
    from ftis_node.policy.hub import Hub

# warn: it works, or may, and a person should know. fail: it does not.
Verdict = Literal["ok", "warn", "fail"]

_OURS = "This is a mistake of the doctor's, not of this machine's: please report it with `ftis-node bugreport`."


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. advice: what to do, empty if nothing."""

    subject: str
    verdict: Verdict
    text: str
    advice: str = ""


@dataclass
class Case:
    """What is looked at; the last fields are what earlier checks found out for later ones.

    Attributes:
        task: whose caps and data count; the run's, if there is one.
        data: the task's training file, if one was named.
        run: a run file that was named. peers: addresses to dial.
        patience: seconds to wait for what peers find out about this node.
        status: what the daemon on the home says, if one runs. runs: where a run was heard of, and the run.
    """

    settings: Settings
    origins: Mapping[str, str]
    home: Home
    task: str
    data: Path | None = None
    run: Path | None = None
    peers: Sequence[str] = ()
    patience: float = 3.0
    status: dict[str, Any] | None = None
    hub: Hub | None = None
    shape: Geometry | None = None
    plan: Plan | None = None
    runs: list[tuple[str, RunFile]] = field(default_factory=list)


@dataclass(frozen=True)
class Check:
    """A subject and how to look at it. seconds: the most that it may take; None: it has limits of its own."""

    subject: str
    look: Callable[[Case], Iterator[Finding]]
    seconds: float | None = 5.0


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
        yield from check.look(case)
    except UserError as error:
        yield Finding(check.subject, "fail", error.what, error.fix)
    except Exception as error:  # a check meets whatever is broken on this machine, in whatever way
        yield Finding(check.subject, "fail", f"This check itself failed: {brief(error)}.", _OURS)


def _bounded(check: Check, found: Iterator[Finding], seconds: float) -> Iterator[Finding]:
    """From a thread, which is left behind if it hangs: in a name service, a network file system, a driver."""
    told: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def look() -> None:
        for finding in found:
            told.put(finding)
        told.put(None)

    threading.Thread(target=look, daemon=True).start()
    deadline = time.monotonic() + seconds
    while True:
        try:
            finding = told.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            advice = "Something hangs: a disk, a name service or a driver. Mend that and ask again."
            yield Finding(check.subject, "fail", f"It was not known within {seconds:g} s.", advice)
            return
        if finding is None:
            return
        yield finding
