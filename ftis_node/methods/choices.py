"""The parts of an objective: their names, and the limits of their numbers.

`config.consistency` checks settings by them before a model is loaded, so nothing here imports torch. mypy refuses a
part whose name is not declared, and a test tries each declared one.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

Parts: TypeAlias = Mapping[str, Any]  # of `ftis_node.objective.Objective`, by name
Advantage = Literal["mean_std", "mean", "maxrl"]
Divergence = Literal["k1", "k2", "k3", "is_k1", "is_k3", "k3_reverse"]
Reduction = Literal["mean", "sum", "max"]
ImportanceName = Literal["none", "vanilla", "truncated"]
Ratio = Literal["token", "sequence", "detached"]
Trust = Literal["none", "graft", "hacpo"]
Aggregation = Literal["sample", "token", "fixed"]

PART_NAMES: Mapping[str, tuple[str, ...]] = {
    "advantage": get_args(Advantage),
    "divergence": get_args(Divergence),
    "reduction": get_args(Reduction),
    "importance": get_args(ImportanceName),
    "ratio": get_args(Ratio),
    "trust": get_args(Trust),
    "aggregation": get_args(Aggregation),
}
PART_LIMITS: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "threshold": ("≥ 0, or none", lambda value: value >= 0),
    "gate": ("≥ 0 and < 1, or none", lambda value: 0 <= value < 1),
    "truncation": ("> 0", lambda value: value > 0),
    "epsilon": ("> 0 and < 1, or none", lambda value: 0 < value < 1),
    "inner_steps": ("≥ 1", lambda value: value >= 1 and isinstance(value, int)),
}
"""Part that is a setting → the limits of its number in words, and whether a finite number keeps them."""
