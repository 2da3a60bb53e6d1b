"""Packed samples: per-token tensors are flat `[T]`, and `lengths` `[N]` says where each sample lies, in order.

There is no padding and so no mask: which token belongs to which sample follows from the lengths alone, never from ids
(a sampled EOS may share its id with a pad token).
"""

import torch
from torch import Tensor


def owners(lengths: Tensor) -> Tensor:
    """The sample that each token belongs to: `[3, 1]` → `[0, 0, 0, 1]`. lengths int64 `[N]` → int64 `[Σ lengths]`."""
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def segment_sum(values: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Sum of each sample's tokens: `[T]`, owner int64 `[T]` → `[samples]`. Differentiable; deterministic on CPU."""
    return values.new_zeros(samples).index_add(0, owner, values)


def segment_max(values: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Largest of each sample's tokens: `[T]`, owner int64 `[T]` → `[samples]`; −∞ of a sample without any."""
    lowest = values.new_full((samples,), -torch.inf)
    return lowest.scatter_reduce(0, owner, values, reduce="amax")


def first_of(chunks: Tensor) -> Tensor:
    """The place of each chunk's first token: ascending int64 `[T]` → int64 `[C]`."""
    begins = torch.ones_like(chunks, dtype=torch.bool)
    begins[1:] = chunks[1:] != chunks[:-1]
    return begins.nonzero()[:, 0]
