"""Sampling requests to engines, and the form in which engines take prompts and give completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis_node.errors import FtisError
from ftis_node.packet import Completion

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Sampling:
    """How to sample: what the run says, and whether greedily (evaluation)."""

    max_new_tokens: int
    temperature: float
    eos: tuple[int, ...]
    greedy: bool = False


def left_padded(prompts: Sequence[Sequence[int]], multiple: int = 1, least: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 `[prompts, width]`; on the left, so that every row's next token is in one column.

    Args:
        multiple: the width is one of it; least: and no smaller.
    """
    width = -(-max(least, *map(len, prompts)) // multiple) * multiple
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def to_completions(ids: Array, logprobs: Array, eos: Sequence[int], group: int) -> list[list[Completion]]:
    """Rows `[prompts · group, tokens]`, each up to its first EOS, which is its own; what follows counts for nothing.

    Raises:
        FtisError: a log-prob is not finite, so the weights have diverged.
    """
    ends: Array = np.asarray(np.isin(ids, eos))
    finished: Array = np.asarray(ends.any(1))
    lengths = np.where(finished, ends.argmax(1) + 1, ids.shape[1])
    flat = [
        Completion(ids[row, :length].astype(np.uint32), logprobs[row, :length].astype(np.float32), bool(finished[row]))
        for row, length in enumerate(lengths.tolist())
    ]
    if not all(np.isfinite(completion.logprobs).all() for completion in flat):
        raise FtisError("The model's log-probs are not finite; its weights have diverged.")
    return [flat[start : start + group] for start in range(0, len(flat), group)]
