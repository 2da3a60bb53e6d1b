"""Sampling requests to engines, and the form in which engines take prompts and give completions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ftis_node.errors import FtisError, UsageError
from ftis_node.packet import Completion
from ftis_node.packet.arrays import AnyArray
from ftis_node.policy.policy import Policy


class DivergedError(FtisError):
    """The weights are too large, or no numbers. The network process knows it by the name of this class."""


Prompts = Sequence[Sequence[int]]  # token ids
CompletionGroups = list[list[Completion]]  # completions of each prompt


@dataclass(frozen=True)
class Sampling:
    """How to sample: what the run says, and whether greedily (evaluation).

    temperature: above 0; log-probs are of the tempered distribution, greedy ones too.
    eos: ids that end a completion; none: it ends at `max_new_tokens` only.
    """

    max_new_tokens: int
    temperature: float
    eos: tuple[int, ...]
    greedy: bool = False


def left_padded(prompts: Prompts, least: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 `[prompts, width]` on the CPU, padded on the left, so that every row's next token is in one
    column. Both are 0 where there is padding.

    least: the width is no smaller.
    """
    width = max(least, *map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        first = width - len(prompt)
        ids[row, first:] = torch.as_tensor(prompt)
        mask[row, first:] = 1
    return ids, mask


def to_completions(
    policy: Policy,
    ids: AnyArray,
    logprobs: AnyArray,
    eos: Sequence[int],
    group: int,
) -> CompletionGroups:
    """Rows `[prompts · group, tokens]`, each up to its first EOS, which is its own; what follows counts for nothing.

    A row without an EOS is whole, and not finished. The order stays.

    Args:
        ids, logprobs: of the same shape. group: rows of each prompt, one after another.

    Raises:
        FtisError: a log-prob is not finite; see `not_finite`.
    """
    ends: AnyArray = np.asarray(np.isin(ids, eos))
    finished: AnyArray = np.asarray(ends.any(1))
    lengths = np.where(finished, ends.argmax(1) + 1, ids.shape[1])
    flat = []
    for row, length in enumerate(lengths.tolist()):
        claimed = logprobs[row, :length].astype(np.float32)
        if not np.isfinite(claimed).all():
            raise not_finite(policy)
        flat.append(Completion(ids[row, :length].astype(np.uint32), claimed, bool(finished[row])))
    return [flat[start : start + group] for start in range(0, len(flat), group)]


def not_finite(policy: Policy) -> FtisError:
    """Return what to raise for a policy whose log-probs are not finite. It reads all weights.

    Where weights of 16 bits are finite, activations were too large for their dtype: a UsageError names another. Else
    the weights have diverged.
    """
    name = str(policy.dtype).removeprefix("torch.")
    sound = all(bool(weight.isfinite().all()) for weight in policy.model.parameters() if weight.is_floating_point())
    if not sound or policy.dtype == torch.float32:
        return DivergedError(f"The log-probs of {policy.name} are not finite in {name}; its weights have diverged.")
    other = "float32"
    if policy.dtype == torch.float16:
        other = "bfloat16 (slow before Ampere) or float32"
    return UsageError(
        f"{policy.name} is not finite in {name}, though its weights are.",
        f"Its activations are too large for that dtype: use --set dtype={other}.",
    )
