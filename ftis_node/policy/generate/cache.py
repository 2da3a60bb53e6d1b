"""Keys and values while generating: of a prompt once for its whole group, of completions in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Ids = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

LEAST_WIDTH = 64  # own tokens that attention reads at least where shapes are static

# Lines of so many elements begin at 16 bytes, also of two bytes each: a GPU's fast matrix products need that.
ALIGNED = 8


def closing_up(alive: Flags) -> Ids:
    """The rows that stay, in an order that moves few: each gap in front is filled by a row from the end."""
    kept = int(alive.sum())
    order = np.arange(kept)
    order[~alive[:kept]] = kept + np.flatnonzero(alive[kept:])
    return order


def bucket(count: int) -> int:
    """The least of 8, 16, 24, 32, 48, 64, 96, 128, … that is no smaller: two in an octave.

    More of them would waste less of the device's work, and cost more captures; each costs about four tokens' time.
    """
    step = max(8, 1 << (count - 1).bit_length() - 2) if count > 8 else 8
    return -(-count // step) * step


class SharedCache:
    """Keys and values of completions that grow in step, and of the prompts before them.

    A prompt's keys are held once. Attention reads them once for all rows of its group, as one product of matrices
    beside those with each row's own keys. One softmax runs over both. Own keys lie in buffers of full length, written
    in place where a counter on the device says. As all rows have equally many own tokens, only prompts of unlike length
    need a mask. Heads come before rows in memory, so both products read queries and weights as they lie.

    With static shapes attention reads own tokens up to the next `bucket`; those that are not there yet are masked. So
    all that the device does for a token is the same for the next one, until `grow` says otherwise.

    rows   how many there are; `keep` makes them fewer
    heads  of keys
    width  of the longest prompt
    """

    def __init__(
        self, prompts: Iterable[tuple[Tensor, Tensor]], mask: Tensor, group: int, tokens: int, *, static: bool = False
    ) -> None:
        """
        Args:
            prompts: keys and values of each layer, `[prompts, kv heads, width, head_dim]`; one layer's are copied at
                a time.
            mask: which of them are tokens and not padding, `[prompts, width]`. With static shapes their width is a
                multiple of `ALIGNED`.
            group: completions of each; row `p · group + i` is the i-th of prompt p.
            tokens: room for so many tokens of each row.
            static: whether shapes come in buckets.
        """
        tokens = -(-tokens // ALIGNED) * ALIGNED if static else tokens
        self.static, self._tokens, self._filled = static, tokens, 0
        self._count, self.width = mask.shape
        self.rows = self._count * group
        self._prompts: list[tuple[Tensor, Tensor]] = []  # [kv heads, prompts, width, head_dim]
        self._own: list[Tensor] = []  # [keys and values, kv heads, rows, tokens, head_dim]
        for keys, values in prompts:
            self._prompts.append((keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()))
            self.heads = keys.shape[1]
            self._own.append(self._room(keys))
        # where the newest token lies, among own tokens and behind the prompt's
        self._newest = torch.arange(2, device=mask.device) * self.width - 1
        self._bias: Tensor | None = None  # fp32 [rows or 1, width + tokens]: -inf hides
        padded = not bool(mask.all())
        if static or padded:
            hidden = (mask == 0).repeat_interleave(group, 0) if padded else (mask[:1] == 0)
            self._bias = torch.zeros(len(hidden), self.width + tokens, device=mask.device)
            self._bias[:, : self.width].masked_fill_(hidden, -torch.inf)
            if static:
                self._bias[:, self.width :] = -torch.inf
        self._owner = np.repeat(np.arange(self._count), group)  # the prompt of each row
        self._lay_out(mask.device)

    def grow(self) -> tuple[int, int]:
        """Make room for the next token of every row; return rows and own tokens that attention reads."""
        self._filled += 1
        return self.rows, self._read

    def advance(self) -> None:
        """Let the device go on to that token, where it counts by itself."""
        if self.static and self._bias is not None:
            self._newest.add_(1)
            self._bias.index_fill_(1, self._newest[1:], 0.0)

    def put(self, layer: int, new: Tensor) -> None:
        """Write keys and values that belong to the newest token, `[rows, 2, kv heads, head_dim]`."""
        own, new = self._own[layer], new.permute(1, 2, 0, 3)
        if self.static:
            own.index_copy_(3, self._newest[:1], new[:, :, :, None])
        else:  # on a CPU ten times as fast
            own[:, :, :, self._filled - 1] = new

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """query `[rows, heads, head_dim]` → what it finds among its prompt's and its own tokens `[rows, all of it]`."""
        rows, heads, dim, read = self.rows, self.heads, query.shape[-1], self._read
        query = query.view(rows, heads, -1, dim).transpose(0, 1).contiguous()  # queries that share a key head together
        keys, values = self._flat_prompts[layer]
        own_keys, own_values = (part[:, :read] for part in self._flat_own[layer])
        of_prompt = self._by_row(_products(self._by_prompt(query), keys))
        of_own = _products(query.flatten(0, 1), own_keys).view(heads, rows, -1, read)
        scores = torch.cat([of_prompt, of_own], -1)
        if self._bias is None:
            scores.mul_(scaling)
        else:
            torch.add(self._bias[:, None, : self.width + read], scores, alpha=scaling, out=scores)
        weights = scores.softmax(-1).to(query.dtype)
        found = torch.bmm(weights[..., self.width :].flatten(0, 1), own_values)
        of_prompt = self._by_prompt(weights[..., : self.width])
        if self._take is None:
            found.view(len(of_prompt), -1, dim).baddbmm_(of_prompt, values)
            found = found.view(heads, rows, -1, dim)
        else:
            found = found.view(heads, rows, -1, dim).add_(self._by_row(torch.bmm(of_prompt, values)))
        return found.transpose(0, 1).reshape(rows, -1)

    def keep(self, order: Ids, index: Tensor) -> None:
        """Keep these rows, in this order, here and on the device; a prompt without any goes too."""
        self.rows, self._owner = len(order), self._owner[order]
        for layer, old in enumerate(self._own):
            self._own[layer] = self._room(old[0, 0])
            self._own[layer][..., : self._filled, :] = old[..., : self._filled, :].index_select(2, index)
        if self._bias is not None and len(self._bias) > 1:
            self._bias = self._bias.index_select(0, index)
        left, self._owner = np.unique(self._owner, return_inverse=True)
        if len(left) < self._count:
            self._count = len(left)
            prompts = torch.from_numpy(left).to(index.device)
            for layer, pair in enumerate(self._prompts):
                self._prompts[layer] = (pair[0].index_select(1, prompts), pair[1].index_select(1, prompts))
        self._lay_out(index.device)

    @property
    def _read(self) -> int:
        """How many own tokens attention reads."""
        return min(max(LEAST_WIDTH, bucket(self._filled)), self._tokens) if self.static else self._filled

    def _room(self, like: Tensor) -> Tensor:
        """Own keys and values of a layer; where some are read before they are written, they must be numbers."""
        shape = (2, self.heads, self.rows, self._tokens, like.shape[-1])
        return like.new_zeros(shape) if self.static else like.new_empty(shape)

    def _lay_out(self, device: torch.device) -> None:
        """Where rows lie in a table with a line for each prompt; shorter lines are padded."""
        self._flat_prompts = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self._prompts]
        self._flat_own = [own.flatten(1, 2).unbind() for own in self._own]
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
        """`[kv heads, rows, n, x]` → `[kv heads · prompts, line · n, x]`."""
        if self._take is not None:
            rows = rows.index_select(1, self._take)
        return rows.view(self.heads * self._count, -1, rows.shape[-1])

    def _by_row(self, table: Tensor) -> Tensor:
        """The way back."""
        rows = table.view(self.heads, self._count * self._line, -1, table.shape[-1])
        return rows if self._back is None else rows.index_select(1, self._back)


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
