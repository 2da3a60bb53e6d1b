"""A home's record of the training that led to a checkpoint: its run, its settings, its evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftis_node.config.run import Run, load_run_file
from ftis_node.errors import UsageError
from ftis_node.observe.metrics import read_events
from ftis_node.store.home import Home

if TYPE_CHECKING:
    from ftis_node.worker.restore import Checkpoint


@dataclass(frozen=True)
class TrainingRecord:
    """Nothing of it need be known: a checkpoint may lie outside the home it is from.

    `settings` and `versions` are of the last start before the checkpoint; `evaluations` are those up to its step.
    """

    run: Run | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, Any]] = ()

    def asked(self) -> dict[str, Any]:
        """The settings that say how the model was asked, where they are known."""
        return {name: self.settings[name] for name in ("chat", "thinking") if name in self.settings}


def run_of(checkpoint: Checkpoint | None) -> Run | None:
    """The run in which a checkpoint was trained; None without one, and where it is not known."""
    if checkpoint is None or checkpoint.home is None:
        return None
    with suppress(UsageError):
        return load_run_file(Home(checkpoint.home).run_file).run
    return None


def record_of(checkpoint: Checkpoint | None) -> TrainingRecord:
    """Read the record of a checkpoint's home; nothing is changed there, and a daemon may be at work."""
    if checkpoint is None or checkpoint.home is None:
        return TrainingRecord()
    home = Home(checkpoint.home)
    events: Sequence[Mapping[str, Any]] = ()
    with suppress(OSError, UnicodeDecodeError):
        events = read_events(home.metrics, "started", "evaluation")
    step = checkpoint.step
    start: Mapping[str, Any] = {}
    evaluations: list[Mapping[str, Any]] = []
    for event in events:
        if step is None or event.get("step", step + 1) > step:
            continue
        if event["event"] == "evaluation":
            evaluations.append(event)
        else:  # what was evaluated after the step that it went on from was of weights that are lost
            start = event
            evaluations = [one for one in evaluations if one["step"] <= event["step"]]
    return TrainingRecord(run_of(checkpoint), start.get("settings", {}), start.get("versions", {}), evaluations)
