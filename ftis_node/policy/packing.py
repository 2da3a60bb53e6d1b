"""Many sequences as one, without padding, and each prompt once for all the completions that follow it.

A micro-batch is one row of tokens: the prompts, one after another, then the completions. Every layer but attention
treats tokens one by one and needs to know no more. Attention looks at a `Packing`: a prompt's tokens see their own
prompt, a completion's tokens see their prompt and their own past; both no further than the layer's window, if it has
one. The keys and values of a prompt are thus computed once for a group of G, and its gradient is the sum over the G.

Attention goes one of two ways, which transformers knows by the names in `ATTENTIONS`. FlashAttention takes sequences of
unlike lengths as they lie, without padding, masks or repeated heads; it needs a GPU from Ampere on and two bytes a
number. Elsewhere the sequences are laid into padded tables, for torch's fused attention.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ftis_node.packet.arrays import AnyArray, Int64Array

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None  # type: ignore[assignment]
# Keys may have fewer heads than queries. Before torch 2.12 it takes them without a word.
_FEWER = {}
if varlen_attn is not None and "enable_gqa" in signature(varlen_attn).parameters:
    _FEWER = {"enable_gqa": True}


@dataclass(frozen=True, eq=False)
class Prefixed:
    """A prompt and the completions that follow it; ids are integers, neither the prompt nor a completion is empty.

    given: bool `[T]` for each completion, the tokens of it that nobody sampled and that are not predicted; None or no
    entry: there are none.
    """

    prompt: Sequence[int]
    completions: Sequence[AnyArray]
    given: Sequence[AnyArray | None] = ()

    @property
    def sampled(self) -> list[slice | AnyArray]:
        """Which tokens of each completion were sampled, as an index: all of them, or a bool mask `[T]`."""
        everything: list[slice | AnyArray] = [slice(None)] * len(self.completions)
        for place, given in enumerate(self.given):
            if given is not None:
                everything[place] = ~given
        return everything

    @property
    def tokens(self) -> int:
        """How many tokens go through a packed model: a completion's last one is only predicted."""
        return len(self.prompt) + sum(len(completion) - 1 for completion in self.completions)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Rows of unlike length, one after another in a flat array, and the way to a padded table and back.

    take    int64 `[rows · width]`  the token in each cell of the table; padding points at the first
    back    int64 `[tokens]`        the cell of each token
    filled  bool `[rows, width]`    which cells are tokens
    """

    take: Tensor
    back: Tensor
    filled: Tensor

    @property
    def padded(self) -> bool:
        """Whether some cells are no tokens."""
        return self.take.numel() > self.back.numel()

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
        """The gradient of `source`: each of its rows was taken once, so its gradient lies at one place."""
        back, filled = ctx.saved_tensors
        by_source = gradient.index_select(0, back)
        if filled is not None:
            by_source.masked_fill_(~filled.view(-1, *[1] * (gradient.dim() - 1)), 0)
        return by_source, None, None, None


@dataclass(frozen=True, eq=False)
class Packing:
    """Where sequences lie in one packed row of T tokens, by numbers on the host.

    `pack` makes one for each micro-batch. All layers share it: the first that asks makes tables and biases on the
    device, which last as long as the packing.

    prompts         int64 `[prompts]`  how long each is
    completions     int64 `[N]`  how many tokens of each go through the model: one less than it has, so 0 for one token
    owner           int64 `[N]`  the prompt of each, by its place in `prompts`
    """

    prompts: Int64Array
    completions: Int64Array
    owner: Int64Array
    device: torch.device
    _biases: dict[Any, tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def in_runs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """As `in_tables`, by FlashAttention. It aligns queries with the last keys: a completion's with its own.

        It needs torch 2.10, a GPU and two bytes a number: `ready` tries it nowhere else.
        """
        take, sizes = self._runs
        key = key.index_select(0, take)
        value = value.index_select(0, take)
        back = -1
        if window is not None:
            back = window - 1
        options: Any = {"scale": scaling, "window_size": (back, 0), **_FEWER}
        return varlen_attn(query, key, value, *sizes, **options)  # type: ignore[return-value]

    def in_tables(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Causal attention within each prompt, and of each completion to its prompt and itself.

        query `[T, heads, d]`, key and value `[T, kv heads, d]` → `[T, heads, d]`. window: each token sees so many,
        itself included; None: all before it.
        """
        prompts, completions, owner = self._tables
        sizes = [prompts.back.numel(), completions.back.numel()]
        prompt_query, own_query = torch.split(query, sizes)
        prompt_key, own_key = torch.split(key, sizes)
        prompt_value, own_value = torch.split(value, sizes)
        groups = query.shape[1] // key.shape[1]
        among, after = self._bias(window, query.dtype)
        keys = prompts.table(prompt_key)
        values = prompts.table(prompt_value)
        out = [prompts.flat(_sdpa(prompts.table(prompt_query), keys, values, groups, scaling, among))]
        if sizes[1]:
            keys = torch.cat([keys.index_select(0, owner), completions.table(own_key)], 2)
            values = torch.cat([values.index_select(0, owner), completions.table(own_value)], 2)
            found = _sdpa(completions.table(own_query), keys, values, groups, scaling, after)
            out.append(completions.flat(found))
        return torch.cat(out)

    def mask(self, window: int | None) -> Tensor:
        """Which keys (prompt, then own) each token of a completion sees: bool `[N, 1, width, prompt + width]`.

        prompt, width: of the longest prompt, and of the longest completion. window: as for `in_tables`.
        """
        prompts, completions, owner = self._tables
        rows, width = completions.filled.shape
        device = owner.device
        there = prompts.filled[owner][:, None]
        own = torch.arange(width, device=device)
        each = own[:, None]
        between = each - own
        prompt = there.expand(rows, width, -1)
        past = between >= 0
        if window is not None:
            place = there.sum(2, keepdim=True) + each  # of each token in its sequence
            prompt = prompt & (place - torch.arange(there.shape[2], device=device) < window)
            past &= between < window
        return torch.cat([prompt, past.expand(rows, width, width)], 2)[:, None]

    def _bias(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """0, or −inf for what is not seen: among prompts, None where plain causality says it; and by `mask`.

        The first is `[prompt, prompt]`, the second of the shape of `mask`.
        Made once for all layers of a kind: from a mask each layer would make, and keep, its own.
        """
        prompts, completions, owner = self._tables
        width = prompts.filled.shape[1]
        if window is not None and window >= width + completions.filled.shape[1]:
            window = None
        if (window, dtype) not in self._biases:
            among = None
            if window is not None and window < width:
                seen = torch.ones(width, width, dtype=torch.bool, device=owner.device).tril().triu(1 - window)
                among = _hiding(seen, dtype)
            self._biases[window, dtype] = among, _hiding(self.mask(window), dtype)
        return self._biases[window, dtype]

    @cached_property
    def _tables(self) -> tuple[_Cells, _Cells, Tensor]:
        """Prompts and completions as padded rows, and the prompt of each completion."""
        placed = _placed(self.device, *_rows(self.prompts), *_rows(self.completions), self.owner)
        take, back, filled, own_take, own_back, own_filled, owner = placed
        prompts = _Cells(take, back, filled.bool())
        completions = _Cells(own_take, own_back, own_filled.bool())
        return prompts, completions, owner

    @cached_property
    def _runs(self) -> tuple[Tensor, tuple[Tensor, Tensor, int, int]]:
        """What FlashAttention is given: the tokens of the keys, int64 `[keys]`, the prompts', then for each completion
        its prompt's and its own; where each sequence's queries and keys begin, and the end, int32 `[sequences + 1]`;
        and the most that one has.
        """
        lengths = np.concatenate([self.prompts, self.completions])
        tokens = np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])
        count = len(self.prompts)
        seen = tokens[:count]
        for prompt, own in zip(self.owner, tokens[count:], strict=True):
            if len(own):  # a completion of one token is only predicted
                seen.append(np.concatenate([tokens[prompt], own]))
        queries = lengths[lengths > 0]
        keys = np.asarray([len(each) for each in seen])
        take, query_ends, key_ends = _placed(self.device, np.concatenate(seen), _ends(queries), _ends(keys))
        sizes = (
            query_ends.int(),
            key_ends.int(),
            int(queries.max()),
            int(keys.max()),
        )
        return take, sizes


