"""Our own engine: a prompt is read once for its whole group, log-probs are taken as tokens are drawn, and a row that
ends gives its place to one that waits.

Models that `decoder` understands are decoded by it, others by transformers' modules with the cache that they need.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ftis_node.fit.memory import PROMPT_WIDTHS
from ftis_node.host.doing import advance
from ftis_node.host.interruption import check
from ftis_node.packet.arrays import Int64Array
from ftis_node.policy.generate.cache import ALIGNED, Size, bucket, closing_up
from ftis_node.policy.generate.decoder import Decoder
from ftis_node.policy.generate.graphs import Graphs, Step, Tensors
from ftis_node.policy.generate.kept import kept
from ftis_node.policy.generate.prefill import Read, WaitingRows, beginning_of, read, read_whole, together
from ftis_node.policy.generate.sampler import choose
from ftis_node.policy.generate.sampling import CompletionGroups, Prompts, Sampling, to_completions
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.policy import Policy

# Steps between two looks at who has ended: on a GPU each waits for it.
_LOOK_EVERY = {"cpu": 1, "cuda": 8}


@torch.inference_mode()  # not for other modules: training cannot use what they may keep of it
def decode(
    policy: Policy,
    prompts: Prompts,
    group: int,
    sampling: Sampling,
    noise: Tensor | None,
    rows: int,
) -> CompletionGroups:
    """Generate by the native decoder, at most `rows` rows side by side, of whichever prompts; see `stream.generate`.

    With static shapes its places and graphs stay in `kept` for the next call.

    Args:
        noise: as there; None: greedily.

    Raises:
        Interrupted: it was asked for. FtisError: as `sampling.to_completions`.
    """
    if not prompts:
        return []
    wanted = len(prompts) * group
    if policy.graphs:
        wanted = bucket(wanted)
    rows = min(rows, wanted)
    size = Size(
        rows=rows,
        prompts=min(rows, len(prompts)),
        width=max(map(len, prompts)),
        tokens=max(1, sampling.max_new_tokens - 1),  # the last token drawn is not read
        group=group,
    )
    under_way = _decoding(policy, size)
    under_way.begin(rows, group)
    at_a_time = together(policy, prompts)
    beginning = beginning_of(policy, prompts, under_way.decoder.narrowest)

    def reads(first: int) -> Read:
        return read(policy, prompts[first : first + at_a_time], first, beginning)

    return _complete(under_way, WaitingRows(policy, prompts, group, sampling, noise, reads))


def by_modules(
    policy: Policy,
    prompts: Prompts,
    group: int,
    sampling: Sampling,
    noise: Tensor | None,
) -> CompletionGroups:
    """Generate by transformers' modules, all completions of these prompts side by side; see `stream.generate`.

    Nothing is kept for the next call. noise, and what it raises: as for `decode`.
    """
    waiting = WaitingRows(
        policy,
        prompts,
        group,
        sampling,
        noise,
        lambda _: read_whole(policy, prompts),
    )
    return _complete(_Modules(policy, waiting.count), waiting)


@torch.no_grad()
def decoder_logprobs(policy: Policy, groups: Sequence[Prefixed]) -> Tensor:
    """Log-probs at temperature 1, fp32 `[Σ lengths]`, that the native decoder gives completions; every prompt has
    equally many.

    For `ready`, which compares them with those of the model's own modules before it lets the decoder generate; with
    CUDA graphs where the policy has them. All logits are kept, so it is for few tokens.

    Raises:
        NotUnderstoodError: the decoder does not know the model.
    """
    completions = [completion for group in groups for completion in group.completions]
    count = len(completions)
    longest = max(map(len, completions))
    each = len(groups[0].completions)
    ids = torch.zeros(count, longest, dtype=torch.long)
    for row, completion in enumerate(completions):
        ids[row, : len(completion)] = torch.from_numpy(completion.astype(np.int64))
    ids = ids.to(policy.device)
    prompts = [group.prompt for group in groups]
    size = Size(
        count,
        len(prompts),
        max(map(len, prompts)),
        longest,
        each,
    )
    if policy.graphs:
        size = _rounded(size)
    under_way = _Decoding(policy, size)
    under_way.begin(count, each)
    beginning = beginning_of(policy, prompts, under_way.decoder.narrowest, least=1)
    probed = read(policy, prompts, 0, beginning)
    every = np.arange(count)
    under_way.enter(every, every, probed, each)
    under_way.settle()

    def logits(token: Tensor) -> Tensors:
        return (under_way.step(token)[:, : policy.vocabulary].clone(),)

    first = probed.logits.repeat_interleave(each, 0)
    columns = [first[:, : policy.vocabulary]]  # for each place in the completions logits `[completions, V]`
    for place in range(longest - 1):
        columns += under_way.run("logits", logits, ids[:, place])
    logprobs = torch.stack(columns, 1).float().log_softmax(-1)
    chosen = logprobs.gather(2, ids[:, :, None])[:, :, 0]
    return torch.cat([chosen[row, : len(completion)] for row, completion in enumerate(completions)])


def _complete(under_way: _Decoding | _Modules, waiting: WaitingRows) -> CompletionGroups:
    """Draw tokens until all rows have ended; return the completions in the order of the prompts.

    Each row's first token comes with its prompt, from `waiting`.

    Raises:
        Interrupted: it was asked for. FtisError: as `sampling.to_completions`.
    """
    vocabulary = waiting.policy.vocabulary
    sampling = waiting.sampling
    places = _Places(under_way, waiting)

    def following(token: Tensor, *uniform: Tensor) -> Tensors:
        """The token of each place after this one, and its log-prob, both `[places]`. uniform: none for greedy ones."""
        mine = None
        if uniform:
            mine = uniform[0][:, None]
        drawn, logprob = choose(under_way.step(token), mine, sampling.temperature, vocabulary)
        return drawn.flatten(), logprob.flatten()

    kind = (sampling.temperature, waiting.noise is None)  # all else that `following` does is the model's
    while places.fill():
        check()
        for uniform in places.ahead():
            places.drew(*under_way.run(kind, following, places.token, *uniform))
        places.look()
    ids, logprobs = _table(places.drawn, waiting.count, sampling.max_new_tokens)
    return to_completions(waiting.policy, ids, logprobs, sampling.eos, waiting.group)


class _Draw(NamedTuple):
    """New tokens of some rows; a row's number is −1 in a place without one.

    steps  how many tokens each had before
    """

    numbers: Int64Array
    steps: Int64Array
    token: Tensor
    logprob: Tensor


class _Places:
    """Which row is in which place, and what was drawn.

    A row is one completion; rows are numbered prompt by prompt. A place is a line of the cache. The caller repeats:
    `fill`; as many draws as `ahead` gives numbers for, each noted by `drew`; `look`. So what the host knows of who has
    ended is up to `_LOOK_EVERY` tokens old.

    token  the newest of each place's row, int64 `[places]`
    drawn  all draws so far, in order
    """

    def __init__(self, under_way: _Decoding | _Modules, waiting: WaitingRows) -> None:
        policy = waiting.policy
        sampling = waiting.sampling
        self._under_way = under_way
        self._waiting = waiting
        self._noise = waiting.noise
        self._device = policy.device
        self._cap = sampling.max_new_tokens
        self._most = _LOOK_EVERY[policy.device.type]
        # by id: whether it ends a row
        self._ends = np.zeros(1 + max(policy.vocabulary, *sampling.eos, 0), np.bool_)
        self._ends[list(sampling.eos)] = True
        count = under_way.rows
        self._number: Int64Array = np.full(count, -1)  # of each place's row; -1: none
        self._steps: Int64Array = np.zeros(count, np.int64)  # tokens that each place's row has
        self._over = np.ones(count, np.bool_)  # places whose row has ended, or that have none
        self.token = torch.zeros(count, dtype=torch.long, device=policy.device)
        self._at = self.token  # where in the flat noise the number of each place's next token is
        self._ahead = torch.arange(self._most, device=policy.device)[:, None]
        self._unseen: list[Tensor] = []  # tokens since the last look
        self.drawn: list[_Draw] = []

    def fill(self) -> bool:
        """Let rows that wait take the places of those that have ended, where it pays; say whether any is under way."""
        while True:  # again, for with a cap of one token new rows have ended at once
            ended = int(self._over.sum())
            none_left = ended == len(self._over)
            if none_left and not self._waiting.left:
                return False
            if not none_left and not self._pays(ended):
                return True
            self._change(ended)

    def _change(self, ended: int) -> None:
        """Let rows that wait take the places of so many that have ended; close the gaps that remain."""
        self._under_way.leave(np.flatnonzero(self._over))
        for some in self._waiting.take(ended):
            places = np.flatnonzero(self._over)[: len(some[0])]
            self._enter(places, *some)
        alive = int((~self._over).sum())
        size = self._size(alive)
        if alive and not self._waiting.left and size < len(self._over):
            self._keep(self._under_way.shrink(size))
        self._under_way.settle()
        if self._noise is not None:
            at = self._number * self._noise.shape[1] + self._steps
            self._at = torch.from_numpy(at).to(self._device)

    def _pays(self, ended: int) -> bool:
        """Whether a change is worth its cost when so many places are free and others are not."""
        places = len(self._over)
        if not self._under_way.static:
            return ended >= max(1, self._under_way.gaps * places)
        if ended == 0:
            return False
        return self._waiting.left > 0 or self._size(places - ended) < places

    def _size(self, alive: int) -> int:
        """How many places so many rows need: static shapes have few numbers of rows."""
        if self._under_way.static:
            return bucket(alive)
        return alive

    def _enter(
        self,
        places: Int64Array,
        numbers: Int64Array,
        read: Read,
        token: Tensor,
        logprob: Tensor,
    ) -> None:
        """Let rows of these numbers take places, each with its first token; see `WaitingRows.take`."""
        self._under_way.enter(places, numbers, read, self._waiting.group)
        self.drawn.append(_Draw(numbers, np.zeros_like(numbers), token, logprob))
        self._number = self._number.copy()  # `drawn` holds the arrays that were before
        self._steps = self._steps.copy()
        self._number[places] = numbers
        self._steps[places] = 1
        self._over[places] = self._cap == 1
        index = torch.from_numpy(places).to(self._device)
        self.token = self.token.index_copy(0, index, token)
        self._unseen = [self.token]  # a first token may be an end; earlier ones were looked at

    def _keep(self, order: Int64Array) -> None:
        """Keep the places that `_under_way.shrink` has kept; `order` has the old one of each."""
        self._number = self._number[order]
        self._steps = self._steps[order]
        self._over = self._over[order]
        index = torch.from_numpy(order).to(self._device)
        self.token = self.token[index]
        self._unseen = [token[index] for token in self._unseen]

    def ahead(self) -> Iterator[Tensors]:
        """For each draw until the next look its uniform numbers, fp64 `[places]`; none for greedy ones.

        Take all of them before `look`.
        """
        to_cap = self._cap - int(self._steps[~self._over].min())  # of the row with fewest tokens
        count = min(self._most, to_cap)
        if self._noise is None:
            yield from [()] * count
            return
        # Places without a row, and rows past their cap, draw with any number: what they draw is left out.
        at = (self._at + self._ahead[:count]).clamp_(0, self._noise.numel() - 1)  # in the noise, `[draws, places]`
        self._at = self._at + count
        for uniform in self._noise.view(-1)[at]:
            yield (uniform,)

    def drew(self, token: Tensor, logprob: Tensor) -> None:
        """Note each place's next token and its log-prob, both `[places]`. They stay on the device."""
        self.token = token
        self.drawn.append(_Draw(self._number, self._steps, token, logprob))
        self._steps = self._steps + 1
        self._unseen.append(token)

    def look(self) -> None:
        """See which rows have ended, and note the progress. The host waits for the device."""
        recent = torch.stack(self._unseen).cpu().numpy()
        self._unseen = []
        before = self._over
        self._over = before | self._ends[recent].any(0) | (self._steps >= self._cap)
        under_way = ~self._over
        begun = float(self._steps[under_way].sum()) / self._cap
        ended = int((self._over & ~before).sum())
        advance(ended, tokens=len(recent) * int((~before).sum()), begun=begun)


