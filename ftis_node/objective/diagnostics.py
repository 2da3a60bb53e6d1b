"""What a step's samples were worth, over all sources and by source.

The paper shows no importance weights before and after truncation and no counts of its filter (arXiv 2605.22537,
section 4.5 varies g only); without them nobody can tell whether a peer teaches, is ignored, or is believed too much.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ftis_node.objective.divergence import ESTIMATORS
from ftis_node.objective.loss import Terms
from ftis_node.objective.packed import owners


@dataclass(frozen=True, eq=False)
class _Record:
    """One micro-batch on the CPU: columns of float64 `[N]` by sample and `[T]` by token, `owner` int64 `[T]`."""

    sources: tuple[str, ...]
    owner: Tensor
    samples: dict[str, Tensor]
    tokens: dict[str, Tensor]


def _column(tensor: Tensor) -> Tensor:
    # float64, since sums of 1e5 tokens in float32 would lose digits of the shares.
    return tensor.detach().cpu().double()


class Diagnostics:
    """Gathers the `Terms` of a step's micro-batches; `summary` may be called at any time."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._idle: Counter[str] = Counter()
        self._own: str | None = None

    def add(self, terms: Terms, *, advantages: Tensor, lengths: Tensor, sources: Sequence[str], own: str) -> None:
        """Count a micro-batch: advantages `[N]`, lengths int64 `[N]`, sources one name a sample, `own` this node's.

        Add each sample once a step, at its first inner step. ValueError if there is not one source a sample.
        """
        if not len(sources) == lengths.numel() == terms.kept.numel() == advantages.numel():
            raise ValueError(f"{len(sources)} sources and {lengths.numel()} lengths for {terms.kept.numel()} samples")
        self._own = own
        by_sample = {
            "negative": advantages <= 0,
            "filtered": ~terms.kept,
            "divergence": terms.divergence,
            "loss_weight": terms.loss_weight,
        }
        by_token = {
            "log_ratio": terms.log_ratio,
            "importance": terms.importance,
            "clipped": terms.clipped,
            "truncated": terms.truncated,
        }
        self._records.append(
            _Record(
                tuple(sources),
                owners(lengths.cpu()),
                {name: _column(tensor) for name, tensor in by_sample.items()},
                {name: _column(tensor) for name, tensor in by_token.items()},
            )
        )

    def add_idle(self, source: str, samples: int) -> None:
        """Count samples of groups whose rewards were all equal: nothing to learn from, so they never become terms."""
        self._idle[source] += samples

    def summary(self) -> dict[str, dict[str, float] | dict[str, dict[str, float]]]:
        """`{"overall": figures, "foreign": figures, "sources": {source: figures}}`, plain floats (0 of nothing is 0).

        samples, tokens     that the terms were of; `idle`: samples counted by `add_idle`, in no other figure
        ratio_p1 _p50 _p99 _max   ρ of the tokens at the start of the step, before truncation
        weight_p1 _p50 _p99 _max  importance weights, after truncation
        ess                 (Σ w)² / Σ w² of the importance weights, as a share of the tokens
        truncated, clipped  share of the tokens with ρ > C, and with the clip at ε active
        negatives           samples with Â ≤ 0, those that the filter may drop
        filtered, filtered_fraction   how many it dropped, and of the negatives which share
        divergence_mean, divergence_p99   of the objective's own D, over samples
        k1, k2, …           mean over tokens of every estimator in `divergence.ESTIMATORS`
        loss_weight         Σ |Â| · weight · Σ_t importance over the samples that were kept
        loss_share          the same as a share of all sources': they add up to 1, or all are 0
        """
        names = {name for record in self._records for name in record.sources} | set(self._idle)
        total = sum(float(record.samples["loss_weight"].sum()) for record in self._records)
        return {
            "overall": self._figures(names, total),
            "foreign": self._figures({name for name in names if name != self._own}, total),
            "sources": {name: self._figures({name}, total) for name in sorted(names)},
        }

    def _figures(self, wanted: set[str], total: float) -> dict[str, float]:
        samples: dict[str, list[Tensor]] = defaultdict(lambda: [torch.zeros(0, dtype=torch.float64)])
        tokens: dict[str, list[Tensor]] = defaultdict(lambda: [torch.zeros(0, dtype=torch.float64)])
        for record in self._records:
            picked = torch.tensor([source in wanted for source in record.sources], dtype=torch.bool)
            for name, column in record.samples.items():
                samples[name].append(column[picked])
            for name, column in record.tokens.items():
                tokens[name].append(column[picked[record.owner]])
        return {
            "idle": float(sum(count for source, count in self._idle.items() if source in wanted)),
            **_sample_figures(lambda name: torch.cat(samples[name]), total),
            **_token_figures(lambda name: torch.cat(tokens[name])),
        }


def _sample_figures(column: Callable[[str], Tensor], total: float) -> dict[str, float]:
    negatives, filtered = float(column("negative").sum()), float(column("filtered").sum())
    divergence = column("divergence")
    return {
        "samples": float(divergence.numel()),
        "negatives": negatives,
        "filtered": filtered,
        "filtered_fraction": filtered / negatives if negatives else 0.0,
        "divergence_mean": _mean(divergence),
        "divergence_p99": _quantiles(divergence, 0.99)[0],
        "loss_weight": float(column("loss_weight").sum()),
        "loss_share": float(column("loss_weight").sum()) / total if total else 0.0,
    }


def _token_figures(column: Callable[[str], Tensor]) -> dict[str, float]:
    log_ratio, weight = column("log_ratio"), column("importance")
    tokens = float(weight.numel())
    squares = float(weight.square().sum())
    figures = {
        "tokens": tokens,
        "ess": float(weight.sum()) ** 2 / (squares * tokens) if squares else 0.0,
        "clipped": _mean(column("clipped")),
        "truncated": _mean(column("truncated")),
    }
    for name, values in (("ratio", log_ratio.exp()), ("weight", weight)):
        p1, p50, p99, largest = _quantiles(values, 0.01, 0.5, 0.99, 1.0)
        figures |= {f"{name}_p1": p1, f"{name}_p50": p50, f"{name}_p99": p99, f"{name}_max": largest}
    return figures | {name: _mean(estimate(log_ratio)) for name, estimate in ESTIMATORS.items()}


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def _quantiles(values: Tensor, *shares: float) -> list[float]:
    """Nearest-rank quantiles, so each is a value that occurred; torch.quantile refuses more than 16 million."""
    if not values.numel():
        return [0.0] * len(shares)
    ordered = values.sort().values
    return [float(ordered[max(math.ceil(share * values.numel()) - 1, 0)]) for share in shares]
