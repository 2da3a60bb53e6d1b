"""The files of an experiment, each trial read once: the manifest, and of every finished trial its events.

Only finished trials count (their events have an "end"); two cells are compared on the seeds that both have finished.
"""

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, cast

from ftis_node.errors import UsageError
from ftis_node.lab.events import HELD_OUT, EvaluationEvent, Event, StepEvent
from ftis_node.lab.manifest import ATTACK, Cell, Claim, Manifest, read_manifest
from ftis_node.lab.payloads import PAYLOADS
from ftis_node.lab.reporting.figures import PALETTE
from ftis_node.lab.reporting.statistics import COLLAPSED, FALLEN, Interval, mean_interval, no_interval, reached

Measure: TypeAlias = Literal["final", "time", "generated"]
LATE = 4  # one step in so many, the last ones, shows what a node has come to say
_KEPT = StepEvent.__annotations__.keys()  # of a step; its diagnostics would fill the memory


@dataclass
class TrialEvents:
    """The events of one trial; `evaluations` by node and set, `steps` by node, in their order.

    seconds: of CPU; None if it has not ended. commit: of the code that ran it, if it says so.
    """

    commit: str = ""
    seconds: float | None = None
    evaluations: dict[tuple[str, str], list[EvaluationEvent]] = field(default_factory=dict)
    steps: dict[str, list[StepEvent]] = field(default_factory=dict)

    def measure(
        self,
        node: str,
        measure: Measure,
        on: str,
        *,
        tail: int,
        target: float,
    ) -> float | None:
        """One seed's value: the mean of the last `tail` evaluations after step 0, or the cost of reaching `target`.

        None where there is no such evaluation; inf where the target was never reached (a censored cost).
        """
        curve = self.evaluations.get((node, on), [])
        if measure == "final":
            after_start = [evaluation["pass_at_1"] for evaluation in curve if evaluation["step"] > 0]
            last = after_start[-tail:]
            if not last:
                return None
            return sum(last) / len(last)
        if not curve:
            return None
        points = [(evaluation[measure], evaluation["pass_at_1"]) for evaluation in curve]
        cost = reached(points, target)
        if cost is None:
            return math.inf
        return cost

    def start(self, node: str, on: str) -> float | None:
        """pass@1 before the first step; None where nobody looked."""
        curve = self.evaluations.get((node, on), [])
        if not curve or curve[0]["step"] > 0:
            return None
        return curve[0]["pass_at_1"]

    def said(self, node: str, what: str) -> float | None:
        """In the last quarter of a node's steps, the share of its own completions that carry the payload `what`, or
        their mean `tokens`. None where nothing was counted."""
        steps = self.steps.get(node, [])
        told = [step["payloads"] for step in steps if "payloads" in step]
        quarter = math.ceil(len(told) / LATE)
        completions = 0.0
        found = 0.0
        for counted in told[len(told) - quarter :]:
            completions += counted["completions"]
            found += counted[what] * counted["completions"]
        if not completions:
            return None
        return found / completions


@dataclass(frozen=True)
class Missing:
    """A trial that the report does without, and why."""

    cell: str
    seed: int
    why: str


