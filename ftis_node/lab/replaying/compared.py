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
    """Between what was logged and what came out."""

    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FIGURES, 0.0))
    first: dict[str, Any] | None = None

    def compare(self, logged: LoggedStep, replayed: dict[str, Any]) -> None:
        """Notes where a step differs; a figure that is missing on one side, or not finite, differs without a size."""
        for name in (*FIGURES, "skipped"):
            told = getattr(logged, name)
            found = replayed[name]
            if told == found or str(told) == str(found) == "nan":
                continue
            self.first = self.first or {"step": logged.step, "figure": name, "logged": told, "replayed": found}
            if name in self.largest and told is not None and found is not None and math.isfinite(told - found):
                self.largest[name] = max(self.largest[name], abs(told - found))


def told(report: dict[str, Any]) -> str:
    """A report for a person."""
    lines = [
        f"{report['model']}: {report['steps']} steps on {report['packets']} packets replayed in "
        f"{report['seconds']:.1f} s, {report['foreign_packets']} of them from peers; "
        f"{report['void_steps']} logged steps were lost in restarts.",
    ]
    if report["identical"]:
        lines.append("Identical: every figure and every weight.")
    else:
        lines.append("Not identical.")
    lines += [f"  largest difference of {name}: {size:.3g}" for name, size in report["max_differences"].items() if size]
    if report["first_difference"]:
        lines.append(
            "  first at step {step}: {figure} was {logged}, now {replayed}".format(**report["first_difference"])
        )
    for entry in report["checkpoints"]:
        verdict = f"weights differ by up to {entry['max_difference']}"
        if entry["identical"]:
            verdict = "bit-identical"
        lines.append(f"  checkpoint of step {entry['step']}: {verdict}")
    return "\n".join([*lines, *(f"- {note}" for note in report["notes"])])


def identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit, so that two NaN are the same and 0 and -0 are not."""
    return one.keys() == other.keys() and all(
        (value.shape, value.dtype) == (other[name].shape, other[name].dtype)
        and torch.equal(value.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name, value in one.items()
    )


def max_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float | None:
    """Over all weights; None if they are not of the same shapes, or not finite."""
    if {name: value.shape for name, value in one.items()} != {name: value.shape for name, value in other.items()}:
        return None
    sizes = [float((value.double() - other[name].double()).abs().max()) for name, value in one.items()]
    largest = max(sizes, default=0.0)
    if not math.isfinite(largest):
        return None
    return largest
