"""Keys and values while generating: of a prompt once for its whole group, of completions each in a place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ftis_node.packet.arrays import BoolArray, Int64Array

LEAST_WIDTH = 64  # own tokens that attention reads at least where shapes are static

# Lines of so many elements begin at 16 bytes, also of two bytes each: a GPU's fast matrix products need that.
ALIGNED = 8


def closing_up(alive: BoolArray) -> Int64Array:
    """The rows that stay, in an order that moves few: each gap in front is filled by a row from the end.

    The result has the old place of each, and as many as `alive` has true ones.
    """
    kept = int(alive.sum())
    order = np.arange(kept)
    order[~alive[:kept]] = kept + np.flatnonzero(alive[kept:])
    return order


def bucket(count: int) -> int:
    """The least of 8, 16, 24, 32, 48, 64, 96, 128, … that is no smaller, 0 for 0: two in an octave.

    More of them would waste less of the device's work, and cost more captures; each costs about four tokens' time.
    """
    step = 8
    if count > 8:
        step = max(8, 1 << (count - 1).bit_length() - 2)
    return -(-count // step) * step


class Size(NamedTuple):
    """Places for so many rows and prompts, tokens of a prompt (`width`), own tokens of a row (`tokens`), and rows of
    one prompt (`group`). Own tokens are those of the row's completion.
    """

    rows: int
    prompts: int
    width: int
    tokens: int
    group: int

    def holds(self, other: Size) -> bool:
        """Whether places of this size do for the other."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def joined(self, other: Size) -> Size:
        """The least that holds both."""
        return Size(*map(max, self, other))


