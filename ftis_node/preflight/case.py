"""The case that is checked, and what checks find; the doctor runs them so that none ends or holds up the others.

Nothing here imports torch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ftis_node.config.run import Run, RunFile, load_run_file
from ftis_node.config.settings import Settings
from ftis_node.errors import UserError, brief, one_by_one
from ftis_node.fit.geometry import Geometry
from ftis_node.fit.plan import Plan
from ftis_node.node.options import JoinOptions
from ftis_node.observe.answers import Status
from ftis_node.policy.names import resolve
from ftis_node.store.home import Home
from ftis_node.swarm.addresses import parse_address
from ftis_node.tasks import Source, Task

if TYPE_CHECKING:
    from ftis_node.policy.availability import Hub

Layers = Callable[[str], tuple[Settings, Mapping[str, str]]]
Origin = Literal["the home", "--run", "--peers"]


@dataclass
class Case:
    """One start, or one machine, that is checked.

    Attributes:
        options: the flags of `join` beside the settings. layers: the settings for a task, and the origin of each.
        starting: a daemon is to start, so the home must be free.
        runs: every run that was met, with its origin; the first is the one to join.
        refused: the run asks for something that only this node's owner may name; its files are not opened.
        task: the task, once it is loaded. download: bytes of its files that a start would fetch first, and their URL.
        own_task: of the owner's own data.
        step, peer_id: those of the home, if it has a checkpoint and a key.
        status: the answer of a daemon that runs on the home.
        hub, shape, plan: the hub's answers, the model's sizes and the plan to train it, once they are known; settled:
            the settings that the plan completes.
        to_start: the run that the node would start, if it would join none.
        problems: the errors that `join` would end with.
    """

    options: JoinOptions
    layers: Layers
    starting: bool = False
    runs: list[tuple[Origin, RunFile]] = field(default_factory=list)
    refused: bool = False
    task: Task | None = None
    own_task: Task | None = None
    download: tuple[int, str] | None = None
    step: int | None = None
    peer_id: str | None = None
    status: Status | None = None
    hub: Hub | None = None
    shape: Geometry | None = None
    plan: Plan | None = None
    settled: Settings | None = None
    to_start: Run | None = None
    problems: tuple[UserError, ...] = ()

    def __post_init__(self) -> None:
        self.layers = functools.cache(self.layers)  # an error is raised anew for every check that asks

    @property
    def home(self) -> Home:
        """The node's home."""
        return self.options.home

    @property
    def run_file(self) -> RunFile | None:
        """The run to join; None if none is known."""
        if not self.runs:
            return None
        return self.runs[0][1]

    @property
    def private(self) -> bool:
        """Whether the run to join, or to start, is for members."""
        run = self.run_file
        invited = self.options.invitation
        return self.options.private or bool(run and run.run.founder) or bool(invited and invited.private)

    @property
    def task_name(self) -> str:
        """The task that was named, else the run's."""
        return self.options.task_of(self.run_file)

    @property
    def source(self) -> Source:
        """The task of that name, with what the owner or the run says of it."""
        return self.options.source(self.run_file)

    @property
    def task_known(self) -> bool:
        """Whether `task_name` will not change: without a run and a named task, the peers' run says which it is."""
        return self.run_file is not None or not self.options.bootstraps or self.options.task is not None

    @property
    def settings(self) -> Settings:
        """The settings. Raises UserError if they are wrong."""
        return self.layers(self.task_name)[0]

    @property
    def origins(self) -> Mapping[str, str]:
        """The origin of each setting. Raises UserError if the settings are wrong."""
        return self.layers(self.task_name)[1]

    def explained(self) -> dict[str, dict[str, object]]:
        """Each setting's value, as JSON, and origin. Raises UserError if the settings are wrong."""
        values = self.settings.model_dump(mode="json")
        return {name: {"value": value, "origin": self.origins[name]} for name, value in values.items()}


def case_of(options: JoinOptions, layers: Layers) -> Case:
    """The case of the doctor, with the runs that are known; of the home whatever can be read.

    Raises:
        UsageError: wrong settings or addresses, or a run file that cannot be read.
    """
    case = Case(options, layers)
    place = options.home
    named: list[tuple[Origin, RunFile]] = []
    if options.run is not None:
        named.append(("--run", load_run_file(options.run)))
    with suppress(UserError, OSError):  # the check of the home says that its file is damaged
        if place.run_file.exists():
            case.runs.append(("the home", load_run_file(place.run_file)))
    case.runs += named
    try:
        resolve(case.settings.model)  # a GGUF file becomes a folder here: it may take longer than a check
    except UserError:
        if case.origins["model"] != "home":  # the checks of the model say that its folder is gone
            raise
    for text in options.peers:
        parse_address(text)
    return case


# --- what checks find -------------------------------------------------------------------------------------------------

Verdict = Literal["ok", "warn", "fail"]
View = Literal["join", "dry-run", "doctor"]

_OURS = "This is a mistake of the doctor's, not of this machine's: please report it with `ftis-node bugreport`."


@dataclass(frozen=True)
class Finding:
    """The result of a check. subject: the check's own if it is empty. advice: what to do; empty if nothing."""

    subject: str
    verdict: Verdict
    text: str
    advice: str = ""


Findings = Iterator[Finding]
Checked = Iterator[Finding | UserError]  # errors: reasons not to start


def ok(text: str) -> Finding:
    """It works."""
    return Finding("", "ok", text)


def warn(text: str, advice: str) -> Finding:
    """It works, or may, and a person should know."""
    return Finding("", "warn", text, advice)


def fail(text: str, advice: str) -> Finding:
    """It does not work."""
    return Finding("", "fail", text, advice)


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
    for found in (found for check in checks for found in _found(check, case)):
        if isinstance(found, UserError):
            yield from one_by_one(found)


def _found(check: Check, case: Case) -> Checked:
    try:
        yield from check.look(case) or ()
    except UserError as error:
        yield error


def noted(refuse: Callable[[], object]) -> Iterator[UserError]:
    """The error that a function raises, so that the check can go on after it."""
    try:
        refuse()
    except UserError as error:
        yield error


def examine(case: Case, checks: Sequence[Check]) -> Findings:
    """The findings of all checks, each as soon as it is known. A check that raises or hangs is a finding too."""
    for check in checks:
        found = _guarded(check, case)
        if check.seconds is not None:
            found = _bounded(check, found, check.seconds)
        yield from found


def failed(findings: Sequence[Finding]) -> bool:
    """Whether any of them is a `fail`."""
    return any(finding.verdict == "fail" for finding in findings)


def _guarded(check: Check, case: Case) -> Findings:
    try:
        for one in _found(check, case):
            if isinstance(one, UserError):
                one = fail(one.what, one.fix)
            yield replace(one, subject=one.subject or check.subject)
    except Exception as error:  # a broken machine can raise anything
        yield Finding(check.subject, "fail", f"This check itself failed: {brief(error)}.", _OURS)


def _bounded(check: Check, found: Findings, seconds: float) -> Findings:
    """The findings of a thread, which is left behind if a name service, a disk or a driver hangs."""
    known = []

    def look() -> None:
        for finding in found:
            known.append(finding)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    hangs = thread.is_alive()
    yield from known
    if hangs:
        yield Finding(
            check.subject,
            "fail",
            f"It was not known within {seconds:g} s.",
            "Something hangs: a disk, a name service or a driver. Mend that and ask again.",
        )