def _table(drawn: Sequence[_Draw], rows: int, tokens: int) -> tuple[Any, Any]:
    """Ids and log-probs `[rows, tokens]` from those of each draw; what was never drawn is 0."""
    number = np.concatenate([one.numbers for one in drawn])
    step = np.concatenate([one.steps for one in drawn])
    real = (number >= 0) & (step < tokens)  # others are of places without a row, or whose row has ended
    ids = np.zeros((rows, tokens), dtype=np.int64)
    logprobs = np.zeros((rows, tokens), dtype=np.float32)
    where = (number[real], step[real])
    ids[where] = torch.cat([one.token for one in drawn]).cpu().numpy()[real]
    logprobs[where] = torch.cat([one.logprob for one in drawn]).cpu().numpy()[real]
    return ids, logprobs


def _decoding(policy: Policy, size: Size) -> _Decoding:
    """Places of this size or more. With static shapes they are kept for the next call, and the graphs that read them,
    until the model's weights lie elsewhere, a call needs larger ones, or `let_go` frees them."""
    if not policy.graphs:
        return _Decoding(policy, size)
    size = _rounded(size)
    mine: _Decoding | None = kept.get(policy.causal_lm)
    if mine is not None and mine.decoder.uses(policy.causal_lm):
        if mine.cache.size.holds(size):
            return mine
        size = size.joined(mine.cache.size)
    mine = None
    kept.pop(policy.causal_lm, None)  # freed before others are made
    made = _Decoding(policy, size)
    kept[policy.causal_lm] = made
    return made


