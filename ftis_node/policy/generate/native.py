"""Our own engine: a prompt is read once for its whole group, log-probs are taken as tokens are drawn, rows that end go.

Models that `decoder` understands are decoded by it, others by transformers' modules with the cache that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ftis_node.fit.memory import PREFILL_TOKENS
from ftis_node.host.interruption import check
from ftis_node.packet import Completion
from ftis_node.policy.generate.cache import ALIGNED, Flags, Ids, SharedCache, bucket, closing_up
from ftis_node.policy.generate.decoder import Decoder, reach
from ftis_node.policy.generate.graphs import Graphs
from ftis_node.policy.generate.sampler import choose
from ftis_node.policy.generate.sampling import Sampling, left_padded, to_completions
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.policy import Policy
from ftis_node.policy.reference_model import reference

# Steps between two looks at who has ended: on a GPU each waits for it.
_LOOK_EVERY = {"cpu": 1, "cuda": 8}


_Rows: TypeAlias = "Decoder | _Modules"
"""Completions under way: `grow`, then `step` gives each row a token and returns logits `[rows, ≥ V]` of the next.

Logits of columns beyond V are -inf. `keep` drops rows.

gaps: which part of the rows must have ended for dropping them to pay; static: see `Decoder`.
"""


def native(
    policy: Policy, prompts: Sequence[Sequence[int]], group: int, sampling: Sampling, noise: Tensor | None
) -> list[list[Completion]]:
    """One batch; see `generate.generate`."""
    longest = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
    if policy.lean and longest <= reach(policy.causal_lm):
        with torch.inference_mode():  # not for other modules: training cannot use what they may keep of it
            return _complete(policy, _decoder, prompts, group, sampling, noise)
    if "past_key_values" not in signature(policy.causal_lm.forward).parameters:  # Mamba has a cache of its own kind
        return reference(policy, prompts, group, sampling, noise)
    return _complete(policy, _modules, prompts, group, sampling, noise)


@torch.no_grad()
def decoder_logprobs(policy: Policy, groups: Sequence[Prefixed]) -> Tensor:
    """Log-probs, fp32 `[Σ lengths]`, that `decoder` gives completions; every prompt has equally many."""
    completions = [completion for group in groups for completion in group.completions]
    longest, each = max(len(completion) for completion in completions), len(groups[0].completions)
    ids = torch.zeros(len(completions), longest, dtype=torch.long)
    for row, completion in enumerate(completions):
        ids[row, : len(completion)] = torch.from_numpy(completion.astype(np.int64))
    ids = ids.to(policy.device)
    logits, rows = _decoder(policy, [group.prompt for group in groups], each, longest)
    columns = [logits.repeat_interleave(each, 0)[:, : policy.vocabulary]]
    step = _runner(rows, policy.device, lambda token: (rows.step(token)[:, : policy.vocabulary].clone(),))
    columns += [step(ids[:, place])[0] for place in range(longest - 1)]
    logprobs = torch.stack(columns, 1).float().log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]
    return torch.cat([logprobs[row, : len(completion)] for row, completion in enumerate(completions)])


def _complete(
    policy: Policy,
    start: Callable[[Policy, Sequence[Sequence[int]], int, int], tuple[Tensor, _Rows]],
    prompts: Sequence[Sequence[int]],
    group: int,
    sampling: Sampling,
    noise: Tensor | None,
) -> list[list[Completion]]:
    """Draw tokens until all rows have ended.

    Args:
        start: reads the prompts and gives logits `[prompts, ≥ V]` of what follows them.
        noise: as in `generate.generate`; None: greedily.
    """
    device, vocabulary = policy.device, policy.vocabulary
    there = np.arange(len(prompts) * group)  # which rows are left
    over = np.zeros(len(there), dtype=np.bool_)  # which of those have ended
    logits, rows = start(policy, prompts, group, sampling.max_new_tokens)
    numbers = None if noise is None else noise.to(device)  # of the rows that are left
    first = None if numbers is None else numbers[:, 0].view(-1, group)
    drawn_first = choose(logits[:, :vocabulary], first, sampling.temperature, vocabulary)
    token, logprob = (part.expand(-1, group).flatten() for part in drawn_first)
    del logits, drawn_first  # before the next ones are made

    def following(token: Tensor, *uniform: Tensor) -> tuple[Tensor, ...]:
        drawn = choose(rows.step(token), uniform[0] if uniform else None, sampling.temperature, vocabulary)
        return tuple(part.flatten() for part in drawn)

    step = _runner(rows, device, following)
    drawn: list[tuple[Ids, Tensor, Tensor]] = [(there, token, logprob)]
    look = _LOOK_EVERY[device.type]
    while len(drawn) < sampling.max_new_tokens:
        check()
        if len(drawn) % look == 0:
            recent = torch.stack([token for _, token, _ in drawn[-look:]]).cpu().numpy()
            over |= np.isin(recent, sampling.eos).any(0)
            if over.all():
                break
            if (order := _staying(over, rows)) is not None:
                index = torch.from_numpy(order).to(device)
                rows.keep(order, index)
                there, token, over = there[order], token[index], over[order]
                numbers = None if numbers is None else numbers[index]
        uniform = () if numbers is None else (numbers[:, len(drawn), None],)
        token, logprob = step(token, *uniform)
        drawn.append((there, token, logprob))
    return to_completions(*_table(drawn, sampling.max_new_tokens), sampling.eos, group)


def _runner(
    rows: _Rows, device: torch.device, function: Callable[..., tuple[Tensor, ...]]
) -> Callable[..., tuple[Tensor, ...]]:
    """The function, which steps rows once, after they have grown; by CUDA graphs where shapes are static."""
    graphs = Graphs(function, device) if rows.static else None

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        shape = rows.grow()
        return graphs(shape, *inputs) if graphs else function(*inputs)

    return run


def _staying(over: Flags, rows: _Rows) -> Ids | None:
    """The rows to keep, in their order, where dropping the others pays. Static shapes have few numbers of rows."""
    alive = ~over
    if rows.static:
        ended = np.flatnonzero(over)
        alive[ended[: max(0, bucket(int(alive.sum())) - int(alive.sum()))]] = True
        return None if alive.all() else closing_up(alive)
    return closing_up(alive) if over.sum() >= rows.gaps * len(over) else None


def _table(drawn: Sequence[tuple[Ids, Tensor, Tensor]], tokens: int) -> tuple[Any, Any]:
    """Ids and log-probs `[rows, tokens]` from those of each step; what was never drawn is 0."""
    where = np.concatenate([there for there, _, _ in drawn])
    steps = np.repeat(np.arange(len(drawn)), [len(there) for there, _, _ in drawn])
    shape = (len(drawn[0][0]), tokens)
    ids, logprobs = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    ids[where, steps] = torch.cat([token for _, token, _ in drawn]).cpu().numpy()
    logprobs[where, steps] = torch.cat([logprob for _, _, logprob in drawn]).cpu().numpy()
    return ids, logprobs


def _decoder(policy: Policy, prompts: Sequence[Sequence[int]], group: int, tokens: int) -> tuple[Tensor, Decoder]:
    logits, cache, mask = _prefill(policy, prompts, _empty_cache)
    # the last token drawn is not read
    own = SharedCache(_emptied(cache), mask, group, tokens - 1, static=policy.graphs)
    lengths = mask.sum(1).repeat_interleave(group)
    return logits, Decoder(policy.causal_lm, policy.vocabulary, own, lengths, tokens - 1)


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """As transformers', but its empty tensors are made on the device: those would be uploaded, and the host waits."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)
        self.is_initialized = True


