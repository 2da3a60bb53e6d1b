"""Keys and values while generating: of a prompt once for its whole group, of completions in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Ids = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def closing_up(alive: Flags) -> Ids:
    """The rows that stay, in an order that moves few: each gap in front is filled by a row from the end."""
    kept = int(alive.sum())
    order = np.arange(kept)
    order[~alive[:kept]] = kept + np.flatnonzero(alive[kept:])
    return order


class SharedCache:
    """Keys and values of completions that grow in step, and of the prompts before them.

    A prompt's keys are held once. Attention reads them once for all rows of its group, as one product of matrices
    beside those with each row's own keys. One softmax runs over both. Own keys lie in buffers of full length, written
    in place. Gaps of rows that ended are closed in place, so nothing grows. As all rows have equally many
    own tokens, only prompts of unlike length need a mask.

    Between two calls of `grow` with the same answer everything has the same shape and the same place in memory, and
    numbers that change are on the device: so a CUDA graph can do it again.

    rows   how many there are; `keep` makes them fewer
    owner  the prompt of each, among those given at first: int64 `[rows]`
    place  of the newest token among a row's own: int64 `[1]`, on the device
    """

    def __init__(
        self, prompts: Sequence[tuple[Tensor, Tensor]], mask: Tensor, group: int, tokens: int, step: int = 1
    ) -> None:
        """
        Args:
            prompts: keys and values of each layer, `[prompts, kv heads, width, head_dim]`; taken over and changed.
            mask: which of them are tokens and not padding, `[prompts, width]`.
            group: completions of each; row `p · group + i` is the i-th of prompt p.
            tokens: room for so many tokens of each row.
            step: attention reads a multiple of so many own tokens, those to come masked.
        """
        keys = prompts[0][0]
        self._count, self._heads, self._width, self._dim = keys.shape
        self._prompts = [(keys.contiguous(), values.contiguous()) for keys, values in prompts]
        self.rows = self._count * group
        shape = (self.rows, self._heads, tokens, self._dim)
        make = keys.new_zeros if step > 1 else keys.new_empty  # 0 · NaN of what is masked would be NaN
        self._own = [(make(shape), make(shape)) for _ in prompts]
        self._filled = self._read = 0
        self._step, self._tokens = step, tokens
        self.place = torch.zeros(1, dtype=torch.int64, device=keys.device)
        self._columns = torch.arange(tokens, device=keys.device)
        self._to_come: Tensor | None = None  # fp32 [own tokens read], −inf for those that are not there yet
        self._bias: Tensor | None = None  # fp32 [prompts, 1, 1, width]
        if not bool(mask.all()):
            self._bias = keys.new_zeros(mask.shape, dtype=torch.float32).masked_fill_(mask == 0, -torch.inf)[
                :, None, None
            ]
        self._given = np.arange(self._count)  # which of the prompts that were given at first those that are left are
        self._owner = np.repeat(self._given, group)  # among those that are left
        self._lay_out(keys.device)

    def grow(self) -> tuple[int, int]:
        """Make room for the next token of every row; return how many rows there are and own tokens are read."""
        self._filled += 1
        self._read = min(self._tokens, -(-self._filled // self._step) * self._step)
        return self.rows, self._read

    def begin(self) -> None:
        """Begin a token: on the device, as all that follows until `end`."""
        if self._step > 1:
            there = self._columns[: self._read] <= self.place
            self._to_come = torch.zeros_like(there, dtype=torch.float32).masked_fill_(~there, -torch.inf)

    def end(self) -> None:
        """End a token."""
        self.place.add_(1)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write what belongs to the newest token, `[rows, kv heads, head_dim]` each."""
        for buffer, new in zip(self._own[layer], (keys, values), strict=True):
            if self._step > 1:
                buffer[: self.rows].index_copy_(2, self.place, new[:, :, None])
            else:
                buffer[: self.rows, :, self._filled - 1] = new

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """query `[rows, heads, head_dim]` → what it finds among its prompt's and its own tokens `[rows, all of it]`."""
        rows, heads, dim = self.rows, self._heads, self._dim
        query = query.view(rows, heads, -1, dim)  # [.., queries that share a key head, ..]
        keys, values = self._flat_prompts[layer]
        own_keys, own_values = self._flat_own[layer]
        of_prompt = _products(self._by_prompt(query), keys)
        if self._bias is not None:
            of_prompt.view(self._count, heads, -1, self._width).add_(self._bias)
        of_own = _products(query.flatten(0, 1), own_keys[:, : self._read]).view(rows, heads, -1, self._read)
        if self._to_come is not None:
            of_own.add_(self._to_come)
        scores = torch.cat([self._by_row(of_prompt), of_own], -1)
        weights = scores.mul_(scaling).softmax(-1).to(query.dtype)
        from_own = torch.bmm(weights[..., self._width :].flatten(0, 1), own_values[:, : self._read]).view(query.shape)
        from_prompt = torch.bmm(self._by_prompt(weights[..., : self._width]), values)
        return from_own.add_(self._by_row(from_prompt)).view(rows, -1)

    def keep(self, order: Ids) -> None:
        """Keep these rows, in an order that `closing_up` gave; a prompt without any goes too."""
        _close([part[:, :, : self._filled] for layer in self._own for part in layer], order)
        self.rows, self._owner = len(order), self._owner[order]
        needed = np.zeros(self._count, dtype=np.bool_)
        needed[self._owner] = True
        if not needed.all():
            left = closing_up(needed)
            _close([part for layer in self._prompts for part in layer], left)
            now = np.empty(self._count, dtype=np.int64)
            now[left] = np.arange(len(left))
            self._count, self._owner, self._given = len(left), now[self._owner], self._given[left]
            if self._bias is not None:
                self._bias = self._bias[torch.from_numpy(left).to(self._bias.device)]
        self._lay_out(self.owner.device)

    def _lay_out(self, device: torch.device) -> None:
        """Where rows lie in a table with a line for each prompt; shorter lines are padded."""
        self.owner = torch.from_numpy(self._given[self._owner]).to(device)
        self._flat_prompts = [_flat(layer, self._count) for layer in self._prompts]
        self._flat_own = [_flat(layer, self.rows) for layer in self._own]
        sizes = np.bincount(self._owner, minlength=self._count)
        self._line = int(sizes.max())
        self._take: Tensor | None = None  # the row in each cell [prompts · line], and the cell of each row
        self._back: Tensor | None = None
        if np.array_equal(self._owner, np.repeat(np.arange(self._count), self._line)):
            return
        by_prompt = np.argsort(self._owner, kind="stable")
        owner = self._owner[by_prompt]
        cells = owner * self._line + np.arange(self.rows) - (np.cumsum(sizes) - sizes)[owner]
        take, back = np.zeros(self._count * self._line, dtype=np.int64), np.empty(self.rows, dtype=np.int64)
        take[cells], back[by_prompt] = by_prompt, cells
        self._take, self._back = (torch.from_numpy(index).to(device) for index in (take, back))

    def _by_prompt(self, rows: Tensor) -> Tensor:
        """`[rows, kv heads, n, x]` → `[prompts · kv heads, line · n, x]`."""
        if self._take is not None:
            rows = rows.index_select(0, self._take)
        table = rows.reshape(self._count, self._line, self._heads, -1, rows.shape[-1]).transpose(1, 2)
        return table.reshape(self._count * self._heads, -1, rows.shape[-1])

    def _by_row(self, table: Tensor) -> Tensor:
        """The way back."""
        lines = table.view(self._count, self._heads, self._line, -1, table.shape[-1])
        rows = lines.transpose(1, 2).flatten(0, 1)
        return rows if self._back is None else rows.index_select(0, self._back)