def unpackable(model: Any) -> str:
    """Why a model of transformers cannot take packed sequences, by its configuration; "" if it may; see `ready`."""
    if not model._supports_attention_backend:
        return "the model's attention is its own"
    if not {"full_attention", "sliding_attention"} >= set(getattr(model.config, "layer_types", None) or ()):
        return "its attention is of several kinds"
    if getattr(model.config, "attn_logit_softcapping", None):
        return "its attention caps its scores"
    return ""


class LaidOut(NamedTuple):
    """What a decoder is given of some sequences.

    inputs   its arguments
    where    int64 `[targets]`  which of its hidden states, counted through all rows, predicts each sampled token
    targets  int64 `[targets]`  the sampled tokens, completion by completion
    """

    inputs: Mapping[str, Any]
    where: Tensor
    targets: Tensor


def pack(groups: Sequence[Prefixed], device: torch.device) -> LaidOut:
    """Lay out prompts and completions in one row; the last token of a completion is predicted only and so left out.

    The model must attend by one of `ATTENTIONS`, see `ready`. There is one completion at least.
    """
    prompts = [np.asarray(group.prompt, dtype=np.int64) for group in groups]
    completions = [np.asarray(one, dtype=np.int64) for group in groups for one in group.completions]
    sampled = [which for group in groups for which in group.sampled]
    owner = np.repeat(np.arange(len(groups)), [len(group.completions) for group in groups])
    lengths = np.asarray([len(prompt) for prompt in prompts])
    counts = np.asarray([len(completion) - 1 for completion in completions])
    ends = np.cumsum(lengths)  # of prompts
    begins = ends[-1] + np.cumsum(counts) - counts  # of completions
    positions = [np.arange(length) for length in lengths]
    predicting = []
    predicted = []
    for number, completion in enumerate(completions):
        group = owner[number]
        steps = np.arange(counts[number])
        positions.append(lengths[group] + steps)
        states = np.concatenate([[ends[group] - 1], begins[number] + steps])  # its prompt's last predicts the first
        predicting.append(states[sampled[number]])
        predicted.append(completion[sampled[number]])
    tokens = [*prompts, *(completion[:-1] for completion in completions)]
    ids, places, where, targets = _placed(device, *map(np.concatenate, (tokens, positions, predicting, predicted)))
    inputs = {
        "input_ids": ids[None],
        "position_ids": places[None],
        "attention_mask": ids.new_ones(1, 1, 1, 1),  # of four dimensions it is handed on as it is; nobody looks at it
        "packing": Packing(lengths, counts, owner, device),
    }
    return LaidOut(inputs, where, targets)


