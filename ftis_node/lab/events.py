"""The events of a trial, a line of JSON each in its `events.jsonl`: a node writes them, and the report reads them.

A line says more than is named here: `evaluate.Evaluation` of an evaluation, and a step's figures, for people. The last
event of a trial is `end`.
"""

from collections.abc import Callable
from typing import Any, Literal, NotRequired, TypedDict

HELD_OUT = "held-out"  # the set that every evaluation without another name is of


class Spent(TypedDict):
    """A node, its steps so far, and their cost: simulated seconds, own completions, samples trained on."""

    node: str
    step: int
    time: float
    generated: int
    trained: int


class EvaluationEvent(Spent):
    """A greedy evaluation: the share of a set's prompts that were answered right, 0 to 1."""

    event: Literal["evaluation"]
    set: str
    pass_at_1: float


class StepEvent(Spent):
    """A step. payloads: see `Watch.take`; own_data_reward: mean on rows of one's own; share: of the node's weights in
    an average, see `lab.federation`."""

    event: Literal["step"]
    payloads: NotRequired[dict[str, float]]
    own_data_reward: NotRequired[float]
    share: NotRequired[float]


class Duration(TypedDict):
    """Real seconds and CPU-seconds of a trial's process, interruptions left out."""

    seconds: float
    cpu: float


class EndEvent(Duration):
    """The trial ended."""

    event: Literal["end"]


Event = EvaluationEvent | StepEvent | EndEvent


def mapped(value: Any, leaf: Callable[[float], Any]) -> Any:
    """The same value with `leaf` of every float at any depth; tuples become lists. Ints, texts and None stay."""
    if isinstance(value, dict):
        return {key: mapped(part, leaf) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(part, leaf) for part in value]
    if isinstance(value, float):
        return leaf(value)
    return value
