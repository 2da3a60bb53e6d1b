"""Our own engine: a prompt is read once for its whole group, log-probs are taken as tokens are drawn, rows that end go.

Models that `decoder` understands are decoded by it, others by transformers' modules with the cache that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ftis_node.fit.memory import PREFILL_TOKENS
from ftis_node.host.interruption import check
from ftis_node.packet import Completion
from ftis_node.policy.generate.cache import Flags, Ids, SharedCache, closing_up
from ftis_node.policy.generate.decoder import Decoder, reach
from ftis_node.policy.generate.graphs import Graphs
from ftis_node.policy.generate.sampler import draw
from ftis_node.policy.generate.sampling import Sampling, left_padded, to_completions
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.policy import Policy
from ftis_node.policy.reference_model import reference

# Steps between two looks at who has ended: on a GPU each waits for it.
_LOOK_EVERY = {"cpu": 1, "cuda": 8}

# Shapes change rarely where kernels are recorded: own tokens are read in multiples of the first, and rows dropped until
# a multiple of one of so many parts is left. On a CPU what is read in vain would cost time.
_TOKENS_READ = {"cpu": 1, "cuda": 64}
_PARTS = {"cuda": 8}


_Drawing = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class _Rows(Protocol):
    """Completions under way: `step` gives each row a token and returns logits `[rows, ≥ V]` of the next; `keep` drops.

    `grow` comes before each step; its answer changes when the step's shapes do, None if they always do.
    gaps  which part of the rows must have ended for dropping them to pay
    """

    gaps: float

    def grow(self) -> tuple[int, int] | None: ...

    def step(self, tokens: Tensor) -> Tensor: ...

    def keep(self, order: Ids) -> None: ...


def native(
    policy: Policy, prompts: Sequence[Sequence[int]], group: int, sampling: Sampling, generator: torch.Generator | None
) -> list[list[Completion]]:
    """One batch; see `generate.generate`."""
    longest = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
    if policy.lean and longest <= reach(policy.causal_lm):
        with torch.inference_mode():  # not for other modules: training cannot use what they may keep of it
            return _complete(policy, _decoder, prompts, group, sampling, generator)
    if "past_key_values" not in signature(policy.causal_lm.forward).parameters:  # Mamba has a cache of its own kind
        return reference(policy, prompts, group, sampling, generator)
    return _complete(policy, _modules, prompts, group, sampling, generator)


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
    for step in range(longest - 1):
        rows.grow()
        columns.append(rows.step(ids[:, step]))
    logprobs = torch.stack(columns, 1).float().log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]
    return torch.cat([logprobs[row, : len(completion)] for row, completion in enumerate(completions)])


def _complete(
    policy: Policy,
    start: Callable[[Policy, Sequence[Sequence[int]], int, int], tuple[Tensor, _Rows]],
    prompts: Sequence[Sequence[int]],
    group: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[list[Completion]]:
    """Draw tokens until all rows have ended.

    Args:
        start: reads the prompts and gives logits `[prompts, ≥ V]` of what follows them.
    """
    device, vocabulary = policy.device, policy.vocabulary
    drawing = partial(draw, temperature=sampling.temperature, greedy=sampling.greedy, generator=generator)
    ends = torch.zeros(vocabulary, dtype=torch.bool, device=device)
    ends[[end for end in sampling.eos if end < vocabulary]] = True
    logits, rows = start(policy, prompts, group, sampling.max_new_tokens)
    token, logprob = (part.flatten() for part in drawing(logits[:, :vocabulary], group))
    del logits  # before the next ones are made
    there = np.arange(len(token))  # which rows are left
    stretch = _Stretch(there, token, ends[token], rows, ends, drawing, sampling.max_new_tokens - 1)
    drawn = [(there, token[None], logprob[None])]
    graphs = Graphs(device, generator, wanted=policy.graphs)
    part = max(1, len(token) // _PARTS.get(device.type, len(token)))
    for step in range(1, sampling.max_new_tokens):
        check()
        if step % _LOOK_EVERY[device.type] == 0:
            over = stretch.finished.cpu().numpy()
            if over.all():
                break
            alive = _rounded_up(~over, part)
            if len(over) - alive.sum() >= max(1, rows.gaps * len(over)):
                drawn.append(stretch.drawn())
                order = closing_up(alive)
                rows.keep(order)
                stretch = stretch.kept(order, sampling.max_new_tokens - step)
        shapes = rows.grow()
        graphs.run(shapes, stretch.advance)
        stretch.steps += 1
    drawn.append(stretch.drawn())
    return to_completions(*_table(drawn, sampling.max_new_tokens), sampling.eos, group)


class _Stretch:
    """Tokens of the same rows, one step after another.

    there     which of the rows at first they are
    finished  which have drawn an end: bool `[rows]`, on the device
    steps     how many tokens each has drawn here
    """

    def __init__(
        self, there: Ids, token: Tensor, finished: Tensor, rows: _Rows, ends: Tensor, drawing: _Drawing, room: int
    ) -> None:
        self.there, self.finished, self.steps = there, finished, 0
        self._token, self._rows, self._ends, self._drawing = token.clone(), rows, ends, drawing
        self._ids = token.new_empty(room, len(token))
        self._logprobs = self._ids.new_empty(self._ids.shape, dtype=torch.float32)
        self._at = token.new_zeros(1)

    def advance(self) -> None:
        """Draw a token for each row: on the device, with nothing that changes from one step to the next."""
        token, logprob = self._drawing(self._rows.step(self._token)[:, : len(self._ends)], 1)
        self._token.copy_(token[:, 0])
        self.finished |= self._ends.index_select(0, self._token)
        self._ids.index_copy_(0, self._at, token.T)
        self._logprobs.index_copy_(0, self._at, logprob.T)
        self._at.add_(1)

    def kept(self, order: Ids, room: int) -> _Stretch:
        """The next stretch, of these rows and with room for so many tokens."""
        left = torch.from_numpy(order).to(self._token.device)
        token, finished = self._token[left], self.finished[left]
        return _Stretch(self.there[order], token, finished, self._rows, self._ends, self._drawing, room)

    def drawn(self) -> tuple[Ids, Tensor, Tensor]:
        """Its rows, and their ids and log-probs `[steps, rows]`."""
        return self.there, self._ids[: self.steps], self._logprobs[: self.steps]


def _rounded_up(alive: Flags, part: int) -> Flags:
    """As many rows as are alive, and of the others so many more that their number is a multiple of `part`."""
    more = -int(alive.sum()) % part
    kept = alive.copy()
    kept[np.flatnonzero(~alive)[:more]] = True
    return kept


def _table(drawn: Sequence[tuple[Ids, Tensor, Tensor]], tokens: int) -> tuple[Any, Any]:
    """Ids and log-probs `[rows, tokens]` from those of each stretch; what was never drawn is 0."""
    shape = (len(drawn[0][0]), tokens)
    ids, logprobs = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    begin = 0
    for there, token, logprob in drawn:
        end = begin + len(token)
        ids[there, begin:end] = token.cpu().numpy().T
        logprobs[there, begin:end] = logprob.cpu().numpy().T
        begin = end
    return ids, logprobs


def _decoder(policy: Policy, prompts: Sequence[Sequence[int]], group: int, tokens: int) -> tuple[Tensor, Decoder]:
    logits, cache, mask = _prefill(policy, prompts, _empty_cache)
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    # the last token drawn is not read
    own = SharedCache(layers, mask, group, tokens - 1, _TOKENS_READ.get(policy.device.type, 1))
    return logits, Decoder(policy.causal_lm, policy.vocabulary, own, mask.sum(1), tokens - 1)


class _Layer(DynamicLayer):  # type: ignore[misc]
    """As transformers', but its empty tensors are made on the device: those would be uploaded, and the host waits."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)
        self.is_initialized = True


