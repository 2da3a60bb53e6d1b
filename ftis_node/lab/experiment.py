"""What a lab file says: nodes, ways to collaborate, seeds, and the claims to be judged. TOML; see `lab/experiments`.

A *cell* is one way of doing it (a method); a *trial* is one cell with one seed. Every cell starts from what the file
says at its top, and changes some of it. A table of lists, `vary`, makes a cell for each combination of their values.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from ftis_node.errors import UsageError, did_you_mean
from ftis_node.lab.warmup import RECIPES
from ftis_node.settings import Settings, collect

# Part of every trial's id: results of an older version whose meaning differs are not taken for new ones.
TRIAL_SCHEMA = 1

SHIPPED = Path(__file__).parent / "experiments"

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+=, -]*$", max_length=80)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WarmUp(_Table):
    """A built-in model made anew for each seed; the fields are `lab.warmup.Recipe`'s.

    like: the node whose seed it shares; with the same recipe it starts from the very same checkpoint.
    """

    recipe: str
    like: str = ""
    weak: Literal["", "+", "-"] = ""
    style: Literal["terse", "spelled", "backwards"] = "terse"
    harder: float = Field(0.0, ge=0, lt=1)
    forgetful: int | None = Field(None, ge=0, le=9)
    steps: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _known(self) -> WarmUp:
        names = [recipe.name for recipe in RECIPES]
        if self.recipe not in names:
            raise ValueError(f"{did_you_mean(self.recipe, names)}a recipe is one of {', '.join(names)}")
        return self


class NodeSpec(_Table):
    """One node. speed: how many times as fast as the others; script: a partner that does not train, see `scripts`."""

    name: _Name
    model: str = ""
    warm: WarmUp | None = None
    script: Literal["", "random-reasoning", "lying"] = ""
    speed: float = Field(1.0, gt=0)
    settings: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_origin(self) -> NodeSpec:
        if sum((bool(self.model), self.warm is not None, bool(self.script))) != 1:
            raise ValueError(f"node {self.name} needs exactly one of `model`, `warm` and `script`")
        return self


class Clock(_Table):
    """Simulated seconds that a node of speed 1 needs for a group: to generate it, and to train on it."""

    generate: float = Field(1.0, ge=0)
    train: float = Field(0.5, ge=0)


class Probe(_Table):
    """Measure how far gradients on foreign groups are from the gradient on as many own ones; see `lab.bias`."""

    every: int = Field(10, ge=1)
    groups: int = Field(96, ge=1)
    objectives: tuple[str, ...] = ("nois", "vis", "tis", "f-nois", "f-vis", "ftis", "gated")


class EvaluationSet(_Table):
    """Another set of problems, looked at before the first step and after the last. data: a local copy of it."""

    name: _Name
    task: str
    data: str = ""
    prompts: int | None = Field(None, ge=1)


class CellSpec(_Table):
    """One way to collaborate. `nodes` names those that take part (default: all); `node` changes single ones."""

    name: _Name
    label: str = ""
    collaboration: Literal["alone", "vertical", "horizontal"] = "vertical"
    pace: Literal["lockstep", "free"] = "lockstep"
    nodes: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    node: dict[str, dict[str, Any]] = {}
    speed: dict[str, float] = {}
    run: dict[str, Any] = {}
    vary: dict[str, list[Any]] = {}
    values: dict[str, Any] = {}
    gradients: Probe | None = None


class Claim(_Table):
    """Something to be judged by the results; written down before them. See `lab.reporting.claims`."""

    text: str
    source: Literal["paper", "ours"] = "ours"
    family: str = ""
    compare: Literal["greater", "less", "same", "not worse"]
    a: str
    b: str
    contrast: tuple[str, str] | None = None
    node: str = "all"
    set: str = "held-out"
    measure: Literal["final", "time", "generated"] = "final"
    margin: float | None = Field(None, gt=0)


class Experiment(_Table):
    """A whole lab file.

    tail      the final pass@1 is the mean of so many last evaluations
    target    the pass@1 that time and samples are told for
    seconds   simulated ones, after which no step begins
    keep      the last checkpoint of every node
    """

    name: _Name
    title: str = ""
    about: str = ""
    task: str = "arithmetic"
    data: str = ""
    eval_data: str = ""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    steps: int = Field(ge=1)
    seconds: float | None = Field(None, gt=0)
    tail: int = Field(1, ge=1)
    target: float = Field(0.7, gt=0, le=1)
    keep: bool = True
    run: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    clock: Clock = Clock()
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)
    cells: tuple[CellSpec, ...] = Field(min_length=1)
    evaluate: tuple[EvaluationSet, ...] = ()
    claims: tuple[Claim, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        names = [node.name for node in self.nodes]
        if len(set(names)) < len(names):
            raise ValueError("two nodes have the same name")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("a seed is there twice")
        for node in self.nodes:
            if node.warm is not None and node.warm.like and node.warm.like not in names:
                raise ValueError(f"node {node.name} is like {node.warm.like!r}, and there is no such node")
        cells = self.all_cells()
        if len({cell.name for cell in cells}) < len(cells):
            raise ValueError("two cells have the same name")
        for cell in cells:
            for name in (*cell.nodes, *cell.node, *cell.speed):
                if name not in names:
                    raise ValueError(f"cell {cell.name} names node {name!r}, and there is no such node")
        known = {cell.name for cell in cells}
        for claim in self.claims:
            for name in (claim.a, claim.b, *(claim.contrast or ())):
                if name not in known:
                    raise ValueError(f"the claim {claim.text!r} names cell {name!r}, and there is no such cell")
        return self

    def all_cells(self) -> list[CellSpec]:
        """The cells, each `vary` written out: ``name key=value`` for each combination."""
        return [cell for spec in self.cells for cell in _written_out(spec)]


@dataclass(frozen=True)
class Member:
    """A node of a trial, with nothing left open. settings: all that are set, layer upon layer."""

    name: str
    model: str
    warm: WarmUp | None
    script: str
    speed: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class TrialSpec:
    """One cell with one seed: everything that decides what happens, and nothing that does not."""

    seed: int
    task: str
    data: str
    eval_data: str
    collaboration: str
    pace: str
    steps: int
    seconds: float | None
    keep: bool
    run: dict[str, Any]
    clock: Clock
    members: tuple[Member, ...]
    evaluate: tuple[EvaluationSet, ...]
    gradients: Probe | None

    @property
    def id(self) -> str:
        """16 hex digits: the same for the same trial, whatever experiment it belongs to."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            **vars(self),
            "schema": TRIAL_SCHEMA,
            "clock": self.clock.model_dump(),
            "members": [{**vars(m), "warm": m.warm.model_dump() if m.warm else None} for m in self.members],
            "evaluate": [also.model_dump() for also in self.evaluate],
            "gradients": self.gradients.model_dump() if self.gradients else None,
        }

    def settings_of(self, member: Member) -> Settings:
        """The member's settings. Raises UsageError for unknown keys and wrong values."""
        return collect(task=self.task, flags=member.settings, environment={})[0]