def _empty_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = _GrowingLayer
    return cache


def _modules(policy: Policy, prompts: Sequence[Sequence[int]], group: int, _: int) -> tuple[Tensor, _Modules]:
    config = policy.causal_lm.config.get_text_config(decoder=True)
    logits, cache, mask = _prefill(policy, prompts, lambda: DynamicCache(config=config))
    return logits, _Modules(policy, cache, mask, group)


class _Modules:
    """By the forward pass of the whole model, its cache repeated for each completion."""

    gaps = 0.25  # dropping rows copies the cache
    static = False

    def __init__(self, policy: Policy, cache: DynamicCache, mask: Tensor, group: int) -> None:
        self._model, self._vocabulary = policy.causal_lm, policy.vocabulary
        self._cache = cache
        if group > 1:
            cache.reorder_cache(torch.arange(len(mask), device=mask.device).repeat_interleave(group))
        self._mask = mask.repeat_interleave(group, 0)
        self._positions = self._mask.sum(1)  # of each row's next token

    def grow(self) -> Hashable:
        return None

    def step(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        logits = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1, : self._vocabulary]
        self._positions = self._positions + 1
        return logits  # type: ignore[no-any-return]

    def keep(self, order: Ids, index: Tensor) -> None:
        self._cache.reorder_cache(index)
        self._mask, self._positions = self._mask[index], self._positions[index]


def _prefill(policy: Policy, prompts: Sequence[Sequence[int]], empty: Any) -> tuple[Tensor, DynamicCache, Tensor]:
    """Read each prompt once: logits `[prompts, ≥ V]` of what follows, its cache, and its mask `[prompts, width]`.

    Some prompts at a time, where the cache's parts can be joined: evaluation has as many prompts as rows.

    Args:
        empty: makes an empty cache.
    """
    ids, mask = (table.to(policy.device) for table in left_padded(prompts, ALIGNED if policy.graphs else 1))
    plain = all(type(layer) is DynamicLayer for layer in empty().layers)
    together = max(1, PREFILL_TOKENS // ids.shape[1]) if plain else len(prompts)
    read = []
    for first in range(0, len(prompts), together):
        rows = slice(first, first + together)
        cache = empty()
        logits = policy.causal_lm(
            input_ids=ids[rows],
            attention_mask=mask[rows],
            position_ids=(mask[rows].cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        read.append((logits, cache))
    if len(read) == 1:
        return *read[0], mask
    return torch.cat([logits for logits, _ in read]), _joined([cache for _, cache in read]), mask


def _joined(caches: Sequence[DynamicCache]) -> DynamicCache:
    """One cache of all rows; the parts are emptied on the way, lest both exist at once."""
    whole = _empty_cache()
    for index, layers in enumerate(zip(*map(_emptied, caches), strict=True)):
        whole.update(*(torch.cat(parts) for parts in zip(*layers, strict=True)), index)
    return whole


def _emptied(cache: DynamicCache) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of one layer after the other, which the cache then has no longer."""
    for layer in cache.layers:
        keys, values = layer.keys, layer.values
        layer.keys = layer.values = None
        yield keys, values
        del keys, values