def _empty_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = _Layer
    return cache


def _modules(policy: Policy, prompts: Sequence[Sequence[int]], group: int, _: int) -> tuple[Tensor, _Modules]:
    config = policy.causal_lm.config.get_text_config(decoder=True)
    logits, cache, mask = _prefill(policy, prompts, lambda: DynamicCache(config=config))
    return logits, _Modules(policy.causal_lm, cache, mask, group)


class _Modules:
    """By the forward pass of the whole model, its cache repeated for each completion."""

    gaps = 0.25  # dropping rows copies the cache

    def __init__(self, model: Any, cache: DynamicCache, mask: Tensor, group: int) -> None:
        self._model = model
        self._cache = cache
        if group > 1:
            cache.reorder_cache(torch.arange(len(mask), device=mask.device).repeat_interleave(group))
        self._mask = mask.repeat_interleave(group, 0)
        self._positions = self._mask.sum(1)  # of each row's next token

    def grow(self) -> None:
        """The cache grows by copying."""

    def step(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        logits = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        self._positions = self._positions + 1
        return logits  # type: ignore[no-any-return]

    def keep(self, order: Ids) -> None:
        rows = torch.from_numpy(order).to(self._mask.device)
        self._cache.reorder_cache(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]


def _prefill(policy: Policy, prompts: Sequence[Sequence[int]], empty: Any) -> tuple[Tensor, DynamicCache, Tensor]:
    """Read each prompt once: logits `[prompts, ≥ V]` of what follows, its cache, and its mask `[prompts, width]`.

    Some prompts at a time, where the cache's parts can be joined: evaluation has as many prompts as rows.

    Args:
        empty: makes an empty cache.
    """
    ids, mask = (table.to(policy.device) for table in left_padded(prompts))
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
    for index in range(len(caches[0].layers)):
        layers = [cache.layers[index] for cache in caches]
        whole.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
        for layer in layers:
            layer.keys = layer.values = None
    return whole
