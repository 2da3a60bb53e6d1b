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
    """Largest of each sample's tokens: `[T]`, owner int64 `[T]` → `[samples]`."""
    return values.new_full((samples,), -torch.inf).scatter_reduce(0, owner, values, reduce="amax")


def check(lengths: Tensor, tokens: dict[str, Tensor], samples: dict[str, Tensor]) -> None:
    """ValueError unless every token tensor is `[Σ lengths]`, every sample tensor `[N]`, every length at least 1."""
    if lengths.dim() != 1 or lengths.is_floating_point():
        raise ValueError(f"lengths must be a 1-D tensor of integers, not {lengths.dtype} {list(lengths.shape)}")
    if lengths.numel() and int(lengths.min()) < 1:
        raise ValueError("every sample needs at least one token")
    total = int(lengths.sum())
    for size, tensors in ((total, tokens), (lengths.numel(), samples)):
        for name, tensor in tensors.items():
            if tensor.shape != (size,):
                raise ValueError(f"{name} must have shape [{size}] for these lengths, not {list(tensor.shape)}")


def first_of(chunks: Tensor) -> Tensor:
    """The place of each chunk's first token: ascending int64 `[T]` → int64 `[C]`."""
    steps = torch.ones_like(chunks, dtype=torch.bool)
    steps[1:] = chunks[1:] != chunks[:-1]
    return steps.nonzero()[:, 0]


def check_chunks(chunks: Tensor, lengths: Tensor, count: int) -> None:
    """ValueError unless `chunks` int64 `[Σ lengths]` ascends from 0 to `count` − 1 and no chunk is of two samples."""
    if chunks.shape != (int(lengths.sum()),) or chunks.is_floating_point():
        raise ValueError(f"chunks must be integers [{int(lengths.sum())}], not {chunks.dtype} {list(chunks.shape)}")
    if not chunks.numel():
        return
    steps = chunks[1:] - chunks[:-1]
    ends = lengths.cumsum(0)[:-1].to(chunks.device)
    whole = int(chunks[0]) == 0 and int(chunks[-1]) == count - 1
    ascending = bool(((steps == 0) | (steps == 1)).all())
    if not (whole and ascending and bool((steps[ends - 1] == 1).all())):
        raise ValueError(f"chunks must ascend from 0 to {count - 1}, with new ones at the begin of each sample")
