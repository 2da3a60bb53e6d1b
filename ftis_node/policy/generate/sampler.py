"""Drawing tokens: by inverting the distribution function, with one uniform number a token."""

from __future__ import annotations

import torch
from torch import Tensor

from ftis_node.fit.memory import CHUNK_BYTES

# A factor just below 1: what is multiplied by it stays below the whole mass whatever the rounding.
_BELOW_ONE = 1 - 2.0**-50


def draw(
    logits: Tensor, count: int, *, temperature: float, greedy: bool, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs, int64 and fp32 `[rows, count]`, from logits `[rows, V]` of any dtype.

    The distribution is softmax(logits / temperature) in fp32, nothing cut off; `greedy` takes its mode. The exponential
    race of `torch.multinomial` needs V random numbers a token, which cost more than a small model's forward pass. On a
    GPU it also waits for a check for NaN, and ends the process at one. Here a NaN becomes a log-prob.
    """
    rows, vocabulary = logits.shape
    uniform = None
    if not greedy:
        uniform = torch.rand(rows, count, dtype=torch.float64, device=logits.device, generator=generator)
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    parts = []
    for start in range(0, rows, size):
        part = slice(start, start + size)
        scaled = logits[part].float() if temperature == 1 else logits[part].float() / temperature
        probabilities = scaled.softmax(-1)
        if uniform is None:
            token = scaled.argmax(-1, keepdim=True).expand(-1, count)
        else:
            token = _invert(probabilities, uniform[part])
        parts.append((token, probabilities.gather(1, token).log_()))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([token for token, _ in parts]), torch.cat([logprob for _, logprob in parts])


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Where the distribution functions of fp32 `[rows, V]` first exceed uniform fp64 `[rows, count]`.

    Find first the block of some √V tokens, then the token in it. This takes one pass over the matrix where a cumulative
    sum takes several. The sums that decide are few enough for fp64. So a token far below the resolution of
    fp32 at 1 is still drawn as often as its probability says. No token of probability 0 is.
    """
    vocabulary = probabilities.shape[1]
    block = 1 << ((vocabulary - 1).bit_length() + 1) // 2
    whole = vocabulary // block * block
    masses = probabilities[:, :whole].unflatten(1, (-1, block)).sum(-1)  # type: ignore[no-untyped-call]
    if whole < vocabulary:
        masses = torch.cat([masses, probabilities[:, whole:].sum(-1, keepdim=True)], 1)
    masses = masses.double()
    ends = masses.cumsum(1)
    wanted = uniform * (ends[:, -1:] * _BELOW_ONE)
    chosen = torch.searchsorted(ends, wanted, right=True).clamp_(max=ends.shape[1] - 1)  # a NaN is beyond the last
    mass = masses.gather(1, chosen)
    share = ((wanted - ends.gather(1, chosen) + mass) / mass).clamp_(0, 1)  # how far into the block

    columns = chosen[:, :, None] * block + torch.arange(block, device=probabilities.device)
    inside = probabilities.gather(1, columns.clamp(max=vocabulary - 1).flatten(1)).view(columns.shape).double()
    if whole < vocabulary:
        inside.masked_fill_(columns >= vocabulary, 0)
    ends = inside.cumsum(-1)
    place = torch.searchsorted(ends, share[:, :, None] * (ends[:, :, -1:] * _BELOW_ONE), right=True)[:, :, 0]
    return (chosen * block + place).clamp_(max=vocabulary - 1)
