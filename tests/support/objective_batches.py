"""Samples of a few numbers, packed as `Objective.terms` takes them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftis_node.objective import Objective, Terms

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
    """The arguments of `terms`, in float64; lists among `more` become tensors.

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


def graded(objective: Objective, batch: dict[str, Any]) -> tuple[Terms, Tensor]:
    """The terms of such arguments, and the gradient of the sum of their values for `trainer_logprobs`."""
    new = batch["trainer_logprobs"].clone().requires_grad_()
    terms = objective.terms(**batch | {"trainer_logprobs": new})
    (gradient,) = torch.autograd.grad(terms.value.sum(), new)
    return terms, gradient
