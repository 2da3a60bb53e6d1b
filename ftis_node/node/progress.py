"""A node's progress over all its starts, kept in checkpoints, and its totals in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftis_node.packet import Group
from ftis_node.step_report import OWN, StepReport, TakenStep
from ftis_node.worker.usage import WORK

AUTHORS_MAX = 1024
OTHERS = "others"


@dataclass
class Progress:
    """A node's progress so far; part of every checkpoint."""

    step: int = 0
    own_groups_used: int = 0
    foreign_groups_used: Counter[str] = field(default_factory=Counter)
    own_weight: float = 0.0
    foreign_weight: float = 0.0
    skipped: int = 0
    pass_at_1_before: float | None = None
    pass_at_1: float | None = None
    pass_at_1_step: int = 0
    step_seconds: float = 0.0  # mean of the latest steps

    @property
    def foreign_weight_share(self) -> float:
        """Foreign samples' part of Σ |Â|·w·tokens over all steps."""
        total = self.own_weight + self.foreign_weight
        if total:
            return self.foreign_weight / total
        return 0.0

    def add_step(self, own_groups: int, authors: Mapping[str, int], report: StepReport) -> None:
        """Count a step.

        Args:
            authors: number of groups by peer id.
        """
        self.step += 1
        self.own_groups_used += own_groups
        self.foreign_groups_used.update(authors)
        self._fold_small_authors()
        self.skipped += report.skipped is not None
        for source, figures in ({} if report.skipped else report.diagnostics.sources).items():
            if source == OWN:
                self.own_weight += figures["loss_weight"]
            else:
                self.foreign_weight += figures["loss_weight"]

    def evaluated(self, pass_at_1: float) -> None:
        """Note the present greedy pass@1."""
        self.pass_at_1 = pass_at_1
        self.pass_at_1_step = self.step
        if self.pass_at_1_before is None:
            self.pass_at_1_before = pass_at_1

    def _fold_small_authors(self) -> None:
        """Above a thousand authors, count those with the fewest groups together, because identities are free."""
        used = self.foreign_groups_used
        if len(used) > AUTHORS_MAX:
            small = [author for author, _ in used.most_common()[AUTHORS_MAX // 2 :] if author != OTHERS]
            used[OTHERS] += sum(used.pop(author) for author in small)

    def facts(self) -> dict[str, Any]:
        return {**vars(self), "foreign_groups_used": dict(self.foreign_groups_used)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Progress:
        return cls(**{**facts, "foreign_groups_used": Counter(facts["foreign_groups_used"])})


def _sides() -> dict[str, int]:
    return {"own": 0, "foreign": 0}


@dataclass
class Totals:
    """Totals since the process started; they only grow, and no checkpoint keeps them.

    samples, tokens: those with a gradient. seconds: of steps. device: seconds of the compute device since the start of
    the first step.
    """

    steps: int = 0
    skipped_steps: int = 0
    groups: dict[str, int] = field(default_factory=_sides)
    samples: dict[str, int] = field(default_factory=_sides)
    tokens: dict[str, int] = field(default_factory=_sides)
    generated_groups: int = 0
    generated_completions: int = 0
    generated_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "wait": 0.0, "train": 0.0})
    device: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*WORK, "idle"), 0.0))

    def add_round(self, packets: Sequence[Group]) -> None:
        """Count groups that this node generated."""
        self.generated_groups += len(packets)
        self.generated_completions += sum(len(group.packet.lengths) for group in packets)
        self.generated_tokens += sum(sum(group.packet.lengths) for group in packets)

    def add_step(self, last: TakenStep) -> None:
        """Count a step."""
        report = last.report
        diagnostics = last.report.diagnostics
        self.steps += 1
        self.skipped_steps += report.skipped is not None
        self.groups["own"] += last.batch.own_groups
        self.groups["foreign"] += last.batch.foreign_groups
        for source, figures in {"own": diagnostics.sources.get(OWN, {}), "foreign": diagnostics.foreign}.items():
            if report.skipped is None:
                self.samples[source] += int(figures.get("samples", 0))
                self.tokens[source] += int(figures.get("tokens", 0))
        for spent, latest in ((self.seconds, last.seconds), (self.device, report.device)):
            for phase in spent:
                spent[phase] += getattr(latest, phase)
