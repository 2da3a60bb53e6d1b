"""What a node's log holds of its starts and steps, where only the order of the lines matters."""

from typing import Any

from ftis_node.config.settings import Settings

MACHINE = {"directory": "/", "task": "arithmetic", "data": None, "eval_data": None, "run": "00", "kind": "full"}
MACHINE |= {"settings": Settings().model_dump(mode="json"), "device": "cpu", "threads": 1, "versions": {}}
FIGURES = {"loss": 0.0, "gradient_norm": 0.0, "own_reward": None, "foreign_reward": None, "skipped": None}


def started(step: int = 0, *, fresh: bool = False) -> dict[str, Any]:
    return {"event": "started", "step": step, "fresh": fresh, **MACHINE}


def took(*steps: int, mark: str = "") -> list[dict[str, Any]]:
    """Lines of steps; `mark` (hex) tells two lines of the same step apart."""
    batch = {"own": [mark], "foreign": []}
    return [{"event": "step", "step": n, "batch": batch, "micro_batch_tokens": 64, **FIGURES} for n in steps]


def resumed(step: int) -> dict[str, Any]:
    return {"event": "resumed", "step": step}


def restored(step: int, weights: int) -> dict[str, Any]:
    return {"event": "restored", "step": step, "weights_of_step": weights}
