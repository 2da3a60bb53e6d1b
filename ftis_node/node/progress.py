"""What a node has done: over all its starts, as its checkpoints remember it, and in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftis_node.packet import Group
from ftis_node.step_report import StepReport, TakenStep
from ftis_node.worker.messages import OWN
from ftis_node.worker.usage import WORK

AUTHORS_MAX, OTHERS = 1024, "others"


@dataclass
class Progress:
    """What a node has done so far. It is part of every checkpoint."""

    step: int = 0
    own_groups_used: int = 0
    foreign_groups_used: Counter[str] = field(default_factory=Counter)
    own_weight: float = 0.0
    foreign_weight: float = 0.0
    skipped: int = 0
    pass_at_1_before: float | None = None
    pass_at_1: float | None = None
    pass_at_1_step: int = 0

    @property
    def foreign_weight_share(self) -> float:
        """Foreign samples' part of Σ |Â|·w·tokens over all steps."""
        total = self.own_weight + self.foreign_weight
        return self.foreign_weight / total if total else 0.0

    def add_step(self, own_groups: int, authors: Mapping[str, int], report: StepReport) -> None:
        """Counts a step.

        Args:
            authors: groups of each, by peer id.
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
        """Notes the greedy pass@1 of now."""
        self.pass_at_1, self.pass_at_1_step = pass_at_1, self.step
        if self.pass_at_1_before is None:
            self.pass_at_1_before = pass_at_1

    def _fold_small_authors(self) -> None:
        """Identities are free: above a thousand authors, those that gave least are counted together."""
        used = self.foreign_groups_used
        if len(used) > AUTHORS_MAX:
            small = [author for author, _ in used.most_common()[AUTHORS_MAX // 2 :] if author != OTHERS]
            used[OTHERS] += sum(used.pop(author) for author in small)

    def facts(self) -> dict[str, Any]:
        return {**vars(self), "foreign_groups_used": dict(self.foreign_groups_used)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Progress:
        return cls(**{**facts, "foreign_groups_used": Counter(facts["foreign_groups_used"])})


@dataclass
class Totals:
    """What was done since the process started: it only grows, and no checkpoint knows it.

    samples and tokens are those that a gradient was computed of, seconds those of steps, device those of the compute
    device from the first step's beginning on.
    """

    steps: int = 0
    skipped_steps: int = 0
    groups: dict[str, int] = field(default_factory=lambda: {"own": 0, "foreign": 0})
    samples: dict[str, int] = field(default_factory=lambda: {"own": 0, "foreign": 0})
    tokens: dict[str, int] = field(default_factory=lambda: {"own": 0, "foreign": 0})
    generated_groups: int = 0
    generated_completions: int = 0
    generated_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "wait": 0.0, "train": 0.0})
    device: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*WORK, "idle"), 0.0))

    def add_round(self, packets: Sequence[Group]) -> None:
        """Counts groups that this node generated."""
        self.generated_groups += len(packets)
        self.generated_completions += sum(len(group.packet.lengths) for group in packets)
        self.generated_tokens += sum(sum(group.packet.lengths) for group in packets)

    def add_step(self, last: TakenStep) -> None:
        """Counts a step."""
        report, diagnostics = last.report, last.report.diagnostics
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
