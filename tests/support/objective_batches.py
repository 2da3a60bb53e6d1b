"""Samples of a few numbers, packed as the learner packs them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftis_node.objective import Diagnostics, Objective, Terms, pack

# Estimators of the divergence, of one token.
FORMULAS = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
    "is_k1": lambda d: math.exp(d) * d,
    "is_k3": lambda d: math.exp(d) * d - math.exp(d) + 1,
    "k3_reverse": lambda d: math.exp(-d) - 1 + d,
}
Samples = Sequence[Sequence[float]]
Maybe = Samples | None


def packed(
    start: Samples, advantages: Sequence[float], new: Maybe = None, generator: Maybe = None, **more: Any
) -> dict[str, Any]:
    """The arguments of `termed`, in float64; lists among `more` become tensors.

    Args:
        start: log-probs of each sample's tokens; `new` and `generator` are the same where nothing else is said.
    """

    def flat(samples: Samples) -> Tensor:
        return torch.tensor([x for sample in samples for x in sample], dtype=torch.float64)

    return {
        "trainer_logprobs": flat(new or start),
        "start_logprobs": flat(start),
        "sampler_logprobs": flat(generator or start),
        "lengths": torch.tensor([len(sample) for sample in start]),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        **{name: torch.tensor(value) if isinstance(value, list) else value for name, value in more.items()},
    }


def termed(objective: Objective, *, gate: float | None = None, **batch: Any) -> Terms:
    """The terms of samples: where nothing else is said one's own, of weight 1, without a sampled end."""
    every = torch.ones_like(batch["lengths"], dtype=torch.bool)
    usual = {
        "weights": torch.ones_like(batch["advantages"]),
        "ended": ~every,
        "own": every,
        "chunks": None,
    }
    samples = pack(count_end=objective.count_end, **usual | {"written": batch["lengths"]} | batch)
    return objective.terms(samples, gate)


def graded(objective: Objective, batch: dict[str, Any]) -> tuple[Terms, Tensor]:
    """The terms of such arguments, and the gradient of the sum of their values for `trainer_logprobs`."""
    new = batch["trainer_logprobs"].clone().requires_grad_()
    terms = termed(objective, **batch | {"trainer_logprobs": new})
    (gradient,) = torch.autograd.grad(terms.value.sum(), new)
    return terms, gradient


def add(diagnostics: Diagnostics, terms: Terms, batch: dict[str, Any], sources: Sequence[str], **more: Any) -> None:
    """Count a micro-batch: where nothing else is said trusted, not chunked, of no entropy, and evidence on claims."""
    none = torch.zeros(len(sources), dtype=torch.bool)
    usual = {
        "entropy": torch.zeros_like(terms.log_ratio),
        "distrusted": none,
        "chunked": none,
        "judged": ~none,
    }
    sizes = {name: batch[name] for name in ("advantages", "lengths")}
    diagnostics.add(terms, **sizes, sources=sources, **usual | more)
