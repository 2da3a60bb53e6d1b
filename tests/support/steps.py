"""Steps that nobody took: their reports, as `metrics.jsonl` has them, and as a node's log does with its starts."""

from typing import Any

from ftis_node.config.settings import Settings
from ftis_node.step_report import BatchReport, Digests, StepReport, StepSeconds, TakenStep

MACHINE = {
    "directory": "/",
    "task": "arithmetic",
    "data": None,
    "eval_data": None,
    "run": "00",
    "kind": "full",
    "settings": Settings().model_dump(mode="json"),
    "device": "cpu",
    "threads": 1,
    "versions": {},
}
FIGURES = {
    "loss": 0.0,
    "gradient_norm": 0.0,
    "own_reward": None,
    "foreign_reward": None,
    "skipped": None,
}


def step_report(**changes: Any) -> StepReport:
    """A good step on nothing."""
    return StepReport(**{"loss": 0.0, "gradient_norm": 0.0, "tokens": 0, "seconds": 0.0} | changes)


def taken_step(step: int = 1, *, report: StepReport | None = None, **batch: Any) -> TakenStep:
    """A step of 2 s; `batch` are fields of its `BatchReport`."""
    groups = {
        "own_groups": 1,
        "foreign_groups": 2,
        "authors": {},
        "own_reward": 0.5,
        "foreign_reward": None,
    }
    made = BatchReport(**groups | {"batch": Digests([], [])} | batch)
    return TakenStep(step, made, None, report or step_report(), StepSeconds(0.5, 0.0, 1.5, 2.0))


def step(number: int, **facts: Any) -> dict[str, Any]:
    """What the daemon writes of a step, as far as the curves need it."""
    foreign = {
        "samples": 10.0,
        "tokens": 100.0,
        "excess": -5.0,
        "filtered_fraction": 0.5,
        "loss_share": 0.25,
    }
    figures = {
        "samples": 10.0,
        "loss_weight": 3.0,
        "negatives": 4.0,
        "filtered": 1.0,
    }
    by_source = {"own": figures, "peer": figures}
    return {
        "step": number,
        "own_reward": 0.5,
        "foreign_reward": number / 1000,
        "bytes_in": 1000 * number,
        "bytes_out": 10 * number,
        "seconds": {"wait": 1.0, "train": 2.0, "total": 6.0},
        "diagnostics": {"overall": {"loss_weight": 6.0}, "foreign": foreign, "sources": by_source},
    } | facts


def started(step: int = 0, *, fresh: bool = False) -> dict[str, Any]:
    return {"event": "started", "step": step, "fresh": fresh, **MACHINE}


def took(*steps: int, mark: str = "") -> list[dict[str, Any]]:
    """Lines of steps; `mark` (hex) tells two lines of the same step apart."""
    batch = {"own": [mark], "foreign": []}
    return [
        {
            "event": "step",
            "step": n,
            "batch": batch,
            "micro_batch_tokens": 64,
            **FIGURES,
        }
        for n in steps
    ]


def resumed(step: int) -> dict[str, Any]:
    return {"event": "resumed", "step": step}


def restored(step: int, weights: int) -> dict[str, Any]:
    return {"event": "restored", "step": step, "weights_of_step": weights}