def _flat(pair: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Views of the first `count` rows of keys and values, `[count · kv heads, tokens, head_dim]`."""
    keys, values = pair
    return keys[:count].flatten(0, 1), values[:count].flatten(0, 1)


def _close(tensors: Sequence[Tensor], order: Ids) -> None:
    """Put rows where `order` wants them, one tensor at a time: those that move are all from behind its end."""
    to = np.flatnonzero(order != np.arange(len(order)))
    if not len(to):
        return
    device = tensors[0].device
    into, out = torch.from_numpy(to).to(device), torch.from_numpy(order[to]).to(device)
    for tensor in tensors:
        tensor.index_copy_(0, into, tensor.index_select(0, out))


# Whether a product of bf16 matrices can be given in fp32 as it is summed: not before torch 2.8, nor on ROCm.
_WIDENS = hasattr(torch.ops.aten.bmm, "dtype") and torch.version.hip is None


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """query `[n, q, d]` · keys `[n, k, d]` → fp32 `[n, q, k]`, also where those are of bf16, as fused attention does.

    Rounded to bf16, scores of 20 would be off by up to 0.06.
    """
    keys = keys.transpose(1, 2)
    if query.dtype == torch.float32:
        return torch.bmm(query, keys)
    if query.is_cuda and _WIDENS:
        return torch.bmm(query, keys, out_dtype=torch.float32)
    return torch.bmm(query.float(), keys.float())