class SharedCache:
    """Keys and values of completions, and of the prompts before them, in places that are used again and again.

    A prompt's keys are held once. Attention reads them once for all rows of its group, as one product of matrices
    beside those with each row's own keys. One softmax runs over both. Rows are of unlike age, prompts of unlike length:
    a bias hides what is not there. Rows and prompts that are in use lie in front, so that attention reads no others.

    With static shapes attention reads own tokens up to the next `bucket`. So all that the device does for a token is
    the same for the next one, until `grow` or `settle` say otherwise.

    The order of calls: `clear`; whenever rows change, `leave`, `enter` and `shrink` as needed, then `settle`; for each
    token `grow`, `positions`, `bias`, in each layer `put` and `attend`, at last `advance`. What follows `grow` is
    what a CUDA graph replays.

    rows   how many are computed; one that has ended is computed until another takes its place
    heads  of keys
    """

    def __init__(
        self,
        size: Size,
        layers: int,
        heads: int,
        like: Tensor,
        *,
        static: bool,
    ) -> None:
        """
        Args:
            heads: of keys.
            like: of the device and dtype of keys and values, `[…, head_dim]`.
            static: whether shapes come in buckets; then the width of prompts is a multiple of `ALIGNED`.
        """
        self.static = static
        self.heads = heads
        self.size = size
        self._dim = like.shape[-1]
        self.rows = 0
        self._group = 0  # rows of one prompt at most
        self._count = 0  # places of prompts that attention reads
        self._line = 0  # rows of one prompt that it reads
        self._read = 0  # own tokens that it reads
        self._owner: Int64Array = np.full(size.rows, -1)  # the place of each row's prompt; -1: it has ended
        self._prompt: Int64Array = np.full(size.prompts, -1)  # the number of the prompt in each place
        self._start: Int64Array = np.zeros(size.rows, np.int64)  # tokens of each row's prompt
        self._filled = np.zeros_like(self._start)  # own tokens of each row that are in the cache
        self._bias = torch.zeros(size.rows, size.width + size.tokens, device=like.device)  # fp32, -inf hides
        # `_next` is what `_places` gives for each row's next token; `_most` is the highest that it may become
        last = self._places(np.full(size.rows, size.width), size.tokens - 1)
        self._most = torch.from_numpy(last).to(like.device)
        self._next = torch.zeros_like(self._most)
        # one piece of memory for `settle` to copy into: `_places`, then `_take`, then `_back`, which are parts of it; a
        # graph reads these where they were when it was captured
        cells = heads * (size.prompts * min(size.group, size.rows) + size.rows)
        self._index = self._next.new_zeros(self._next.numel() + cells)
        self._take = self._index  # row · kv heads + kv head of each cell of a table of prompts, see `_table`
        self._back = self._index  # the cell of each row
        self._where = self._index  # where keys and values of the present token go

        def room(places: int, tokens: int) -> list[Tensor]:  # read before they are written, so they must be numbers
            shape = (2, places, heads, tokens, self._dim)
            return [like.new_zeros(shape) for _ in range(layers)]

        self._own = room(size.rows, size.tokens)
        self._prompts = room(size.prompts, size.width)
        # `[2 (keys, values), places · heads, tokens, head_dim]`
        self._flat = []
        for own, prompts in zip(self._own, self._prompts, strict=True):
            self._flat.append((own.flatten(1, 2), prompts.flatten(1, 2)))

    def clear(self, rows: int, group: int) -> None:
        """Begin anew, with places for so many rows, of which at most `group` will have one prompt; `size` has room."""
        self.rows = rows
        self._count = 0
        self._group = group
        self._owner[:] = -1
        self._prompt[:] = -1
        self._start[:] = 0
        self._filled[:] = 0
        for part in (*self._own, *self._prompts):
            part.zero_()  # what diverged weights left would spoil what it is hidden from: 0 · NaN
        width = self.size.width
        self._bias[:, :width] = 0.0
        self._bias[:, width:] = -torch.inf

    def _places(self, start: Int64Array, filled: Any) -> Int64Array:
        """Where the next token of each row is, for rows with so many tokens of their prompts and of their own.

        int64 `[2 + 2 · kv heads, size.rows]`: its position, its place in the flat bias, and for keys, then values, the
        line of each kv head in `_own`.
        """
        rows, _, width, tokens, _ = self.size
        row = np.arange(rows)
        kinds = np.arange(2)[:, None, None]  # keys, values
        heads = np.arange(self.heads)[:, None]
        lines = (kinds * rows + row) * self.heads + heads
        keys = lines.reshape(-1, rows) * tokens + filled
        position = start + filled
        seen = row * (width + tokens) + width + filled
        return np.concatenate([[position, seen], keys])

    # --- between tokens: who is there -----------------------------------------------------------------------------

    def leave(self, over: Int64Array) -> None:
        """These rows have ended: their places, and those of prompts that no other row has, may be taken."""
        self._owner[over] = -1

    def enter(
        self,
        places: Int64Array,
        numbers: Int64Array,
        read: Sequence[tuple[Tensor, Tensor]],
        which: Int64Array,
        mask: BoolArray,
    ) -> None:
        """Rows take these places, each behind its prompt, which is kept once. There must be a place for each prompt.

        Args:
            numbers: of each row's prompt; in turn, so that those of one prompt follow one another.
            read: keys and values of each layer, `[prompts, kv heads, width, head_dim]`.
            which: each row's prompt among those.
            mask: which of their tokens are no padding, on the left, `[prompts, width]`.
        """
        new = self._give_places(numbers, which)
        at = {number: place for place, number in enumerate(self._prompt.tolist()) if number >= 0}
        self._owner[places] = [at[number] for number in numbers.tolist()]
        self._start[places] = mask.sum(1)[which]
        self._filled[places] = 0
        self._hide_padding(places, mask[which])
        if new:
            self._keep(read, new, mask.shape[1])

    def _give_places(self, numbers: Int64Array, which: Int64Array) -> dict[int, int]:
        """Give a free place to each prompt that has none; return by its place which of those read comes into it.

        numbers, which: as for `enter`.
        """
        used = self._used()
        self._prompt[~used] = -1
        free = iter(np.flatnonzero(~used).tolist())
        new: dict[int, int] = {}
        for number, one in zip(numbers.tolist(), which.tolist(), strict=True):
            if number not in self._prompt:
                place = next(free)
                self._prompt[place] = number
                new[place] = one
        return new

    def _hide_padding(self, places: Int64Array, known: BoolArray) -> None:
        """The bias of new rows: they see the tokens of their prompts, which stand on the right, and no own ones yet.

        known: which columns of each one's prompt are no padding, `[places, columns]`.
        """
        hidden = np.full((len(places), self._bias.shape[1]), -np.inf, np.float32)
        width = self.size.width
        of_prompts = hidden[:, width - known.shape[1] : width]
        of_prompts[known] = 0.0
        device = self._bias.device
        self._bias.index_copy_(0, torch.from_numpy(places).to(device), torch.from_numpy(hidden).to(device))

    def _keep(self, read: Sequence[tuple[Tensor, Tensor]], new: dict[int, int], width: int) -> None:
        """Copy keys and values of prompts that were read into their places, where they stand on the right.

        Args:
            new: by its place, which of those read a prompt is. width: columns of what was read.
        """
        to, which = torch.tensor([list(new), list(new.values())]).to(self._bias.device)
        first = self.size.width - width
        for prompts, parts in zip(self._prompts, read, strict=True):
            for mine, part in zip(prompts, parts, strict=True):
                columns = mine[:, :, first:]
                columns.index_copy_(0, to, part.index_select(0, which))

    def shrink(self, rows: int) -> Int64Array:
        """Close the gaps, so that only so many rows are computed; return the old place of each.

        rows: no fewer than have not ended; rows that have ended fill up to so many.
        """
        alive = self._owner[: self.rows] >= 0
        spare = rows - int(alive.sum())
        alive[np.flatnonzero(~alive)[:spare]] = True  # so many that have ended stay
        order = closing_up(alive)
        to = np.flatnonzero(order != np.arange(rows))
        self._move([*self._own, self._bias], order[to], to)
        for values in (self._owner, self._start, self._filled):
            values[:rows] = values[order]
        self._owner[rows:] = -1
        self.rows = rows
        self._count = 0  # `settle` counts anew
        return order

    def settle(self) -> None:
        """Tell the device who is where: once after all of `leave`, `enter` and `shrink`, before the next `grow`.

        Moves keys and values of the prompts in use to the front, and copies positions and the table of rows, in one
        transfer, to where CUDA graphs read them.
        """
        self._close_up_prompts()
        owner = self._owner[: self.rows]
        alive = np.flatnonzero(owner >= 0)
        sizes = np.bincount(owner[alive], minlength=self._count)
        self._line = max(1, int(sizes.max()))
        if self.static:  # the same whoever is there
            self._line = min(self._group, self.rows)
        take, back = self._table(alive, owner, sizes)
        places = self._places(self._start, np.minimum(self._filled, self.size.tokens - 1))
        index = np.concatenate([one.flatten() for one in (places, take, back)])
        mine = self._index[: len(index)]
        mine.copy_(torch.from_numpy(index))
        self._next.copy_(mine[: places.size].view_as(self._next))
        self._take, self._back = mine[places.size :].split_with_sizes([take.size, back.size])

    def _close_up_prompts(self) -> None:
        """Bring the prompts that are read to the front, and set how many places attention reads."""
        used = self._used()
        most = max(1, int(used.sum()))
        if self.static:
            self._count = max(self._count, min(self.size.prompts, bucket(most)))
        else:
            self._count = most
        far = self._count + np.flatnonzero(used[self._count :])
        free = np.flatnonzero(~used[: self._count])
        self._gather_prompts(far, free[: len(far)])

    def _table(
        self,
        alive: Int64Array,
        owner: Int64Array,
        sizes: Int64Array,
    ) -> tuple[Int64Array, Int64Array]:
        """The row in each cell `[prompts, kv heads, line]` of a table, and the cell of each `[row, kv head]`.

        Cells without a row have another's, which nobody asks for.

        Args:
            alive: the rows that have not ended. owner: the place of each row's prompt. sizes: rows of each prompt.
        """
        by_prompt = alive[np.argsort(owner[alive], kind="stable")]
        lines = owner[by_prompt]
        first = np.cumsum(sizes) - sizes
        nth = np.arange(len(alive)) - first[lines]
        heads = np.arange(self.heads)
        take = np.zeros((self._count, self.heads, self._line), np.int64)
        take[lines, :, nth] = by_prompt[:, None] * self.heads + heads
        back = np.zeros((self.rows, self.heads), np.int64)
        back[by_prompt] = (lines[:, None] * self.heads + heads) * self._line + nth[:, None]
        return take, back

    def _used(self) -> BoolArray:
        """Which places of prompts have one that some row reads: bool `[size.prompts]`."""
        used = np.zeros(self.size.prompts, np.bool_)
        used[self._owner[self._owner >= 0]] = True
        return used

    def _gather_prompts(self, far: Int64Array, to: Int64Array) -> None:
        """Move the prompts in places `far` to the free places `to`, as many; rows follow them. May be none."""
        self._move(self._prompts, far, to)
        moved = np.arange(self.size.prompts)
        moved[far] = to
        alive = self._owner >= 0
        self._owner[alive] = moved[self._owner[alive]]
        self._prompt[to] = self._prompt[far]
        self._prompt[far] = -1

    def _move(self, parts: Sequence[Tensor], source: Int64Array, to: Int64Array) -> None:
        """Copy what stands at places `source` to the places `to`, in place. All of it is read before any is written, so
        that the two may overlap.

        Args:
            parts: contiguous tables, all with as many places: `[2, places, heads, tokens, head_dim]` (keys, then
                values), of which the first must be one, or `[places, x]`.
            source: int64 `[n]`. to: as many.
        """
        if not len(to):
            return
        keys = np.stack([source, to])
        values = keys + len(self._of(parts[0])) // 2  # those of all places lie behind all keys
        index = torch.from_numpy(np.concatenate([keys, values], 1)).to(self._bias.device)  # [0] from, [1] to
        for part in parts:
            lines = self._of(part)
            mine = index
            if part.dim() == 2:  # one line a place
                mine = index[:, : len(to)]
            lines.index_copy_(0, mine[1], lines.index_select(0, mine[0]))

    @staticmethod
    def _of(part: Tensor) -> Tensor:
        """A table with one line a place: keys and values become `[2 · places, all of a place]`, in the same memory."""
        if part.dim() > 2:
            return part.flatten(0, 1).flatten(1)
        return part

    # --- for each token -------------------------------------------------------------------------------------------

    def grow(self) -> tuple[int, ...]:
        """Make room for the next token of every row, on the host; return what the shapes that follow depend on.

        CUDA graphs are captured once for each combination of these numbers.
        """
        most = self.size.tokens
        filled = self._filled[: self.rows]
        np.minimum(filled + 1, most, out=filled)
        alive = self._owner[: self.rows] >= 0
        self._read = int(filled[alive].max(initial=1))
        if self.static:
            self._read = min(max(LEAST_WIDTH, bucket(self._read)), most)
        return self.rows, self._count, self._line, self._read

    def positions(self) -> Tensor:
        """The position of each row's token, int64 `[rows]`. From here on attention sees the token."""
        following = self._next[:, : self.rows]
        self._bias.view(-1).index_fill_(0, following[1], 0.0)
        self._where = following[2:].flatten()
        return following[0]

    def advance(self) -> None:
        """The token is done. A row that has ended stays at its last place."""
        torch.minimum(self._next.add_(1), self._most, out=self._next)

    def put(self, layer: int, new: Tensor) -> None:
        """Write keys and values of the token, `[rows, 2, kv heads, head_dim]`, before `attend` of the same layer."""
        lines = self._own[layer].view(-1, self._dim)
        in_order = new.permute(1, 2, 0, 3).reshape(-1, self._dim)  # as `_places` counts: keys and values, heads, rows
        lines.index_copy_(0, self._where, in_order)

    def bias(self, window: int | None) -> Tensor:
        """What `attend` adds to scores, fp32 `[rows, 1, tokens read]`; window: the newest token sees so many."""
        rows = self.rows
        columns = self.size.width + self._read
        bias = self._bias[:rows, None, :columns]
        if window is None or window >= columns:
            return bias
        newest = self._next[1, :rows] % self._bias.shape[1]  # its column
        column = torch.arange(columns, device=bias.device)
        return bias.masked_fill(column <= (newest - window)[:, None, None], -torch.inf)

    def attend(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        bias: Tensor,
    ) -> Tensor:
        """query `[rows, heads, d]` → what it finds among its prompt's and its own tokens, `[rows, heads · d]`.

        scaling: what scores are multiplied by. bias: by `bias`, of this token and of the layer's window.
        """
        rows = self.rows
        read = self._read
        width = self.size.width
        lines = rows * self.heads
        own, prompts = self._flat[layer]  # of each [0] keys, [1] values
        own = own[:, :lines, :read]
        prompts = prompts[:, : self._count * self.heads]
        query = query.reshape(lines, -1, self._dim)  # queries that share a key head together
        queries = query.shape[1]
        of_prompt = self._by_row(_products(self._by_prompt(query), prompts[0]), queries)  # [lines, queries, width]
        scores = torch.cat([of_prompt, _products(query, own[0])], -1)
        together = scores.view(rows, -1, width + read)
        torch.add(bias, together, alpha=scaling, out=together)
        weights = scores.softmax(-1).to(query.dtype)
        found = torch.bmm(weights[..., width:], own[1])
        of_prompt = weights[..., :width]
        if not self.static:
            of_prompt = of_prompt.contiguous()  # faster on a CPU
        of_prompt = torch.bmm(self._by_prompt(of_prompt), prompts[1])
        found.add_(self._by_row(of_prompt, queries))
        return found.view(rows, -1)

    def _by_prompt(self, rows: Tensor) -> Tensor:
        """`[rows · kv heads, n, x]` → `[prompts · kv heads, line · n, x]`."""
        cells = rows.index_select(0, self._take)
        return cells.view(self._count * self.heads, -1, rows.shape[-1])

    def _by_row(self, table: Tensor, queries: int) -> Tensor:
        """The way back; queries: the n of `_by_prompt`."""
        cells = table.view(-1, queries, table.shape[-1])
        return cells.index_select(0, self._back)


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
