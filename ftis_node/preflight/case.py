"""The case: what is checked, and what earlier checks found out for later ones. Light: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftis_node.config.run import Run, RunFile
from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.node.options import JoinOptions
from ftis_node.store.home import Home
from ftis_node.tasks import Task

if TYPE_CHECKING:
    from ftis_node.fit.geometry import Geometry
    from ftis_node.fit.plan import Plan
    from ftis_node.policy.hub import Hub

Layers = Callable[[str], tuple[Settings, Mapping[str, str]]]

# Where a run came from: the doctor's words, and the report's.
ORIGINS = {"the home": "home", "--run": "file", "--peers": "peers"}


@dataclass
class Case:
    """One start, or one machine, that is checked.

    Attributes:
        options: the flags of `join` beside the settings. layers: the settings for a task, and the origin of each.
        starting: a daemon is to start, so the home must be free.
        patience: seconds to wait for what peers find out about this node.
        run_file: the run to join; None if none is known. runs: every run that was met, with its origin.
        refused: the run asks for something that only this node's owner may name; its files are not opened.
        task: the task, once it is loaded. status: the answer of a daemon that runs on the home.
        report: the report of the dry run, in plain values. problems: the errors that `join` would end with.
    """

    options: JoinOptions
    layers: Layers
    starting: bool = False
    patience: float = 3.0
    run_file: RunFile | None = None
    runs: list[tuple[str, RunFile]] = field(default_factory=list)
    refused: bool = False
    task: Task | None = None
    status: dict[str, Any] | None = None
    hub: Hub | None = None
    shape: Geometry | None = None
    plan: Plan | None = None
    report: dict[str, Any] = field(default_factory=lambda: {"run": None, "task": None})
    problems: tuple[UserError, ...] = ()
    _settled: tuple[Settings, Mapping[str, str]] | None = field(default=None, init=False)

    @property
    def home(self) -> Home:
        """The node's home."""
        return self.options.home

    @property
    def task_name(self) -> str:
        """The task that was named, else the run's."""
        return self.options.task_of(self.run_file)

    @property
    def settings(self) -> Settings:
        """The settings. Raises UserError, the same for every check that asks, if they are wrong."""
        return self._layers()[0]

    @property
    def origins(self) -> Mapping[str, str]:
        """The origin of each setting. Raises UserError if the settings are wrong."""
        return self._layers()[1]

    def _layers(self) -> tuple[Settings, Mapping[str, str]]:
        if self._settled is None:
            self._settled = self.layers(self.task_name)
        return self._settled

    def meet(self, run_file: RunFile, origin: str) -> None:
        """Notes a run; the first one decides the task, and so the settings.

        Args:
            origin: one of `ORIGINS`.
        """
        self.runs.append((origin, run_file))
        if self.run_file is None:
            self.run_file, self._settled = run_file, None
            self.report["run"] = run_report(run_file.run) | {"from": ORIGINS[origin]}


def run_report(run: Run) -> dict[str, Any]:
    """A run in plain values, for people."""
    return {"id": run.id.hex(), **run.model_dump(mode="json", exclude={"template", "packet"})}
