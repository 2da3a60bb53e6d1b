"""Trials: every cell with every seed, nothing left open, and an id for each."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ftis_node.config.settings import Settings, collect
from ftis_node.errors import UsageError
from ftis_node.lab.experiment import Averaging, CellSpec, Clock, EvaluationSet, Experiment, NodeSpec

# Part of every trial's id: results of an older version whose meaning differs are not taken for new ones.
TRIAL_SCHEMA = 1


class TrialSpec(BaseModel):
    """One cell with one seed: everything in a lab file that decides what happens. until: the pass@1 that ends it.

    members: with all settings, layer upon layer. Not the code (a trial names its commit) nor a named model's weights.
    """

    model_config = ConfigDict(frozen=True)

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
    members: tuple[NodeSpec, ...]
    evaluate: tuple[EvaluationSet, ...]
    until: float | None = None
    average: Averaging | None = None

    @functools.cached_property
    def id(self) -> str:
        """16 hex digits: the same for the same trial, whatever experiment it belongs to. It names the trial's folder,
        so results are found again by it. The trial's data files are read for it, once. Raises UsageError, see
        `facts`."""
        facts = json.dumps(self.facts(), sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """All of it in plain values; what a trial does not use is left out, so that its id is what it always was. A new
        field must be left out, too, where it is as before.

        Raises:
            UsageError: a file with data cannot be read.
        """
        facts = self.model_dump()
        for later in ("payloads", "until", "average"):
            if not facts[later]:
                del facts[later]
        if self.clock.per == "group":
            del facts["clock"]["per"]
        for member in facts["members"]:
            for later in ("own_data", "samples"):
                if not member[later]:
                    del member[later]
            warm = member["warm"]
            if warm is not None and warm["long"] is None:
                del warm["long"]
        files = self._files()
        if files:
            facts["sha256"] = {name: _sha256(path) for name, path in files.items()}
        if self.collaboration == "horizontal":
            facts["rounds"] = "by seed"
        facts["gradients"] = None  # could be asked for once
        facts["schema"] = TRIAL_SCHEMA
        return facts

    def _files(self) -> dict[str, str]:
        """Paths of the files with the trial's data, by what they are of; without those that are not given."""
        named = {}
        for also in self.evaluate:
            named[also.name] = also.data or _if_file(also.task)
        for member in self.members:
            named[f"own data of {member.name}"] = _if_file(member.own_data)
            named[f"samples of {member.name}"] = member.samples
        named["data"] = self.data
        named["eval_data"] = self.eval_data
        named["task"] = _if_file(self.task)
        return {name: path for name, path in named.items() if path}

    @property
    def learners(self) -> list[NodeSpec]:
        """Those of the members that train."""
        return [member for member in self.members if not member.script]

    def settings_of(self, member: NodeSpec) -> Settings:
        """The member's settings: the daemon's, without its defences unless they are named.

        Raises UsageError for unknown keys and wrong values.
        """
        flags = {"model": member.model or "made here", "defences": (), **member.settings}
        return collect(task=self.task, flags=flags, environment={})[0]


def own_share(spec: TrialSpec, settings: Settings) -> float:
    """The share of a batch that a member makes itself, 0 to 1: by default an equal one among those that make any."""
    if settings.own_share is None:
        return 1 / generating(spec)
    return settings.own_share


def generating(spec: TrialSpec) -> int:
    """How many members generate: all but listeners (`own_share = 0`), scripts too."""
    return sum(spec.settings_of(member).own_share != 0 for member in spec.members)


def trials(experiment: Experiment) -> list[TrialSpec]:
    """Every trial, seed by seed, so that an interrupted grid has whole pairs; it runs in this order."""
    found = []
    for seed in experiment.seeds:
        for cell in experiment.all_cells():
            found.append(trial_of(experiment, cell, seed))
    return found


def trial_of(experiment: Experiment, cell: CellSpec, seed: int) -> TrialSpec:
    """The trial of a cell with a seed. Its members are in the order of the experiment's nodes. cell: of `all_cells`."""
    until = None
    if experiment.until == "target" and cell.pace == "free":
        until = experiment.target
    members = []
    for node in experiment.nodes:
        if not cell.nodes or node.name in cell.nodes:
            members.append(_member(experiment, cell, node))
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
        members=tuple(members),
        evaluate=experiment.evaluate,
        until=until,
        average=cell.average,
    )


def _member(experiment: Experiment, cell: CellSpec, node: NodeSpec) -> NodeSpec:
    """The node with all its settings in this cell: a later layer counts for more, and no layer is the daemon's own."""
    settings = {
        **experiment.settings,
        **node.settings,
        **cell.settings,
        **cell.node.get(node.name, {}),
    }
    speed = cell.speed.get(node.name, node.speed)
    return node.model_copy(update={"settings": settings, "speed": speed})


def _if_file(task: str) -> str:
    """The task's name, if it is a file's, as seen from the present directory; else ""."""
    if Path(task).is_file():
        return task
    return ""


def _sha256(path: str) -> str:
    """Of a file's bytes, in hex. Raises UsageError if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "Name a file that exists.") from None
