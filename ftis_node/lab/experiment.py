"""The content of a lab file: nodes, ways to collaborate, seeds, claims to be judged. TOML; see `lab/experiments`.

A *cell* is one way of doing it; a *trial* is one cell with one seed. Every cell starts from what the file says at its
top, and changes some of it. Lists span grids, by every combination of their values: `each` of a node, cell or claim,
whose texts name the values in braces; `methods` of a cell, which are names of `[methods]`; and `vary`, its settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from ftis_node.errors import did_you_mean
from ftis_node.lab.events import HELD_OUT
from ftis_node.lab.manifest import ALL, ATTACK, METHOD, Claim
from ftis_node.lab.payloads import RANDOM, RECORDED, SCRIPTS
from ftis_node.lab.recipes import NAMED
from ftis_node.lab.vocabularies import TOKENIZERS
from ftis_node.worker.messages import OWN_DATA

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+=, -]*$", max_length=80)]


_Values: TypeAlias = dict[str, Any]
"""By key, as TOML has them."""


class _Table(BaseModel):
    """A table of a lab file; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _refer(who: str, kind: str, name: str, known: Collection[str]) -> None:
    """Raises ValueError unless the name is known; its text begins with `who`."""
    if name in known:
        return
    hint = did_you_mean(name, known).rstrip()
    if not hint:
        there = ", ".join(filter(None, known))
        hint = f"There is {there or 'none'}"
    raise ValueError(f"{who} names the {kind} {name!r}. {hint}")


def _check_different(what: str, names: Sequence[Any]) -> None:
    """Raises ValueError if a name, or a number, is there twice."""
    if len(set(names)) < len(names):
        raise ValueError(f"two {what} are the same")


class WarmUp(_Table):
    """A built-in model made anew for each seed; the fields are `lab.warmup.Recipe`'s.

    like: the node whose seed it shares; with the same recipe it starts from the very same checkpoint.
    """

    recipe: str
    like: str = ""
    weak: Literal["", "+", "-"] = ""
    style: Literal["terse", "spelled", "swapped", "backwards"] = "terse"
    harder: float = Field(0.0, ge=0, lt=1)
    long: float | None = Field(None, ge=0, le=1)
    forgetful: int | None = Field(None, ge=0, le=9)
    tokenizer: str = ""
    steps: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _known(self) -> WarmUp:
        """Raises ValueError for a recipe or tokenizer that is not known."""
        _refer("a warm-up", "recipe", self.recipe, NAMED)
        _refer("a warm-up", "tokenizer", self.tokenizer, ("", *TOKENIZERS))
        return self


class NodeSpec(_Table):
    """One node. speed: how many times as fast as the others; script: a partner that does not train, see `scripts`.

    model: beside a script the built-in model whose tokenizer it writes in, and whose log-probs it copies.
    samples: the file of groups that the script `recorded` gives, see `scripts.Recorded`; of its model only the
        tokenizer counts.
    own_data: the task of rows that it alone draws from, for `own_data_share` of its batch.
    """

    name: _Name
    model: str = ""
    warm: WarmUp | None = None
    script: str = ""
    samples: str = ""
    own_data: str = ""
    speed: float = Field(1.0, gt=0)
    settings: _Values = {}

    @model_validator(mode="after")
    def _one_origin(self) -> NodeSpec:
        """Raises ValueError unless the node is exactly one of a named model, a warm-up, and a known script."""
        of_a_model = bool(self.model) and not self.script  # beside a script it is its tokenizer's
        origins = [of_a_model, self.warm is not None, bool(self.script)]
        if sum(origins) != 1:
            raise ValueError(f"node {self.name} needs exactly one of `model`, `warm` and `script`")
        _refer(f"node {self.name}", "script", self.script, ("", RECORDED, *SCRIPTS))
        if bool(self.samples) != (self.script == RECORDED):
            raise ValueError(f"node {self.name}: `samples` belongs to the script {RECORDED!r}, which needs it")
        if self.model and self.script in SCRIPTS and SCRIPTS[self.script][0] == RANDOM:
            raise ValueError(f"the script {self.script!r} writes tokens of tiny-a only: leave `model` out")
        return self


