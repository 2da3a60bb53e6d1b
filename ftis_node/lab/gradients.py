"""The exact gradient of each source, to see whose samples move the weights; a daemon has no time for it.

Σ |Â|·w·tokens, which a node reports, is what a source may weigh; this is what it does weigh. A backward pass a source.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftis_node.learner import Learner, TrainingGroup
from ftis_node.learner.batch import Batch


def source_gradients(learner: Learner, groups: Sequence[TrainingGroup]) -> dict[str, Tensor]:
    """Each source's part of the gradient that the next step on `groups` would take, before clipping.

    Nothing is changed by it.

    Returns:
        Source → fp32 `[parameters]` on the CPU, the trainable weights in their order; they add up to the whole.
    """
    batch = Batch.of(groups, learner.objective, learner.own)
    parts, computed = {}, []
    for source in sorted({sample.source for sample in batch.computed}):
        computed += learner.gradient_that_fits(batch.only(source))
        parts[source] = _flat(learner)
    divisor = learner.divisor(batch, computed) * learner.loss_factor(batch)
    return {source: gradient / divisor for source, gradient in parts.items()}


def _flat(learner: Learner) -> Tensor:
    """The gradient that lies in the parameters, taken out of them."""
    pieces = [
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().float().flatten().cpu()
        for p in learner.trainable.values()
    ]
    learner.optimiser.drop_gradients()
    return torch.cat(pieces)
