"""Trials: every cell with every seed, nothing left open, and an id for each."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis_node.config.settings import Settings, collect
from ftis_node.errors import UsageError
from ftis_node.lab.experiment import Averaging, CellSpec, Clock, EvaluationSet, Experiment, NodeSpec, Probe, WarmUp

# Part of every trial's id: results of an older version whose meaning differs are not taken for new ones.
TRIAL_SCHEMA = 1


@dataclass(frozen=True)
class Member:
    """A node of a trial, with nothing left open. settings: all that are set, layer upon layer."""

    name: str
    model: str
    warm: WarmUp | None
    script: str
    speed: float
    settings: dict[str, Any]
    private: str = ""

    def facts(self) -> dict[str, Any]:
        """All of it in plain values; what is not private is what it always was."""
        fields = {**vars(self), "warm": self.warm.model_dump() if self.warm else None}
        return fields if self.private else {key: value for key, value in fields.items() if key != "private"}


@dataclass(frozen=True)
class TrialSpec:
    """One cell with one seed: everything in a lab file that decides what happens. until: the pass@1 that ends it.

    Not the code (a trial says which commit ran it) nor the weights behind a model's name.
    """

    seed: int
    task: str
    data: str
    eval_data: str
    collaboration: str
    pace: str
    steps: int
    seconds: float | None
    keep: bool
    payloads: bool
    run: dict[str, Any]
    clock: Clock
    members: tuple[Member, ...]
    evaluate: tuple[EvaluationSet, ...]
    gradients: Probe | None
    until: float | None = None
    average: Averaging | None = None

    @functools.cached_property
    def id(self) -> str:
        """16 hex digits: the same for the same trial, whatever experiment it belongs to."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """All of it in plain values."""
        files = {name: _sha256(path) for name in ("data", "eval_data") if (path := getattr(self, name))}
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for later, absent in (
            ("payloads", False),
            ("until", None),
            ("average", None),
        ):  # without them a trial's id is what it always was
            if fields[later] == absent:
                del fields[later]
        return {
            **fields,
            **({"sha256": files} if files else {}),
            **({"rounds": "by seed"} if self.collaboration == "horizontal" else {}),
            "schema": TRIAL_SCHEMA,
            "clock": self.clock.model_dump(exclude={"per"} if self.clock.per == "group" else None),
            "members": [member.facts() for member in self.members],
            "evaluate": [also.model_dump() for also in self.evaluate],
            "gradients": self.gradients.model_dump() if self.gradients else None,
            **({"average": self.average.model_dump()} if self.average else {}),
        }

    def settings_of(self, member: Member) -> Settings:
        """The member's settings: the daemon's, without its defences and pulling by need unless they are named.

        Raises UsageError for unknown keys and wrong values.
        """
        return collect(task=self.task, flags={"defences": (), "by_need": False, **member.settings}, environment={})[0]


def trials(experiment: Experiment) -> list[TrialSpec]:
    """Every trial, seed by seed, so that an interrupted grid has whole pairs."""
    return [trial_of(experiment, cell, seed) for seed in experiment.seeds for cell in experiment.all_cells()]


def trial_of(experiment: Experiment, cell: CellSpec, seed: int) -> TrialSpec:
    """The trial of a cell with a seed."""
    nodes = [node for node in experiment.nodes if not cell.nodes or node.name in cell.nodes]
    return TrialSpec(
        seed=seed,
        task=experiment.task,
        data=experiment.data,
        eval_data=experiment.eval_data,
        collaboration=cell.collaboration,
        pace=cell.pace,
        steps=experiment.steps,
        seconds=experiment.seconds,
        keep=experiment.keep,
        payloads=experiment.payloads,
        run={**experiment.run, **cell.run},
        clock=experiment.clock,
        members=tuple(_member(experiment, cell, node) for node in nodes),
        evaluate=experiment.evaluate,
        gradients=cell.gradients,
        until=experiment.target if experiment.until == "target" and cell.pace == "free" else None,
        average=cell.average if cell.collaboration == "federated" else None,
    )


def _member(experiment: Experiment, cell: CellSpec, node: NodeSpec) -> Member:
    settings = {**experiment.settings, **node.settings, **cell.settings, **cell.node.get(node.name, {})}
    speed = cell.speed.get(node.name, node.speed)
    return Member(node.name, node.model, node.warm, node.script, speed, settings, node.private)


def _sha256(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "Name a file that exists.") from None