class Clock(_Table):
    """Simulated seconds that a node of speed 1 needs to generate and to train on a group, or each of its tokens."""

    generate: float = Field(1.0, ge=0)
    train: float = Field(0.5, ge=0)
    per: Literal["group", "token"] = "group"


class Averaging(_Table):
    """When the nodes of a federated cell average their weights, and what each counts; see `lab.federation`. every: so
    many steps. weights: `none` never averages."""

    every: int = Field(5, ge=1)
    weights: Literal["none", "equal", "gain", "reward"]


class EvaluationSet(_Table):
    """Another set of problems, looked at before the first step and after the last. data: a local copy of it. prompts:
    only so many of it; None: all.

    The set `own data` is of each node's own rows, those held out; it has no task.
    """

    name: _Name
    task: str = ""
    data: str = ""
    prompts: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _of_a_task(self) -> EvaluationSet:
        """Raises ValueError for a set without a task, but `own data`, or for that with one."""
        if bool(self.task) == (self.name == OWN_DATA):
            raise ValueError(f"a set needs a task, and {OWN_DATA!r}, which is each node's own rows, has none")
        return self


class Method(_Table):
    """Settings that several cells share by name; name and label become a part of theirs."""

    label: str = ""
    settings: _Values = {}


class CellSpec(_Table):
    """One way to collaborate. `nodes` names those that take part (default: all); `node` changes single ones. After
    `all_cells` methods and `vary` are empty, and `values` has what they gave, for the report.

    attack: what the report calls it that some of the nodes do to the others, see `lab.reporting.attacks`.
    """

    name: _Name
    label: str = ""
    attack: str = ""
    methods: tuple[str, ...] = ()
    collaboration: Literal["alone", "vertical", "horizontal", "federated"] = "vertical"
    pace: Literal["lockstep", "free"] = "lockstep"
    nodes: tuple[str, ...] = ()
    settings: _Values = {}
    node: dict[str, _Values] = {}
    speed: dict[str, float] = {}
    run: _Values = {}
    vary: dict[str, list[Any]] = {}
    values: _Values = {}
    average: Averaging | None = None

    @model_validator(mode="after")
    def _averaged(self) -> CellSpec:
        """Raises ValueError unless `average` is there in federated cells, in lock step, and in no others."""
        federated = self.collaboration == "federated"
        averages = self.average is not None
        if federated != averages or (federated and self.pace == "free"):
            raise ValueError(f"cell {self.name}: `average` belongs to a federated cell, in lock step, which needs it")
        return self