def find_experiment(name: str) -> Path:
    """A lab file by its path, or one that comes with the package by its name (`quick`, `paper/size`).

    Raises:
        UsageError: there is neither.
    """
    if name.endswith(".toml") or Path(name).is_file():
        return Path(name)
    known = [str(file.relative_to(SHIPPED).with_suffix("")) for file in sorted(SHIPPED.rglob("*.toml"))]
    if name in known:
        return SHIPPED / f"{name}.toml"
    raise UsageError(
        f"There is no lab file {name!r}.",
        f"{did_you_mean(name, known)}Give the path of a .toml file, or one of: {', '.join(known)}.",
    )


def load_experiment(path: Path) -> Experiment:
    """Reads a lab file, checking everything that can be checked without a model. Raises UsageError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The lab file {path} cannot be read: {error.strerror}.", "Check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"The lab file {path} is not valid TOML: {error}.", "Mend that line.") from None
    try:
        experiment = Experiment.model_validate(document)
    except ValidationError as error:
        raise _as_usage_error(path, error) from None
    for spec in trials(experiment):
        for member in spec.members:
            spec.settings_of(member)
    return experiment


def narrowed(experiment: Experiment, *, seeds: str = "", steps: int | None = None) -> Experiment:
    """Some of it: only these seeds (numbers between commas), or another number of steps. Raises UsageError."""
    changes: dict[str, Any] = {} if steps is None else {"steps": steps}
    if seeds:
        try:
            wanted = tuple(int(part) for part in seeds.split(","))
        except ValueError:
            raise UsageError(f"--seeds {seeds} are no numbers.", "Give them between commas: --seeds 0,1,2.") from None
        if missing := set(wanted) - set(experiment.seeds):
            known = ", ".join(map(str, experiment.seeds))
            raise UsageError(f"The lab file has no seed {min(missing)}.", f"It has {known}.")
        changes["seeds"] = wanted
    return experiment.model_copy(update=changes)


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
        run={**experiment.run, **cell.run},
        clock=experiment.clock,
        members=tuple(_member(experiment, cell, node) for node in nodes),
        evaluate=experiment.evaluate,
        gradients=cell.gradients,
    )


def _member(experiment: Experiment, cell: CellSpec, node: NodeSpec) -> Member:
    settings = {**experiment.settings, **node.settings, **cell.settings, **cell.node.get(node.name, {})}
    speed = cell.speed.get(node.name, node.speed)
    return Member(node.name, node.model, node.warm, node.script, speed, settings)


def _written_out(cell: CellSpec) -> Iterator[CellSpec]:
    for combination in itertools.product(*cell.vary.values()):
        values = dict(zip(cell.vary, combination, strict=True))
        told = " ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
        )
        yield cell.model_copy(
            update={
                "name": f"{cell.name} {told}".strip(),
                "label": f"{cell.label or cell.name} {told}".strip(),
                "settings": {**cell.settings, **values},
                "values": {**cell.values, **values},
                "vary": {},
            }
        )


def _as_usage_error(path: Path, error: ValidationError) -> UsageError:
    """One complaint only, for the others often follow from it; a misspelt key before what is then missing."""
    complaints = error.errors(include_url=False)
    first = next((c for c in complaints if c["type"] == "extra_forbidden"), complaints[0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        return UsageError(f"The lab file {path} has an unknown key {where!r}.", _nearest(key, first["loc"][:-1]))
    message = first["msg"].removeprefix("Value error, ")
    return UsageError(f"The lab file {path} is wrong{f' at {where}' if where else ''}: {message}.", "Mend that value.")


def _nearest(key: str, place: Sequence[int | str]) -> str:
    models: Mapping[str, type[BaseModel]] = {
        **{"nodes": NodeSpec, "cells": CellSpec, "claims": Claim, "evaluate": EvaluationSet},
        **{"clock": Clock, "warm": WarmUp, "gradients": Probe},
    }
    tables = [models[part] for part in place if isinstance(part, str) and part in models]
    known = (tables[-1] if tables else Experiment).model_fields
    return did_you_mean(key, known).rstrip() or f"It may hold: {', '.join(known)}."
