"""Reading prompts: some at a time, ahead of the rows that will follow them, with the first token of each row."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ftis_node.fit.memory import PREFILL_TOKENS
from ftis_node.host.doing import advance
from ftis_node.packet.arrays import BoolArray, Int64Array
from ftis_node.policy.generate.cache import ALIGNED
from ftis_node.policy.generate.sampler import choose
from ftis_node.policy.generate.sampling import Prompts, Sampling, left_padded
from ftis_node.policy.policy import Policy

SHARED_LEAST = 64  # tokens that prompts must share to be read once


@dataclass(frozen=True, eq=False)
class Read:
    """Prompts that were read, one after another.

    first     number of the first, among all prompts
    logits    of what follows each, `[prompts, ≥ V]`
    cache     keys and values
    mask      which of their tokens are no padding, on the left, bool `[prompts, width]`, on the CPU
    """

    first: int
    logits: Tensor
    cache: DynamicCache
    mask: BoolArray

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, `[prompts, kv heads, width, head_dim]`."""
        return [(layer.keys, layer.values) for layer in self.cache.layers]


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """As transformers', but its empty tensors are made on the device: those would be uploaded, and the host waits."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = key_states.new_empty(0)
        self.values = value_states.new_empty(0)
        self.is_initialized = True


def _growing() -> DynamicCache:
    """An empty cache for `decoder`."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = _GrowingLayer
    return cache


def beginning_of(
    policy: Policy,
    prompts: Prompts,
    window: float,
    least: int = SHARED_LEAST,
) -> DynamicCache | None:
    """Read what all prompts begin with: keys and values of one row, or None where it does not pay.

    `read` copies it for each of its prompts, so one beginning serves all of its calls.

    Args:
        window: how many tokens each layer sees at least. If the longest prompt has more, nothing is shared, for
            transformers counts a window in columns, and those between a beginning and what follows it may be empty.
        least: how many tokens must be shared to be read apart.
    """
    lengths = [len(prompt) for prompt in prompts]
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    length = min(sum(1 for _ in alike), min(lengths) - 1)  # each has a last token of its own
    if len(prompts) < 2 or length < least or _width(policy, prompts) > window:
        return None
    cache = _growing()
    ids = torch.tensor([prompts[0][:length]])
    _logits(policy, ids, torch.ones_like(ids), cache)
    return cache


def read(
    policy: Policy,
    prompts: Prompts,
    first: int = 0,
    beginning: DynamicCache | None = None,
) -> Read:
    """Read prompts side by side, for the native decoder. Their keys and values take memory: see `together`.

    Args:
        first: the number of the first of them among all prompts, which `Read` is told.
        beginning: what they begin with, by `beginning_of`; it stays as it is. None: each is read whole.
    """
    width = _width(policy, prompts)
    begun = 0
    cache = _growing()
    if beginning is not None:
        begun = beginning.get_seq_length()
        cache = deepcopy(beginning)
        cache.batch_repeat_interleave(len(prompts))
    ids, mask = left_padded([prompt[begun:] for prompt in prompts], width - begun)
    mask = torch.cat([mask.new_ones(len(prompts), begun), mask], 1)  # the beginning, padding, the rest of each
    logits = _logits(policy, ids, mask, cache)
    if begun:
        _close(cache, mask)
    known = mask.sort(1).values  # padding on the left
    return Read(first, logits, cache, known.numpy().astype(np.bool_))


