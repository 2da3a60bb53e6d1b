"""Micro-batches after their backward pass: what the step and its figures need of them, and how ranks share it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ftis_node.learner.batch import Batch, Sample
from ftis_node.learner.team import Team
from ftis_node.objective import Terms

_WITH_TERMS = ("logprobs", "entropy", "distrusted")
_TERMS = tuple(field.name for field in fields(Terms))


@dataclass(frozen=True, eq=False)
class Computed:
    """A micro-batch of N samples with T tokens after its backward pass; nothing in it holds a graph.

    logprobs    `[T]`       of the sampled tokens, as the pass gave them
    entropy     `[T]`       in nats, of what each was drawn from
    loss        −Σ_i c_i · value_i, still to be divided by D
    distrusted  bool `[N]`  samples that a defence leaves out
    """

    samples: Sequence[Sample]
    terms: Terms
    logprobs: Tensor
    entropy: Tensor
    loss: float
    distrusted: Tensor


def by_sample(computed: Sequence[Computed]) -> list[Tensor]:
    """Log-probs at the start of the step, by a sample's index."""
    found: dict[int, Tensor] = {}
    for part in computed:
        lengths = [sample.sampled for sample in part.samples]
        pieces = torch.split(part.logprobs, lengths)
        for sample, piece in zip(part.samples, pieces, strict=True):
            found[sample.index] = piece
    return [found[index] for index in range(len(found))]


def shared(mine: list[Computed], batch: Batch, team: Team) -> list[Computed]:
    """The micro-batches of all ranks, in their order; only their tensors travel.

    A tensor's name is ``NUMBER/NAME``, with the number of its micro-batch among its rank's.
    """
    if team.size == 1:
        return mine
    tensors: dict[str, Tensor] = {}
    for number, one in enumerate(mine):
        row = {name: getattr(one.terms, name) for name in _TERMS}
        row |= {name: getattr(one, name) for name in _WITH_TERMS}
        row["index"] = torch.tensor([sample.index for sample in one.samples])
        row["loss"] = torch.tensor([one.loss], dtype=torch.float64)
        tensors |= {f"{number}/{name}": value for name, value in row.items()}
    everything: list[Computed] = []
    for found in team.gathered(tensors):
        number = 0
        while f"{number}/loss" in found:
            places = found[f"{number}/index"].tolist()
            samples = [batch.computed[place] for place in places]
            terms = Terms(**{name: found[f"{number}/{name}"] for name in _TERMS})
            more = {name: found[f"{number}/{name}"] for name in _WITH_TERMS}
            everything.append(Computed(samples, terms, loss=float(found[f"{number}/loss"]), **more))
            number += 1
    return everything
