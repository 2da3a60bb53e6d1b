"""The manifest of an experiment: its cells, nodes, trials and claims. `lab run` writes it, and the report reads it.

A cell is one method with its settings, a trial is one cell with one seed.
"""

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ftis_node.errors import UsageError
from ftis_node.lab.events import HELD_OUT

ALL = "all"
# Among a cell's values.
ATTACK = "attack"
METHOD = "method"
ClaimMeasure: TypeAlias = Literal["final", "time", "generated", "payload"]


class Node(BaseModel):
    """A node of the experiment: its model, or its script, and kind: `full` or `lora`."""

    name: str
    model: str = ""
    kind: str = "full"


class Cell(BaseModel):
    """A method with its settings; the first of a manifest is the baseline. slower: nodes that are not the fastest."""

    name: str
    label: str = ""
    collaboration: str = ""
    pace: str = ""
    nodes: list[str] = []
    slower: list[str] = []
    values: dict[str, Any] = {}


class TrialEntry(BaseModel):
    """Where a trial's events lie; a relative directory is relative to the manifest's, and may not be there yet."""

    id: str = ""
    cell: str
    seed: int
    directory: Path


class Claim(BaseModel):
    """A sentence and the test that it stands or falls by, both fixed before the runs; see `lab.reporting.claims`.

    measure: `final` pass@1, the cost of reaching the target, or the share of own completions in the last quarter of
        the steps that carries the payload of cell `a`'s attack.
    margin: in the unit of the measure; None is `statistics.MARGIN` for final values, and no margin test for others.
    factor: what the values of cell `a` are multiplied by before b's are taken from them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    source: Literal["paper", "ours"] = "ours"
    family: str = ""
    compare: Literal["greater", "less", "same", "not worse"]
    a: str
    b: str
    node: str = ALL
    on: str = Field(HELD_OUT, alias="set")
    measure: ClaimMeasure = "final"
    contrast: None = None  # as older manifests say
    margin: float | None = Field(None, gt=0, allow_inf_nan=False)
    factor: float = Field(1.0, gt=0, allow_inf_nan=False)

    @property
    def cells(self) -> tuple[str, str]:
        return self.a, self.b


class Manifest(BaseModel):
    """`manifest.json` of an experiment, its plan: written before the first trial, and anew by each run. Reports of old
    results read it, so fields may be missing. started: in UTC; versions: of the program and its libraries."""

    version: Literal[1] = Field(1, alias="schema")
    name: str
    title: str = ""
    about: str = ""
    task: str = ""
    steps: int = 0
    tail: int = Field(3, ge=1)
    target: float = 0.7
    seeds: list[int]
    commit: str = ""
    versions: dict[str, Any] = {}
    file_sha256: str = ""
    started: str = ""
    nodes: list[Node] = []
    cells: list[Cell] = Field(min_length=1)
    trials: list[TrialEntry] = []
    claims: list[Claim] = []


def read_manifest(path: Path) -> Manifest:
    """Reads a `manifest.json`.

    Raises:
        UsageError: it is not there, or says what no manifest says.
    """
    mend = "Name the directory that `ftis-node lab run` wrote its results to."
    try:
        return Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        raise UsageError(f"{path.parent} has no manifest.json.", mend) from None
    except ValueError as error:  # a ValidationError too
        place = ""
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            why = first["msg"]
        raise UsageError(f"{path} is no manifest of an experiment: {place} {why}.", mend) from None
