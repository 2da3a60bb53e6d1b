"""Log-probs of given tokens, without ever holding a [tokens, vocabulary] matrix for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ftis_node.policy.load import Policy

CHUNK_TOKENS = 1024


def completion_logprobs(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[np.ndarray[Any, Any]],
    temperature: float,
) -> Tensor:
    """Log-probs of every completion token under the policy, packed.

    Args:
        prompts: token ids of each sample's prompt.
        completions: token ids of each sample's completion (any integer dtype), every id valid and none empty.
        temperature: the run's; log-probs are of the tempered distribution, as they are when sampling.

    Returns:
        float32 `[T]`, T = Σ completion lengths, samples one after another. It carries a gradient where gradients are
        on. The head and softmax (fp32) run over `CHUNK_TOKENS` tokens at a time and are recomputed on the way back,
        so that the largest extra matrix is one chunk by the vocabulary.
    """
    ids, mask, where, targets = _lay_out(prompts, completions)
    device = policy.device
    lm = policy.causal_lm
    hidden = lm.get_decoder()(
        input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False
    ).last_hidden_state
    hidden = hidden.reshape(-1, hidden.shape[-1])[where.to(device)]
    head, targets = lm.get_output_embeddings(), targets.to(device)
    out = []
    for start in range(0, len(targets), CHUNK_TOKENS):
        part = (hidden[start : start + CHUNK_TOKENS], targets[start : start + CHUNK_TOKENS])
        arguments = (head, *part, policy.vocabulary, temperature)
        out.append(
            checkpoint(_chunk, *arguments, use_reentrant=False) if torch.is_grad_enabled() else _chunk(*arguments)
        )
    return torch.cat(out)


def _chunk(head: Any, hidden: Tensor, targets: Tensor, vocabulary: int, temperature: float) -> Tensor:
    """[tokens, H], [tokens] → fp32 log-probs [tokens]; rows of the head beyond the vocabulary count as −inf."""
    logits: Tensor = head(hidden)[:, :vocabulary].float() / temperature
    return logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, -1)


def _lay_out(
    prompts: Sequence[Sequence[int]], completions: Sequence[np.ndarray[Any, Any]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right-padded ids and mask [N, L]; flat places of the hidden states that predict the targets [T]; targets [T]."""
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    width = max(lengths)
    ids = np.zeros((len(lengths), width), dtype=np.int64)
    mask = np.zeros((len(lengths), width), dtype=np.int64)
    where, targets = [], []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, : len(prompt)] = prompt
        ids[row, len(prompt) : lengths[row]] = completion
        mask[row, : lengths[row]] = 1
        first = row * width + len(prompt) - 1  # the prompt's last position predicts the first completion token
        where.append(np.arange(first, first + len(completion)))
        targets.append(np.asarray(completion, dtype=np.int64))
    return (
        torch.from_numpy(ids),
        torch.from_numpy(mask),
        torch.from_numpy(np.concatenate(where)),
        torch.from_numpy(np.concatenate(targets)),
    )