def _width(policy: Policy, prompts: Prompts) -> int:
    """The columns that these prompts take side by side."""
    longest = max(map(len, prompts))
    if policy.graphs:
        return -(-longest // ALIGNED) * ALIGNED
    return longest


def _logits(policy: Policy, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Logits of what follows each row, `[rows, ≥ V]`; keys and values of the rows are added to the cache.

    Args:
        ids: int64 `[rows, n]`, padded on the left.
        mask: which columns are no padding, int64 `[rows, tokens in the cache + n]`.
    """
    mask = mask.to(policy.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits: Tensor = policy.causal_lm(
        input_ids=ids.to(policy.device),
        attention_mask=mask,
        position_ids=positions[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits[:, -1]


def _close(cache: DynamicCache, mask: Tensor) -> None:
    """Move what stands before padding behind it, in the cache, so that every row is padded on the left only.

    mask: which columns are no padding, int64 `[rows, columns]`, on the CPU.
    """
    order = mask.argsort(dim=1, stable=True)  # padding comes first; what is none stays in its order
    for layer in cache.layers:
        index = order.to(layer.keys.device)[:, None, :, None].expand_as(layer.keys)
        layer.keys = layer.keys.gather(2, index)
        layer.values = layer.values.gather(2, index)


def read_whole(policy: Policy, prompts: Prompts) -> Read:
    """Read all prompts for transformers' modules, with the cache that these need: some at a time, where its parts can
    be joined, for evaluation has as many prompts as rows. All are padded to one width."""
    config = policy.causal_lm.config.get_text_config(decoder=True)
    size = len(prompts)
    if all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers):
        size = together(policy, prompts)
    width = max(map(len, prompts))
    parts = []
    for first in range(0, len(prompts), size):
        cache = DynamicCache(config=config)
        ids, mask = left_padded(prompts[first : first + size], width)
        logits = _logits(policy, ids, mask, cache)
        parts.append(Read(first, logits, cache, mask.numpy().astype(np.bool_)))
    if len(parts) == 1:
        return parts[0]
    known = np.concatenate([part.mask for part in parts])
    logits = torch.cat([part.logits for part in parts])
    return Read(0, logits, _joined([part.cache for part in parts]), known)


def together(policy: Policy, prompts: Prompts) -> int:
    """How many of the prompts are read at a time: as many as have `PREFILL_TOKENS`, were all as long as the longest."""
    return max(1, PREFILL_TOKENS[policy.device.type] // max(map(len, prompts)))


@dataclass(eq=False)
class WaitingRows:
    """Rows that wait for a place, in turn. Their prompts are read some at a time, when the first of them gets one.

    Rows are numbered prompt by prompt, `group` for each.

    noise   see `stream.generate`; here on the device, and no more of it than is drawn with; None: greedily
    reads   the next prompts, from the one of this number on
    count   of all rows; left: of those that wait still
    """

    policy: Policy
    prompts: Prompts
    group: int
    sampling: Sampling
    noise: Tensor | None
    reads: Callable[[int], Read]

    def __post_init__(self) -> None:
        self.count = self.left = len(self.prompts) * self.group
        self._read: tuple[Read, Tensor, Tensor] | None = None
        if self.noise is not None:
            self.noise = self.noise[:, : self.sampling.max_new_tokens].to(self.policy.device).contiguous()

    def take(self, count: int) -> Iterator[tuple[Int64Array, Read, Tensor, Tensor]]:
        """So many rows, or all that are left: their numbers, what was read, their first tokens and these' log-probs.

        They come in portions, one for each `Read`. A row that was taken waits no more; go through all portions.
        """
        while count and self.left:
            number = self.count - self.left
            if self._read is None:
                self._read = self._drawn(self.reads(number // self.group))
            read, token, logprob = self._read
            began = read.first * self.group
            some = min(count, began + len(token) - number)
            mine = slice(number - began, number - began + some)
            yield np.arange(number, number + some), read, token[mine], logprob[mine]
            count = count - some
            self.left = self.left - some
            if mine.stop == len(token):
                self._read = None

    def _drawn(self, read: Read) -> tuple[Read, Tensor, Tensor]:
        """These prompts with the first token of each row behind them, and its log-prob, both `[prompts · group]`.

        Greedily all rows of a prompt have the same. The progress that people see counts the prompts as read.
        """
        count = len(read.mask)
        advance(read=count)
        uniform = None
        if self.noise is not None:
            begin = read.first * self.group
            end = begin + count * self.group
            uniform = self.noise[begin:end, 0].view(-1, self.group)
        vocabulary = self.policy.vocabulary
        drawn = choose(
            read.logits[:, :vocabulary],
            uniform,
            self.sampling.temperature,
            vocabulary,
        )
        token, logprob = (part.expand(-1, self.group).flatten() for part in drawn)
        return read, token, logprob


def _joined(caches: Sequence[DynamicCache]) -> DynamicCache:
    """One cache of all rows in order. The parts, of one width, are emptied on the way, lest both exist at once."""
    whole = _growing()
    by_layer = zip(*(cache.layers for cache in caches), strict=True)
    for index, layers in enumerate(by_layer):
        keys = torch.cat([layer.keys for layer in layers])
        values = torch.cat([layer.values for layer in layers])
        for layer in layers:
            layer.keys = layer.values = None
        whole.update(keys, values, index)
    return whole
