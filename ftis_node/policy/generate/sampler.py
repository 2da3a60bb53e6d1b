"""Drawing tokens: by inverting the distribution function, with one uniform number a token."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ftis_node.fit.memory import CHUNK_BYTES

# A factor just below 1: what is multiplied by it stays below the whole mass whatever the rounding.
_BELOW_ONE = 1 - 2.0**-50


def blocks_of(vocabulary: int) -> int:
    """Columns of logits that come in whole blocks, `vocabulary` or more: drawing takes fewer kernels, if those beyond
    the ids are -inf."""
    block = _block(vocabulary)
    return -(-vocabulary // block) * block


def noise_of(seeds: Sequence[int], group: int, tokens: int) -> Tensor:
    """Uniform numbers in [0, 1), fp64 `[prompts · group, tokens]`; a prompt's follow from its seed alone.

    So the same tokens are drawn whichever prompts are generated side by side, and on whichever device;
    ranks of a team rely on that. Another number of `tokens` gives other ones.
    """
    rows = [np.random.default_rng(seed).random((group, tokens)) for seed in seeds]
    return torch.from_numpy(np.concatenate(rows))


def choose(
    logits: Tensor,
    uniform: Tensor | None,
    temperature: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs, int64 and fp32 `[rows, count]`, from logits `[rows, ≥ V]` of any dtype, which stay.

    The distribution is softmax(logits / temperature) in fp32, nothing cut off; without uniform numbers it takes its
    mode, once. The exponential race of `torch.multinomial` needs V random numbers a token, which cost more than a small
    model's forward pass. On a GPU it also waits for a check for NaN, and ends the process at one. Here a NaN becomes a
    log-prob.

    Args:
        uniform: fp64 `[rows, count]`, in [0, 1); None: greedily, and count is 1.
        temperature: above 0.
        vocabulary: V; logits of further columns are -inf.
    """
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    tokens = []
    logprobs = []
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        scaled = logits[part].float()
        if temperature != 1:
            scaled = scaled / temperature
        probabilities = scaled.softmax(-1)
        if uniform is None:
            token = scaled.argmax(-1, keepdim=True)
        else:
            token = _invert(probabilities, uniform[part]).clamp_(max=vocabulary - 1)  # a NaN is beyond the last
        tokens.append(token)
        logprobs.append(probabilities.gather(1, token).log_())
    if len(tokens) == 1:
        return tokens[0], logprobs[0]
    return torch.cat(tokens), torch.cat(logprobs)


def _block(vocabulary: int) -> int:
    """How many tokens a block has: a power of 2 of some √V."""
    return 1 << ((vocabulary - 1).bit_length() + 1) // 2


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Where the distribution functions of fp32 `[rows, V]` first exceed uniform fp64 `[rows, count]`, as int64.

    Find first the block of some √V tokens, then the token in it. This takes one pass over the matrix where a cumulative
    sum takes several. The sums that decide are few enough for fp64. So a token far below the resolution of
    fp32 at 1 is still drawn as often as its probability says. No token of probability 0 is.
    """
    vocabulary = probabilities.shape[1]
    block = _block(vocabulary)
    whole = vocabulary // block * block
    masses = probabilities[:, :whole].unflatten(1, (-1, block)).sum(-1)  # type: ignore[no-untyped-call]
    if whole < vocabulary:
        masses = torch.cat([masses, probabilities[:, whole:].sum(-1, keepdim=True)], 1)
    masses = masses.double()
    ends = masses.cumsum(1)  # of blocks
    wanted = uniform * (ends[:, -1:] * _BELOW_ONE)
    chosen = torch.searchsorted(ends, wanted, right=True).clamp_(max=ends.shape[1] - 1)  # a NaN is beyond the last
    mass = masses.gather(1, chosen)
    depth = wanted - ends.gather(1, chosen) + mass  # how far into the block
    share = (depth / mass).clamp_(0, _BELOW_ONE)
    inside = _block_of(probabilities, chosen, block)
    ends = inside.cumsum(-1)  # of tokens in the block
    wanted = share[:, :, None] * ends[:, :, -1:]
    place = torch.searchsorted(ends, wanted, right=True)[:, :, 0]
    return place.add_(chosen, alpha=block)


def _block_of(probabilities: Tensor, chosen: Tensor, block: int) -> Tensor:
    """The chosen block of each number, `[rows, count]` → fp64 `[rows, count, block]`; 0 beyond the vocabulary."""
    vocabulary = probabilities.shape[1]
    each = chosen[:, :, None]
    if vocabulary % block == 0:
        places = each.expand(-1, -1, block)
        return probabilities.unflatten(1, (-1, block)).gather(1, places).double()  # type: ignore[no-untyped-call, no-any-return]
    columns = each * block + torch.arange(block, device=probabilities.device)
    there = columns.clamp(max=vocabulary - 1)
    found = probabilities.gather(1, there.flatten(1)).view(columns.shape).double()
    return found.masked_fill_(columns >= vocabulary, 0)