class Experiment(_Table):
    """A whole lab file.

    tail      the final pass@1 is the mean of so many last evaluations
    target    the pass@1 whose cost in time and samples the report says
    until     `target` ends a trial at a free pace, once all of its fastest nodes were seen there
    seconds   simulated ones, after which no step begins
    keep      the last checkpoint of every node
    payloads  count what hostile partners want to be said in every node's own completions, see `lab.payloads`
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
    until: Literal["", "target"] = ""
    keep: bool = True
    payloads: bool = False
    run: _Values = {}
    settings: _Values = {}
    clock: Clock = Clock()
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)
    methods: dict[_Name, Method] = {}
    cells: tuple[CellSpec, ...] = Field(min_length=1)
    evaluate: tuple[EvaluationSet, ...] = ()
    claims: tuple[Claim, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _each_written_out(cls, document: Any) -> Any:
        """The document with every `each` replaced by its tables, before anything is checked."""
        if not isinstance(document, dict):
            return document
        written_out = dict(document)
        for key in ("nodes", "cells", "claims"):
            tables = document.get(key)
            if isinstance(tables, list):
                written_out[key] = list(itertools.chain.from_iterable(map(_each, tables)))
        return written_out

    @model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        """Raises ValueError where a name refers to nothing, or is there twice. What needs settings is checked in
        `loading`."""
        if self.payloads and self.task != "arithmetic":
            raise ValueError("payloads are known of the task arithmetic only")
        names = [node.name for node in self.nodes]
        sets = [HELD_OUT]
        for also in self.evaluate:
            sets.append(also.name)
        for cell in self.cells:
            for method in cell.methods:
                _refer("a cell", "method", method, self.methods)
        cells = self.all_cells()
        if not cells:
            raise ValueError("a list is empty, so there is no cell")
        _check_different("nodes", names)
        _check_different("seeds", self.seeds)
        _check_different("cells", [cell.name for cell in cells])
        _check_different(f"evaluation sets (the first is {HELD_OUT!r})", sets)
        self._check_nodes(names)
        nodes_of = {}
        for cell in cells:
            nodes_of[cell.name] = cell.nodes or names
            for name in (*cell.nodes, *cell.node, *cell.speed):
                _refer(f"cell {cell.name}", "node", name, names)
        for claim in self.claims:
            who = f"the claim {claim.text!r}"
            _refer(who, "set", claim.on, sets)
            for name in claim.cells:
                _refer(who, "cell", name, nodes_of)
                _refer(f"{who} about {name}", "node", claim.node, (ALL, *nodes_of[name]))
        return self

    def _check_nodes(self, names: Sequence[str]) -> None:
        """Raises ValueError where a node lacks what a cell or the task needs of it."""
        needs_own_data = any(cell.average is not None for cell in self.cells)
        needs_own_data |= any(also.name == OWN_DATA for also in self.evaluate)
        of_parity = self.task.startswith("ftis_node.lab.parity:")
        for node in self.nodes:
            if needs_own_data and not node.own_data:
                raise ValueError(f"node {node.name} has no `own_data`, which a federated cell trains on")
            if node.warm is None:
                continue
            _refer(f"node {node.name}", "node", node.warm.like, ("", *names))
            if (node.warm.long is not None) != of_parity:
                raise ValueError(f"node {node.name}: a warm-up has `long` if, and only if, the task is of lab.parity")

    def all_cells(self) -> list[CellSpec]:
        """The cells, written out: ``name method`` for each method, ``name key=value`` for what `vary` combines. In the
        file's order; the first is the report's baseline. Each call makes them anew."""
        found = []
        for spec in self.cells:
            lists = dict(spec.vary)
            if spec.methods:
                lists = {METHOD: list(spec.methods)} | lists
            for chosen in _combinations(lists):
                found.append(self._cell(spec, chosen))
        return found

    def _cell(self, spec: CellSpec, chosen: _Values) -> CellSpec:
        """The cell with these settings, and the settings of its method below its own.

        Args:
            chosen: one value for each list of `vary`, and a method's key under `METHOD`.
        """
        name = spec.name
        label = spec.label or spec.name
        method = Method()
        values = dict(spec.values)
        if spec.attack:
            values[ATTACK] = spec.attack
        settings = dict(chosen)
        if METHOD in settings:
            key = settings.pop(METHOD)
            method = self.methods[key]
            values[METHOD] = method.label or key
            name += f" {key}"
            label += f": {values[METHOD]}"
        for key, value in settings.items():
            told = value
            if isinstance(value, float):
                told = f"{value:g}"
            name += f" {key}={told}"
            label += f" {key}={told}"
        changes = {
            "name": name,
            "label": label,
            "settings": {**method.settings, **spec.settings, **settings},
            "values": {**values, **settings},
            "methods": (),
            "vary": {},
        }
        return spec.model_copy(update=changes)


def _combinations(lists: dict[str, list[Any]]) -> Iterator[_Values]:
    """Every combination of the lists' values, by the lists' names; one that is empty if there is no list."""
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def _each(table: Any) -> Iterator[Any]:
    """A table for each combination of the lists of its `each`, whose names in braces are replaced in all its texts."""
    lists = None
    if isinstance(table, dict):
        lists = table.get("each")
    if not isinstance(lists, dict) or not all(isinstance(values, list) for values in lists.values()):
        yield table  # if `each` is something else, it is an unknown key
        return
    rest = dict(table)
    del rest["each"]
    for chosen in _combinations(lists):
        yield _filled_in(rest, chosen)


def _filled_in(value: Any, chosen: _Values) -> Any:
    """The same with each name in braces replaced by what is chosen for it, at any depth, in keys too. It stays a text:
    a number in braces becomes its digits."""
    if isinstance(value, str):
        for name, word in chosen.items():
            value = value.replace(f"{{{name}}}", str(word))
        return value
    if isinstance(value, list):
        return [_filled_in(part, chosen) for part in value]
    if isinstance(value, dict):
        filled = {}
        for key, part in value.items():
            filled[_filled_in(key, chosen)] = _filled_in(part, chosen)
        return filled
    return value
