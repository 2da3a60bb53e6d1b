"""Steps as `metrics.jsonl` has them."""

from typing import Any


def step(number: int, **facts: Any) -> dict[str, Any]:
    """What the daemon writes of a step, as far as the curves need it."""
    foreign = {"samples": 10.0, "tokens": 100.0, "excess": -5.0, "filtered_fraction": 0.5, "loss_share": 0.25}
    figures = {"samples": 10.0, "loss_weight": 3.0, "negatives": 4.0, "filtered": 1.0}
    by_source = {"own": figures, "peer": figures}
    return {
        **{"step": number, "own_reward": 0.5, "foreign_reward": number / 1000},
        **{"bytes_in": 1000 * number, "bytes_out": 10 * number, "seconds": {"wait": 1.0, "train": 2.0, "total": 6.0}},
        "diagnostics": {"overall": {"loss_weight": 6.0}, "foreign": foreign, "sources": by_source},
    } | facts
