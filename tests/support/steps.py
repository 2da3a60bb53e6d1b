"""Steps that nobody took, for tests of what is made of their reports."""

from typing import Any

from ftis_node.step_report import BatchReport, Digests, StepReport, StepSeconds, TakenStep


def step_report(**changes: Any) -> StepReport:
    """A good step on nothing."""
    return StepReport(**{"loss": 0.0, "gradient_norm": 0.0, "tokens": 0, "seconds": 0.0} | changes)


def taken_step(step: int = 1, *, report: StepReport | None = None, **batch: Any) -> TakenStep:
    """A step of 2 s; `batch` are fields of its `BatchReport`."""
    groups = {"own_groups": 1, "foreign_groups": 2, "authors": {}, "own_reward": 0.5, "foreign_reward": None}
    made = BatchReport(**groups | {"batch": Digests([], [])} | batch)
    return TakenStep(step, made, None, report or step_report(), StepSeconds(0.5, 0.0, 1.5, 2.0))