def _rounded(size: Size) -> Size:
    """A size no smaller, the same for calls of about this size, so that they share places and graphs."""
    width = -(-size.width // PROMPT_WIDTHS) * PROMPT_WIDTHS
    tokens = -(-size.tokens // ALIGNED) * ALIGNED
    return size._replace(width=width, tokens=tokens, prompts=min(size.rows, bucket(size.prompts)))


class _Decoding:
    """Rows under way by `decoder`, in places that others take over.

    static: whether the device does the same for a token as for the one before, until `settle` or `grow` say otherwise.
    gaps: without that, which part of the places must be free for a change to pay.

    `begin`, `leave`, `shrink` and `settle` are the cache's, `step` is the decoder's. Order of calls: see `SharedCache`.
    """

    gaps = 1 / 16

    def __init__(self, policy: Policy, size: Size) -> None:
        self.static = policy.graphs
        self.decoder = Decoder(
            policy.causal_lm,
            policy.vocabulary,
            size,
            static=self.static,
        )
        self.cache = self.decoder.cache
        self.step = self.decoder.step
        self.begin = self.cache.clear
        self.leave = self.cache.leave
        self.shrink = self.cache.shrink
        self.settle = self.cache.settle
        self._graphs: Graphs | None = None
        if self.static:
            self._graphs = Graphs(policy.device)

    @property
    def rows(self) -> int:
        """How many places there are now, with those whose row has ended."""
        return self.cache.rows

    def enter(
        self,
        places: Int64Array,
        numbers: Int64Array,
        read: Read,
        group: int,
    ) -> None:
        """These rows take these places, behind their prompts, which `read` has among others."""
        prompts = numbers // group
        self.cache.enter(
            places,
            prompts,
            read.layers(),
            prompts - read.first,
            read.mask,
        )

    def run(self, kind: Hashable, function: Step, *inputs: Tensor) -> Tensors:
        """The function of these, which steps all rows once; by CUDA graphs where shapes are static.

        Args:
            kind: the same for the same function; another function, or other constants in it, have another.
            function: calls `step` exactly once.
        """
        shape = self.cache.grow()
        if self._graphs:
            return self._graphs((kind, shape), function, *inputs)
        return function(*inputs)


class _Modules:
    """By the forward pass of the whole model, its cache repeated for each completion; no place is taken over.

    It has the methods of `_Decoding`, and is used for one call of `by_modules`.
    """

    static = False
    gaps = 0.25  # dropping rows copies the cache

    def __init__(self, policy: Policy, rows: int) -> None:
        self.rows = rows
        self._alive = np.zeros(rows, np.bool_)
        self._model = policy.causal_lm
        self._vocabulary = policy.vocabulary
        self._device = policy.device
        self._cache: Any = None
        self._mask = self._positions = torch.zeros(0, dtype=torch.long)

    def leave(self, over: Int64Array) -> None:
        """These rows have ended."""
        self._alive[over] = False

    def settle(self) -> None:
        """Nothing: here each change is made at once."""

    def enter(
        self,
        places: Int64Array,
        numbers: Int64Array,
        read: Read,
        group: int,
    ) -> None:
        """All rows take all places, behind their prompts; the cache of `read` is taken over. Called once."""
        self._cache = read.cache
        mask = torch.from_numpy(read.mask).to(self._device).long()
        if group > 1:
            self._cache.reorder_cache(torch.arange(len(mask), device=self._device).repeat_interleave(group))
        self._mask = mask.repeat_interleave(group, 0)
        self._positions = self._mask.sum(1)  # of each row's next token
        self._alive = np.ones(len(self._mask), np.bool_)

    def shrink(self, rows: int) -> Int64Array:
        """Keep the rows that have not ended; return the old place of each. rows: how many these are."""
        order = closing_up(self._alive)
        index = torch.from_numpy(order).to(self._device)
        self._cache.reorder_cache(index)
        self._mask = self._mask[index]
        self._positions = self._positions[index]
        self._alive = self._alive[order]
        return order

    def run(self, kind: Hashable, function: Step, *inputs: Tensor) -> Tensors:
        """The function of these, which steps all rows once; kind plays no part."""
        return function(*inputs)

    def step(self, tokens: Tensor) -> Tensor:
        """Give each row its next token, `[rows]`; return logits of the one after it, `[rows, V]`."""
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
