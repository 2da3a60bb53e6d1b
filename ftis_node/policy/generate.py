"""Sampling: one prefill per prompt shared by its whole group, a KV cache, log-probs taken as the tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from ftis_node.errors import FtisError
from ftis_node.packet import Completion
from ftis_node.policy.memory import PREFILL_TOKENS
from ftis_node.policy.policy import Policy


@dataclass(frozen=True)
class Sampling:
    """How to sample: what the run says, and whether greedily (evaluation)."""

    max_new_tokens: int
    temperature: float
    eos: tuple[int, ...]
    greedy: bool = False


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    group: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    batch: int = 288,
) -> list[list[Completion]]:
    """Samples `group` completions of each prompt.

    Args:
        prompts: token ids of each prompt, none empty.
        group: completions a prompt (G).
        generator: source of randomness on the policy's device; the default one if None.
        batch: how many sequences are decoded side by side at most (prompts are split, groups are not).

    Returns:
        For each prompt its G completions: uint32 ids and float32 log-probs `[length]` in sampling order, a sampled
        EOS included. The log-probs are those of the distribution sampled from: temperature applied, softmax in fp32
        over the valid vocabulary, nothing cut off.

    Raises:
        FtisError: the weights have diverged.
    """
    per_call = max(1, batch // group)
    out: list[list[Completion]] = []
    for start in range(0, len(prompts), per_call):
        out += _generate_batch(policy, prompts[start : start + per_call], group, sampling, generator)
    return out


def _generate_batch(
    policy: Policy, prompts: Sequence[Sequence[int]], group: int, sampling: Sampling, generator: torch.Generator | None
) -> list[list[Completion]]:
    logits, cache, mask = _prefill(policy, prompts, group)
    rows = len(prompts) * group
    device = policy.device
    eos = torch.tensor(sampling.eos, device=device)
    ids = torch.zeros(rows, sampling.max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(rows, sampling.max_new_tokens, dtype=torch.float32, device=device)
    lengths = torch.full((rows,), sampling.max_new_tokens, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    alive = torch.arange(rows, device=device)  # which rows the cache still holds
    positions = mask.sum(1)  # [alive]: where each row's next token goes
    lm = policy.causal_lm
    for step in range(sampling.max_new_tokens):
        token, logprob = _draw(logits, policy.vocabulary, sampling, generator)
        ids[alive, step], logprobs[alive, step] = token, logprob
        ended = torch.isin(token, eos) & ~finished[alive]  # what a finished row still draws counts for nothing
        lengths[alive[ended]] = step + 1
        finished[alive[ended]] = True
        over = finished[alive]
        if bool(over.all()) or step + 1 == sampling.max_new_tokens:
            break
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
        if int(over.sum()) * 4 >= len(alive):  # dropping rows copies the cache: do it when it pays
            keep = (~over).nonzero(as_tuple=True)[0]
            cache.batch_select_indices(keep)
            alive, mask, positions, token = alive[keep], mask[keep], positions[keep], token[keep]
        logits = lm(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        positions = positions + 1
    if not bool(torch.isfinite(logprobs).all()):
        raise FtisError("The model's log-probs are not finite; its weights have diverged.")
    return _collect(ids, logprobs, lengths, finished, group)


def _prefill(policy: Policy, prompts: Sequence[Sequence[int]], group: int) -> tuple[Tensor, DynamicCache, Tensor]:
    """Runs each prompt once and repeats its cache `group` times: logits [rows, V], cache, mask [rows, L].

    Some prompts at a time, for evaluation has as many prompts as rows.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):  # padded on the left, so that every row's next token is in one column
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(policy.device), mask.to(policy.device)
    read = []
    together = max(1, PREFILL_TOKENS // width)
    for first in range(0, len(prompts), together):
        rows = slice(first, first + together)
        cache = DynamicCache()
        logits = policy.causal_lm(
            input_ids=ids[rows],
            attention_mask=mask[rows],
            position_ids=(mask[rows].cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        read.append((logits, cache))
    logits, cache = torch.cat([logits for logits, _ in read]), _joined([cache for _, cache in read])
    cache.batch_repeat_interleave(group)
    return logits.repeat_interleave(group, 0), cache, mask.repeat_interleave(group, 0)


def _joined(caches: Sequence[DynamicCache]) -> DynamicCache:
    """One cache of all rows; the parts are emptied on the way, lest both exist at once."""
    if len(caches) == 1:
        return caches[0]
    whole = DynamicCache()
    for index in range(len(caches[0].layers)):
        layers = [cache.layers[index] for cache in caches]
        whole.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
        for layer in layers:
            layer.keys = layer.values = None
    return whole


def _draw(
    logits: Tensor, vocabulary: int, sampling: Sampling, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Next token and its log-prob of each row, from logits [rows, V]; padded vocabulary rows are left out."""
    distribution = torch.log_softmax(logits[:, :vocabulary].float() / sampling.temperature, -1)
    if sampling.greedy:
        token = distribution.argmax(-1)
    else:
        # As torch.multinomial draws; but that ends a GPU's process at a NaN, and waits for the GPU to look for one.
        race = torch.empty_like(distribution).exponential_(generator=generator)
        token = (distribution.exp() / race).argmax(-1)
    return token, distribution.gather(1, token[:, None])[:, 0]


def _collect(ids: Tensor, logprobs: Tensor, lengths: Tensor, finished: Tensor, group: int) -> list[list[Completion]]:
    ids_np = ids.cpu().numpy().astype(np.uint32)
    logprobs_np, lengths_np, finished_np = logprobs.cpu().numpy(), lengths.tolist(), finished.tolist()
    flat = [
        Completion(ids_np[row, :length].copy(), logprobs_np[row, :length].copy(), finished_np[row])
        for row, length in enumerate(lengths_np)
    ]
    return [flat[start : start + group] for start in range(0, len(flat), group)]
