"""The results of a replay beside the log and the checkpoints."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ftis_node.lab.replaying.lineage import LoggedStep

FIGURES = ("loss", "gradient_norm", "own_reward", "foreign_reward")


@dataclass
class Differences:
    """Between what was logged and what came out, over all steps so far. largest: by figure, absolute; 0 without any.
    first: step, figure, logged, replayed; None as long as nothing differs. The report has both as they are.
    """

    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FIGURES, 0.0))
    first: dict[str, Any] | None = None

    def compare(self, logged: LoggedStep, replayed: dict[str, Any]) -> None:
        """Notes where a step differs, by one bit or more; a figure that is missing on one side, or not finite, differs
        without a size. Call it once a step, in order. replayed: by the names of `FIGURES`, and `skipped`."""
        for name in (*FIGURES, "skipped"):
            told = getattr(logged, name)
            found = replayed[name]
            if told == found or str(told) == str(found) == "nan":
                continue
            if self.first is None:
                self.first = {
                    "step": logged.step,
                    "figure": name,
                    "logged": told,
                    "replayed": found,
                }
            if name == "skipped" or told is None or found is None:
                continue
            size = abs(told - found)
            if math.isfinite(size):
                self.largest[name] = max(self.largest[name], size)


def told(report: dict[str, Any]) -> str:
    """What `replay` returned, for a person."""
    lines = [
        f"{report['model']}: {report['steps']} steps on {report['packets']} packets replayed in "
        f"{report['seconds']:.1f} s, {report['foreign_packets']} of them from peers; "
        f"{report['void_steps']} logged steps were lost in restarts.",
    ]
    if report["identical"]:
        lines.append("Identical: every figure and every weight.")
    else:
        lines.append("Not identical.")
    for name, size in report["max_differences"].items():
        if size:
            lines.append(f"  largest difference of {name}: {size:.3g}")
    first = report["first_difference"]
    if first:
        lines.append("  first at step {step}: {figure} was {logged}, now {replayed}".format(**first))
    for entry in report["checkpoints"]:
        verdict = f"weights differ by up to {entry['max_difference']}"
        if entry["identical"]:
            verdict = "bit-identical"
        lines.append(f"  checkpoint of step {entry['step']}: {verdict}")
    for note in report["notes"]:
        lines.append(f"- {note}")
    return "\n".join(lines)


def identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit, so that two NaN are the same and 0 and -0 are not."""
    if not _alike(one, other):
        return False
    return all(_same_bits(value, other[name]) for name, value in one.items())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are the same bit for bit."""
    if one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def max_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float | None:
    """The largest absolute difference over all weights; None if names or shapes differ, or one is not finite."""
    if not _alike(one, other):
        return None
    largest = 0.0
    for name, value in one.items():
        apart = (value.double() - other[name].double()).abs()
        size = float(apart.max())
        if not math.isfinite(size):
            return None
        largest = max(largest, size)
    return largest


def _alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether they have the same names and shapes."""
    shapes = {name: value.shape for name, value in one.items()}
    return shapes == {name: value.shape for name, value in other.items()}
