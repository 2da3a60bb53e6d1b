"""Many sequences as one, without padding, and each prompt once for all the completions that follow it.

A micro-batch is one row of tokens: the prompts, one after another, then the completions. Every layer but attention
treats tokens one by one and needs to know no more. Attention looks at a `Packing`: a prompt's tokens see their own
prompt, a completion's tokens see their prompt and their own past. The keys and values of a prompt are thus computed
once for a group of G, and its gradient is the sum over the G.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# The attention implementation's name within transformers.
ATTENTION = "ftis_packed"

_Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Prefixed:
    """A prompt and the completions that follow it; ids are integers, no completion is empty.

    given: bool `[T]` for each completion, the tokens of it that nobody sampled and that are not predicted; None or no
    entry: there are none.
    """

    prompt: Sequence[int]
    completions: Sequence[np.ndarray[Any, Any]]
    given: Sequence[np.ndarray[Any, Any] | None] = ()

    @property
    def sampled(self) -> list[slice | np.ndarray[Any, Any]]:
        """Which tokens of each completion were sampled."""
        given = self.given or [None] * len(self.completions)
        return [slice(None) if one is None else ~one for one in given]

    @property
    def tokens(self) -> int:
        """How many tokens go through the model: a completion's last one is only predicted."""
        return len(self.prompt) + sum(len(completion) - 1 for completion in self.completions)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Rows of unlike length, one after another in a flat array, and the way to a padded table and back.

    take    int64 `[rows · width]`  the token in each cell of the table; padding points at the first
    back    int64 `[tokens]`        the cell of each token
    filled  bool `[rows, width]`    which cells are tokens
    padded  whether any are not
    """

    take: Tensor
    back: Tensor
    filled: Tensor
    padded: bool

    def table(self, flat: Tensor) -> Tensor:
        """`[tokens, heads, d]` → `[rows, heads, width, d]`."""
        if self.padded:
            flat = _Gather.apply(flat, self.take, self.back, None)  # type: ignore[no-untyped-call]
        return flat.view(*self.filled.shape, *flat.shape[1:]).transpose(1, 2)

    def flat(self, table: Tensor) -> Tensor:
        """`[rows, heads, width, d]` → `[tokens, heads, d]`, without the padding."""
        flat = table.transpose(1, 2).flatten(0, 1)
        if self.padded:
            flat = _Gather.apply(flat, self.back, self.take, self.filled)  # type: ignore[no-untyped-call]
        return flat


class _Gather(torch.autograd.Function):
    """Rows `there` of a tensor; as no row is wanted twice but as padding, its gradient is a gather too, of rows `back`.

    `filled` masks the gradient where `back` points for padding; None if it has none.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, there: Tensor, back: Tensor, filled: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, filled)
        return source.index_select(0, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back, filled = ctx.saved_tensors
        by_source = gradient.index_select(0, back)
        if filled is not None:
            by_source.masked_fill_(~filled.view(-1, *[1] * (gradient.dim() - 1)), 0)
        return by_source, None, None, None


@dataclass(frozen=True, eq=False)
class Packing:
    """Where everything lies in one packed row of T tokens.

    ids, positions  int64 `[T]`  what the model is given
    where           int64 `[targets]`  the token whose hidden state predicts each sampled token
    targets         int64 `[targets]`  the sampled tokens, completion by completion
    """

    ids: Tensor
    positions: Tensor
    where: Tensor
    targets: Tensor
    prompts: _Cells
    completions: _Cells
    owner: Tensor

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The arguments of a decoder. A mask of four dimensions is handed on as it is, and nobody looks at it."""
        return {
            "input_ids": self.ids[None],
            "position_ids": self.positions[None],
            "attention_mask": self.ids.new_ones(1, 1, 1, 1),
            "packing": self,
        }

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Causal attention within each prompt, and of each completion to its prompt and itself.

        query `[T, heads, d]`, key and value `[T, kv heads, d]` → `[T, heads, d]`.
        """
        sizes = [self.prompts.back.numel(), self.completions.back.numel()]
        parts = [torch.split(part, sizes) for part in (query, key, value)]
        groups = query.shape[1] // key.shape[1]
        q, k, v = (self.prompts.table(part) for part, _ in parts)
        out = [self.prompts.flat(_sdpa(q, k, v, groups, scaling, is_causal=True))]
        if sizes[1]:
            own_q, own_k, own_v = (self.completions.table(part) for _, part in parts)
            k = torch.cat([k.index_select(0, self.owner), own_k], 2)
            v = torch.cat([v.index_select(0, self.owner), own_v], 2)
            out.append(self.completions.flat(_sdpa(own_q, k, v, groups, scaling, attn_mask=self.mask)))
        return torch.cat(out)

    @cached_property
    def mask(self) -> Tensor:
        """Which keys (prompt, then own) each token of a completion sees: bool `[N, 1, width, prompt + width]`."""
        rows, width = self.completions.filled.shape
        prompt = self.prompts.filled[self.owner][:, None, None].expand(rows, 1, width, -1)
        own = torch.ones(width, width, dtype=torch.bool, device=prompt.device).tril()
        return torch.cat([prompt, own.expand(rows, 1, width, width)], 3)


def unpackable(model: Any) -> str:
    """Why a model of transformers cannot take packed sequences, by its configuration; "" if it may."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if not model._supports_attention_backend:
        return "the model's attention is its own"
    odd = kinds != {"full_attention"} or window is not None
    return "its attention has a window, or is of several kinds" if odd else ""


def pack(groups: Sequence[Prefixed], device: torch.device) -> Packing:
    """Lay out prompts and completions; the last token of a completion is predicted only and so left out."""
    prompts = [np.asarray(group.prompt, dtype=np.int64) for group in groups]
    completions = [np.asarray(c, dtype=np.int64) for group in groups for c in group.completions]
    owner = np.repeat(np.arange(len(groups)), [len(group.completions) for group in groups])
    ends = np.cumsum([len(prompt) for prompt in prompts])
    begins = int(ends[-1]) + np.concatenate([[0], np.cumsum([len(c) - 1 for c in completions])])
    lengths = np.asarray([len(prompt) for prompt in prompts])
    positions = [np.arange(len(prompt)) for prompt in prompts]
    positions += [lengths[group] + np.arange(len(c) - 1) for group, c in zip(owner, completions, strict=True)]
    sampled = [which for group in groups for which in group.sampled]
    where = [
        np.concatenate([[ends[group] - 1], np.arange(begin, begin + len(c) - 1)])[which]
        for group, begin, c, which in zip(owner, begins, completions, sampled, strict=False)
    ]

    def tensor(parts: Sequence[_Ids]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Packing(
        ids=tensor([*prompts, *(c[:-1] for c in completions)]),
        positions=tensor(positions),
        where=tensor(where),
        targets=tensor([c[which] for c, which in zip(completions, sampled, strict=True)]),
        prompts=_rows([len(prompt) for prompt in prompts], device),
        completions=_rows([len(c) - 1 for c in completions], device),
        owner=torch.from_numpy(owner).to(device),
    )


@dataclass(frozen=True, eq=False)
class Padded:
    """The same for a model that cannot be packed: one row a completion, padded on the right.

    ids, mask       int64 `[N, L]`
    where, targets  int64 `[targets]`  as in `Packing`; `where` counts through the rows
    """

    ids: Tensor
    mask: Tensor
    where: Tensor
    targets: Tensor

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """The arguments of a decoder."""
        return {"input_ids": self.ids, "attention_mask": self.mask}


def pad(groups: Sequence[Prefixed], device: torch.device) -> Padded:
    """Lay out every completion after a copy of its prompt."""
    rows = [
        (list(group.prompt), *row) for group in groups for row in zip(group.completions, group.sampled, strict=True)
    ]
    lengths = np.asarray([len(prompt) + len(completion) for prompt, completion, _ in rows])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = np.zeros_like(mask)
    where = []
    for row, (prompt, completion, sampled) in enumerate(rows):
        ids[row, : lengths[row]] = np.concatenate([prompt, completion])
        first = row * ids.shape[1] + len(prompt) - 1  # the prompt's last position predicts the first completion token
        where.append(np.arange(first, first + len(completion))[sampled])
    targets = np.concatenate([completion[sampled] for _, completion, sampled in rows]).astype(np.int64)
    arrays = (ids, mask, np.concatenate(where), targets)
    return Padded(*(torch.from_numpy(array).to(device) for array in arrays))


def _rows(lengths: Sequence[int], device: torch.device) -> _Cells:
    """Rows of these lengths, one after another."""
    sizes = np.asarray(lengths, dtype=np.int64)
    filled = np.arange(max(lengths)) < sizes[:, None]
    first = np.cumsum(sizes) - sizes
    take = np.where(filled, first[:, None] + np.arange(filled.shape[1]), 0).reshape(-1)
    there, back, cells = (torch.from_numpy(array).to(device) for array in (take, np.flatnonzero(filled), filled))
    return _Cells(there, back, cells, padded=not filled.all())


def _sdpa(query: Tensor, key: Tensor, value: Tensor, groups: int, scaling: float | None, **kwargs: Any) -> Tensor:
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return scaled_dot_product_attention(query, key, value, scale=scaling, **kwargs)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls in every layer: query `[1, heads, T, d]`, key and value `[1, kv heads, T,
    d]`.

    Without a packing (generation) it is transformers' own SDPA.
    """
    if packing is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    return packing.attend(query, key, value, scaling)[None], None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
