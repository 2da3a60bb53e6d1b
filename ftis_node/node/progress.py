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
    """A node's progress over all its starts; part of every checkpoint. A start that continues from a checkpoint
    replaces it, so what was counted after that checkpoint is lost. The fields' names are those in the checkpoint."""

    step: int = 0  # steps taken, with those that changed nothing
    own_groups_used: int = 0
    foreign_groups_used: Counter[str] = field(default_factory=Counter)  # by peer id, and `OTHERS`
    own_weight: float = 0.0  # Σ |Â|·w·tokens of own samples over all steps
    foreign_weight: float = 0.0  # the same of foreign ones
    skipped: int = 0  # steps that changed nothing
    pass_at_1_before: float | None = None  # of the first evaluation; None before it
    pass_at_1: float | None = None  # of the latest one
    pass_at_1_step: int = 0  # after which step that was
    step_seconds: float = 0.0  # mean of the latest steps; 0 before the first

    @property
    def foreign_weight_share(self) -> float:
        """Foreign samples' part of Σ |Â|·w·tokens over all steps, 0 to 1; 0 before any had weight."""
        total = self.own_weight + self.foreign_weight
        if total:
            return self.foreign_weight / total
        return 0.0

    def add_step(self, own_groups: int, authors: Mapping[str, int], report: StepReport) -> None:
        """Count a step, once, also one that changed nothing: its groups are used up too, but have no weight.

        Args:
            authors: number of foreign groups by peer id.
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
        """Above 1024 authors, count all but the 512 with most groups together, because identities are free: a stranger
        with many keys must not make checkpoints grow."""
        used = self.foreign_groups_used
        if len(used) > AUTHORS_MAX:
            small = [author for author, _ in used.most_common()[AUTHORS_MAX // 2 :] if author != OTHERS]
            used[OTHERS] += sum(used.pop(author) for author in small)

    def facts(self) -> dict[str, Any]:
        """The fields as JSON has them, for a checkpoint's manifest."""
        return {**vars(self), "foreign_groups_used": dict(self.foreign_groups_used)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Progress:
        """What `facts` gave. Raises TypeError for a field that this version does not have."""
        return cls(**{**facts, "foreign_groups_used": Counter(facts["foreign_groups_used"])})


def _sides() -> dict[str, int]:
    """A count each of own ones and of those of others."""
    return {"own": 0, "foreign": 0}


@dataclass
class Totals:
    """Totals since the process started, for `status` and metrics; they only grow, and no checkpoint keeps them. A new
    compute process does not reset them.

    groups: that steps took, own and foreign, a part of a group as one. samples, tokens: those with a gradient. seconds:
    of steps. device: seconds of the compute device since the start of the first step.
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
        """Count the groups of a round that this node generated and did not refuse; later steps may train on them."""
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
