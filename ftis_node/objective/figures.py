"""The figures of some samples and of their tokens; `Diagnostics.summary` says what each is."""

import math

from torch import Tensor

from ftis_node.objective.columns import Rows
from ftis_node.objective.divergence import ESTIMATORS
from ftis_node.objective.quantiles import nearest_rank
from ftis_node.step_report import BETS

_TOTALS = (
    "negatives",
    "filtered",
    "gated",
    "distrusted",
    "judged",
    "judged_tokens",
    "excess",
    "surprising",
    "loss_weight",
)


def sample_figures(some: Rows, every: Rows, *, lost: int) -> dict[str, float]:
    """Figures of the samples `some`; their shares are of those of `every` sample. lost: bets that cannot be won."""
    figures = {name: _total(some[name]) for name in (*_TOTALS, *(f"bet_{bet}" for bet in BETS))}
    figures |= {f"{name}_p99": _quantiles(some[name], 0.99)[0] for name in ("divergence", *ESTIMATORS)}
    figures |= {
        "samples": float(len(some["negatives"])),
        "filtered_fraction": _ratio(figures["filtered"], figures["negatives"]),
        "divergence_mean": _mean(some["divergence"]),
        "likelihood": _mean(some["likelihood"]),
        "excess_squares": _total(some["excess"].square()),
        "loss_share": _ratio(figures["loss_weight"], _total(every["loss_weight"])),
        "loss_share_per_sample": _ratio(_total(some["token_weight"]), _total(every["token_weight"])),
    }
    if lost or some["chunked"].any():
        figures |= _chunk_figures(some, lost)
    return figures


def _chunk_figures(some: Rows, lost: int) -> dict[str, float]:
    """Figures of samples whose terms are of chunks. A lost bet on λ pays 1 − λ; figures hold its logarithm."""
    figures = {name: _total(some[name]) for name in ("chunked", "chunk_judged", "chunk_excess")}
    figures["chunk_excess_squares"] = _total(some["chunk_excess"].square())
    for bet in BETS:
        name = f"chunk_bet_{bet}"
        figures[name] = _total(some[name]) + lost * math.log1p(-bet)
    return figures


def token_figures(tokens: Rows, clips: Rows) -> dict[str, float]:
    """Figures of the tokens of the first inner step; `clips` has a row for each token of each inner step."""
    weight = tokens["importance"]
    figures = {
        "tokens": float(len(weight)),
        "ess": _ratio(_total(weight) ** 2, _total(weight.square()) * len(weight)),
        "clipped": _mean(clips["clipped"]),
        "truncated": _mean(tokens["truncated"]),
    }
    if "entropy" in tokens:
        figures["entropy"] = _mean(tokens["entropy"])
    for name, values in (("ratio", tokens["log_ratio"].exp()), ("weight", weight)):
        found = _quantiles(values, 0.01, 0.5, 0.99, 1.0)
        figures |= zip((f"{name}_p1", f"{name}_p50", f"{name}_p99", f"{name}_max"), found, strict=True)
    return figures | {name: _mean(tokens[name]) for name in ESTIMATORS}


def _total(values: Tensor) -> float:
    return float(values.sum())


def _mean(values: Tensor) -> float:
    """The mean; 0 of nothing."""
    if values.numel():
        return float(values.mean())
    return 0.0


def _ratio(part: float, whole: float) -> float:
    """The share; 0 of nothing."""
    if whole:
        return part / whole
    return 0.0


def _quantiles(values: Tensor, *shares: float) -> list[float]:
    """As `nearest_rank`; zeros of nothing."""
    if values.numel():
        return nearest_rank(values, *shares)
    return [0.0] * len(shares)