@dataclass(frozen=True)
class Results:
    """A manifest and its finished trials, by cell and seed."""

    manifest: Manifest
    trials: dict[tuple[str, int], TrialEvents]
    missing: Sequence[Missing]

    @property
    def cells(self) -> list[str]:
        """Names of the cells with a finished trial, in the manifest's order."""
        finished = {cell for cell, _ in self.trials}
        return [cell.name for cell in self.manifest.cells if cell.name in finished]

    def cell(self, name: str) -> Cell:
        """The manifest's cell. Raises StopIteration if it has none of this name."""
        return next(cell for cell in self.manifest.cells if cell.name == name)

    def label(self, cell: str) -> str:
        """What the report calls a cell."""
        return self.cell(cell).label or cell

    def drawn(self, cell: str) -> tuple[str, str, int]:
        """How its curves are drawn: the group of cells whose panel they are in, "" for all; label; number of the look.

        Where there are more cells than colours, each group has a panel, and cells of one method have one colour.
        """
        cells = self.cells
        if len(cells) <= len(PALETTE):
            return "", self.label(cell), cells.index(cell)
        methods = []
        for name in cells:
            _, _, method = self.label(name).rpartition(": ")
            if method not in methods:
                methods.append(method)
        group, _, method = self.label(cell).rpartition(": ")
        return group, method, methods.index(method)

    def seeds(self, cell: str) -> list[int]:
        """The seeds that the cell has finished, ascending; none for a cell without any."""
        return sorted(seed for name, seed in self.trials if name == cell)

    def of(self, cell: str) -> dict[int, TrialEvents]:
        """Seed → finished trial of the cell, ascending."""
        return {seed: self.trials[cell, seed] for seed in self.seeds(cell)}

    def nodes(self, *cells: str) -> list[str]:
        """The nodes that each of these cells evaluated (all cells if none is given: any of them), in order."""
        evaluated = defaultdict[str, set[str]](set)
        for (cell, _), trial in self.trials.items():
            for node, _ in trial.evaluations:
                evaluated[cell].add(node)
        if cells:
            found = set.intersection(*(evaluated[cell] for cell in cells))
        else:
            found = set().union(*evaluated.values())
        return [node.name for node in self.manifest.nodes if node.name in found]

    def node_label(self, node: str) -> str:
        """The node with its model, and how it is trained if not in full."""
        known = next(known for known in self.manifest.nodes if known.name == node)
        if known.kind == "full":
            return f"{node} ({known.model})"
        return f"{node} ({known.model}, {known.kind})"

    def sets(self) -> list[str]:
        """The names of the evaluation sets, the held-out one first."""
        names = set()
        for trial in self.trials.values():
            for _, on in trial.evaluations:
                names.add(on)
        return sorted(names, key=lambda name: (name != HELD_OUT, name))

    def values(
        self,
        cell: str,
        node: str,
        measure: Measure = "final",
        on: str = HELD_OUT,
    ) -> dict[int, float]:
        """Seed → value of `TrialEvents.measure`, without the seeds that have none."""
        tail = self.manifest.tail
        target = self.manifest.target

        def value(trial: TrialEvents) -> float | None:
            return trial.measure(node, measure, on, tail=tail, target=target)

        return self._by_seed(cell, value)

    def collapsed(self, cell: str, node: str, on: str = HELD_OUT) -> set[int]:
        """The seeds that ended below `COLLAPSED` of their own start and `FALLEN` under it, where that is known.

        The first alone may be luck where the start is chance.
        """
        ends = self.values(cell, node, on=on)
        found = set()
        for seed, start in self._by_seed(cell, lambda trial: trial.start(node, on)).items():
            limit = min(COLLAPSED * start, start - FALLEN)
            if seed in ends and ends[seed] < limit:
                found.add(seed)
        return found

    def settled(self, cell: str, node: str, on: str = HELD_OUT) -> Interval:
        """The final value's mean and interval over the seeds that did not collapse; nan for none."""
        fallen = self.collapsed(cell, node, on)
        ends = self.values(cell, node, on=on)
        kept = [end for seed, end in ends.items() if seed not in fallen]
        if not kept:
            return no_interval(0)
        return mean_interval(kept)

    def said(self, cell: str, node: str, what: str) -> dict[int, float]:
        """Seed → `TrialEvents.said`, without the seeds that have none."""
        return self._by_seed(cell, lambda trial: trial.said(node, what))

    def _by_seed(self, cell: str, of: Callable[[TrialEvents], float | None]) -> dict[int, float]:
        """Seed → what `of` says of its trial, without the seeds of which it says nothing."""
        found = {}
        for seed, trial in self.of(cell).items():
            value = of(trial)
            if value is not None:
                found[seed] = value
        return found

    def payload(self, cell: str) -> str | None:
        """The payload of the cell's attackers, after which its attack is named; None if nobody attacks."""
        attack = str(self.cell(cell).values.get(ATTACK, ""))
        payload = attack.split(" ")[0]
        if payload in PAYLOADS:
            return payload
        return None

    def claimed(self, cell: str, node: str, claim: Claim) -> dict[int, float]:
        """Seed → value of the claim's measure; a payload is that of its first cell."""
        if claim.measure != "payload":
            return self.values(cell, node, claim.measure, claim.on)
        payload = self.payload(claim.a)
        if payload is None:
            return {}
        return self.said(cell, node, payload)

    def commits(self) -> list[str]:
        """The commit of the code that ran the trials; the manifest's where they do not say."""
        told = {trial.commit for trial in self.trials.values() if trial.commit}
        return sorted(told) or [self.manifest.commit]

    def cpu_hours(self) -> float:
        """CPU-hours of all trials that have finished."""
        seconds = sum(trial.seconds or 0.0 for trial in self.trials.values())
        return round(seconds / 3600, 2)


def over_nodes(by_node: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Seed → mean over the nodes, of each node's seed → value; a seed needs all of them."""
    if not by_node:
        return {}
    shared = set.intersection(*map(set, by_node))
    means = {}
    for seed in sorted(shared):
        means[seed] = sum(values[seed] for values in by_node) / len(by_node)
    return means


def read_results(out: Path) -> Results:
    """Reads an experiment's directory.

    Raises:
        UsageError: there is no manifest that can be read, or no trial has finished.
    """
    manifest = read_manifest(out / "manifest.json")
    trials = {}
    missing = []
    for entry in manifest.trials:
        directory = out / entry.directory
        try:
            trial = read_trial(directory / "events.jsonl")
        except FileNotFoundError:
            missing.append(Missing(entry.cell, entry.seed, "not started"))
            continue
        if trial.seconds is None:
            missing.append(Missing(entry.cell, entry.seed, "unfinished"))
            continue
        trial.commit = _commit_of(directory / "trial.json")
        trials[entry.cell, entry.seed] = trial
    if not trials:
        raise UsageError(f"No trial of {out} has finished.", "Run the experiment further, then ask for its report.")
    return Results(manifest, trials, missing)


def _commit_of(path: Path) -> str:
    """The commit that a `trial.json` says; "" where it does not."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["made_by"]["commit"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def read_trial(path: Path) -> TrialEvents:
    """Reads a trial's `events.jsonl`; of steps only what the report needs. A line that a kill cut short is left out.

    Raises:
        FileNotFoundError: the trial has not begun.
    """
    trial = TrialEvents()
    for event in _lines(path):
        if event["event"] == "evaluation":
            of_set = trial.evaluations.setdefault((event["node"], event["set"]), [])
            of_set.append(event)
        elif event["event"] == "step":
            kept = {key: value for key, value in event.items() if key in _KEPT}
            of_node = trial.steps.setdefault(event["node"], [])
            of_node.append(cast(StepEvent, kept))
        elif event["event"] == "end":
            trial.seconds = event["cpu"]
    return trial


def _lines(path: Path) -> Iterator[Event]:
    """The events of a log in their order."""
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # a kill cut this line short
                yield json.loads(line)
