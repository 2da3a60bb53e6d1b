"""Lab files: found, read, and checked as far as that goes without a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ftis_node.config.reading import read_toml
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, did_you_mean
from ftis_node.lab.experiment import CellSpec, Clock, EvaluationSet, Experiment, NodeSpec, WarmUp
from ftis_node.lab.manifest import Claim
from ftis_node.lab.spec import TrialSpec, trial_of

SHIPPED = Path(__file__).parent / "experiments"

# Fields of the run that a file may set; the rest follows from task and tokenizer. Settings that only the lab makes.
_RUN_KEYS = (
    "group",
    "slots",
    "prompt_tokens",
    "completion_tokens",
    "temperature",
    "template",
    "any_tokenizer",
    "epoch",
)
_TAKEN = {"seed", "steps", "model"}


def find_experiment(name: str) -> Path:
    """A lab file by its path, or one that comes with the package by its name (`quick`, `paper/size`).

    Raises:
        UsageError: there is neither.
    """
    if name.endswith(".toml") or Path(name).is_file():
        return Path(name)
    known = []
    for file in sorted(SHIPPED.rglob("*.toml")):
        known.append(str(file.relative_to(SHIPPED).with_suffix("")))
    if name in known:
        return SHIPPED / f"{name}.toml"
    what = f"There is no lab file {name!r}."
    raise UsageError(what, f"{did_you_mean(name, known)}Give the path of a .toml file, or one of: {', '.join(known)}.")


def load_experiment(path: Path) -> Experiment:
    """Reads a lab file, checking everything that can be checked without a model: each cell with the first seed. Raises
    UsageError, for the first complaint only."""
    try:
        experiment = Experiment.model_validate(read_toml(path, "lab file"))
    except ValidationError as error:
        raise _as_usage_error(path, error) from None
    for cell in experiment.all_cells():
        spec = trial_of(experiment, cell, experiment.seeds[0])
        _check_trial(cell, spec)
    return experiment


def narrowed(experiment: Experiment, *, seeds: str = "", steps: int | None = None) -> Experiment:
    """Some of it: only these seeds (numbers between commas), or another number of steps; all of it without either. A
    trial of other steps has another id. Raises UsageError if the file has not all of the seeds."""
    changes: dict[str, Any] = {}
    if steps is not None:
        changes["steps"] = steps
    if seeds:
        try:
            wanted = tuple(map(int, seeds.split(",")))
        except ValueError:
            raise UsageError(f"--seeds {seeds} are no numbers.", "Give them between commas: --seeds 0,1,2.") from None
        missing = set(wanted) - set(experiment.seeds)
        if missing:
            known = ", ".join(map(str, experiment.seeds))
            raise UsageError(f"The lab file has no seed {min(missing)}.", f"It has {known}.")
        changes["seeds"] = tuple(dict.fromkeys(wanted))
    return experiment.model_copy(update=changes)


def _check_trial(cell: CellSpec, spec: TrialSpec) -> None:
    """Checks a cell's settings and run, member by member. Raises UsageError."""
    for key in spec.run:
        if key not in _RUN_KEYS:
            raise UsageError(f"Cell {cell.name}: a run has no {key!r} to be set here.", did_you_mean(key, _RUN_KEYS))
    if spec.run.get("any_tokenizer") and "prompt_tokens" in spec.run:
        raise UsageError(f"Cell {cell.name}: a run of any tokenizer has no prompt_tokens.", "Set it in other cells.")
    learners = spec.learners
    if not learners:
        raise UsageError(f"Cell {cell.name} has no node that learns.", "Add one with a model.")
    if spec.pace == "free" and not spec.clock.generate and len(learners) < len(spec.members):
        raise UsageError(f"Cell {cell.name}: a script that needs no time never ends.", "Set [clock] generate above 0.")
    settled = []
    for member in spec.members:
        place = f"Cell {cell.name}, node {member.name}"
        taken = _TAKEN & member.settings.keys()
        if taken:
            what = f"{place}: {min(taken)!r} is not a setting here."
            raise UsageError(what, "The file's own `seeds`, `steps` and `model` decide that.")
        try:
            settled.append(spec.settings_of(member))
        except UsageError as error:
            raise UsageError(f"{place}: {error.what}", error.fix) from None
    if spec.collaboration == "horizontal":
        _check_horizontal(cell, settled)


def _check_horizontal(cell: CellSpec, settled: Sequence[Settings]) -> None:
    """Raises UsageError unless parts of all members fit together. settled: each member's settings."""
    batches = {settings.batch_groups for settings in settled}
    shares = [settings.own_share for settings in settled if settings.own_share is not None]
    if len(batches) > 1 or shares or len(settled) < 2:
        what = f"Cell {cell.name} is horizontal, where each of two or more nodes makes its part of every group."
        raise UsageError(what, "Give all the same batch_groups and no own_share.")


def _as_usage_error(path: Path, error: ValidationError) -> UsageError:
    """One complaint only, because the others often follow from it; a misspelt key comes before a missing one."""
    complaints = error.errors(include_url=False)
    complaints.sort(key=lambda complaint: complaint["type"] != "extra_forbidden")
    first = complaints[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        *table, key = first["loc"]
        return UsageError(f"The lab file {path} has an unknown key {where!r}.", _nearest(str(key), table))
    message = first["msg"].removeprefix("Value error, ")
    place = ""
    if where:
        place = f" at {where}"
    return UsageError(f"The lab file {path} is wrong{place}: {message}.", "Mend that value.")


def _nearest(key: str, place: Sequence[int | str]) -> str:
    """What an unknown key of a table may have been meant to be. place: of the table, as pydantic tells it."""
    models: dict[str, type[BaseModel]] = {
        "nodes": NodeSpec,
        "cells": CellSpec,
        "claims": Claim,
        "evaluate": EvaluationSet,
        "clock": Clock,
        "warm": WarmUp,
    }
    table: type[BaseModel] = Experiment
    for part in place:
        table = models.get(str(part), table)
    known = [field.alias or name for name, field in table.model_fields.items()]
    return did_you_mean(key, known).rstrip() or f"It may hold: {', '.join(known)}."