def pad(groups: Sequence[Prefixed], device: torch.device) -> LaidOut:
    """The same for a model that cannot be packed: one row a completion after a copy of its prompt, padded on the right,
    where no token looks. Without a mask, attention is plainly causal, for which GPUs are fastest. All tokens go through
    the model, a completion's last one too.
    """
    rows = []
    for group in groups:
        for completion, sampled in zip(group.completions, group.sampled, strict=True):
            rows.append((group.prompt, completion, sampled))
    lengths = np.asarray([len(prompt) + len(completion) for prompt, completion, _ in rows])
    table = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    where = []
    for row, (prompt, completion, sampled) in enumerate(rows):
        table[row, : lengths[row]] = np.concatenate([prompt, completion])
        first = row * table.shape[1] + len(prompt) - 1  # the prompt's last position predicts the first completion token
        where.append(np.arange(first, first + len(completion))[sampled])
    targets = np.concatenate([completion[sampled] for _, completion, sampled in rows])
    ids, *places = _placed(device, table, np.concatenate(where), targets)
    return LaidOut({"input_ids": ids}, *places)


def _ends(sizes: Int64Array) -> Int64Array:
    """Where sequences of these lengths begin, one after another, and the end: int64 `[sequences + 1]`."""
    return np.concatenate([[0], np.cumsum(sizes)])


def _rows(sizes: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """`take`, `back` and `filled` of `_Cells`, of rows of these lengths one after another; all as integers."""
    filled = np.arange(sizes.max()) < sizes[:, None]
    first = np.cumsum(sizes) - sizes
    tokens = first[:, None] + np.arange(filled.shape[1])
    take = np.where(filled, tokens, 0).reshape(-1)
    return take, np.flatnonzero(filled), filled.astype(np.int64)


def _placed(device: torch.device, *arrays: Int64Array) -> list[Tensor]:
    """Integers on the device, int64 of the same shapes, in one transfer: the host waits for each."""
    together = np.concatenate([array.reshape(-1).astype(np.int64) for array in arrays])
    flat = torch.from_numpy(together).to(device)
    parts = torch.split(flat, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _hiding(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias of the shape of `seen`, 0 where that is true and else −inf.

    Its lines begin at multiples of 8, for a GPU's kernel would copy others for each layer.
    """
    width = seen.shape[-1]
    line = -(-width // 8) * 8
    bias = torch.zeros(*seen.shape[:-1], line, dtype=dtype, device=seen.device)
    return bias[..., :width].masked_fill_(~seen, -torch.inf)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: int,
    scaling: float | None,
    bias: Tensor | None,
) -> Tensor:
    """torch's attention, `[rows, heads, width, d]`. groups: query heads a key head. bias: None is plain causality."""
    return scaled_dot_product_attention(
        query,
        repeat_kv(key, groups),
        repeat_kv(value, groups),
        bias,
        is_causal=bias is None,
        scale=scaling,
    )


def _attention(
    way: Callable[..., Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls in every layer: query `[1, heads, T, d]`, key and value `[1, kv heads, T,
    d]`.

    Without a packing (generation) it is transformers' own SDPA. It returns `[1, T, heads, d]`, and no weights.

    Args:
        way: a value of `ATTENTIONS`, bound below; the rest is transformers'. packing: of `LaidOut.inputs`.

    Raises:
        ValueError: the layer wants something of attention that packing does not know.
    """
    if packing is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    given = {name for name, value in kwargs.items() if value is not None}
    unknown = {"softcap", "s_aux", "position_bias"} & given
    if unknown:
        raise ValueError(f"packed attention knows no {' or '.join(unknown)}")  # small ones would hardly show
    found = way(
        packing,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        sliding_window,
    )
    return found[None], None


# The two ways by their names within transformers, the faster first: `ready` tries them in this order.
ATTENTIONS: Mapping[str, Callable[..., Tensor]] = {
    "ftis_runs": Packing.in_runs,
    "ftis_tables": Packing.in_tables,
}
for _name, _way in ATTENTIONS.items():
    AttentionInterface.register(_name, partial(_attention, _way))
    AttentionMaskInterface.register(_name, sdpa_mask)
