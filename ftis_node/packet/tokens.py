"""Packets of token ids with log-probs, 8 bytes a token: version 1, and version 3, for completions of several turns.

Between turns stand runs of *given* tokens, which nobody sampled. An environment's messages are given: each receiver
plays the episode again and compares. A given token has no log-prob and counts in no loss. A completion begins and ends
with a run of sampled tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ftis_node.packet.arrays import AnyArray, BoolArray, Float32Array, Int64Array, Uint8Array, Uint32Array, total
from ftis_node.packet.layout import MAX_PACKET_BYTES, Header, PacketError, header_for, header_of, raw_part, spelled

PACKET_VERSION = 1
TURN_PACKET_VERSION = 3
RECORD_BYTES = 8
MAX_TOKENS = MAX_PACKET_BYTES // RECORD_BYTES
TURNS_MAX = 16
"""Most runs of sampled tokens in a completion."""

_RECORD = np.dtype([("id", "<u4"), ("logprob", "<f4")])
_U32 = 1 << 32


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """One sampled answer in this node's tokens.

    token_ids: uint32 [T], a sampled EOS included. finished: the last id is an EOS. logprobs: float32 [C], nats, of each
    chunk under the policy that sampled it. chunks: int64 [T], the chunk of each token, ascending from 0 to C − 1; None:
    each sampled token is a chunk. counts: int64 [C], the author's tokens in each chunk; None: one. given: bool [T],
    which tokens an environment put between sampled ones; None: none.
    """

    token_ids: Uint32Array
    logprobs: Float32Array
    finished: bool
    chunks: Int64Array | None = None
    counts: Int64Array | None = None
    given: BoolArray | None = None

    def __len__(self) -> int:
        """Its tokens, sampled and given."""
        return len(self.token_ids)

    @property
    def sampled(self) -> int:
        """Tokens that are not given."""
        if self.given is None:
            return len(self)
        return int(np.count_nonzero(~self.given))


@dataclass(frozen=True, eq=False, slots=True)
class GivenTokens:
    """The given tokens of a packet.

    turns: uint8 [G], the runs of given tokens in each completion. runs: uint32 [Σ turns, 2], how many tokens each of
    these has, after how many sampled ones: (sampled, given). ids: uint32 [Σ of the second column of runs].
    """

    turns: Uint8Array
    runs: Uint32Array
    ids: Uint32Array

    def by_completion(self) -> list[Int64Array]:
        """The rows of `runs` that belong to each completion, in order: int64 [turns, 2] each."""
        return np.split(self.runs.astype(np.int64), np.cumsum(self.turns[:-1], dtype=np.int64))


@dataclass(frozen=True, eq=False, slots=True)
class Packet(Header):
    """The completions of one prompt by one author, as token ids; `lengths` counts sampled tokens.

    token_ids: uint32 [Σ lengths], sampled. logprobs: float32 [Σ lengths], nats. given: None in version 1. After
    `decode` all are read-only, strided views into the received bytes.
    """

    token_ids: Uint32Array
    logprobs: Float32Array
    given: GivenTokens | None = None

    @property
    def version(self) -> int:
        """1, or 3 in a run with turns, also where no token of this packet is given."""
        if self.given is None:
            return PACKET_VERSION
        return TURN_PACKET_VERSION

    @property
    def totals(self) -> list[int]:
        """Tokens of each completion, sampled and given."""
        if self.given is None:
            return list(self.lengths)
        more = (total(runs[:, 1]) for runs in self.given.by_completion())
        return [length + given for length, given in zip(self.lengths, more, strict=True)]

    @property
    def interior_ends(self) -> Int64Array:
        """Where in `token_ids` the runs end that given tokens follow: int64 [Σ turns]."""
        if self.given is None:
            return np.empty(0, np.int64)
        starts = np.repeat(np.cumsum(self.lengths, dtype=np.int64) - self.lengths, self.given.turns)
        within = [np.cumsum(runs[:, 0]) for runs in self.given.by_completion()]
        return np.asarray(starts + np.concatenate(within) - 1)

    def completions(self) -> Iterator[Completion]:
        """The G completions in order, sampled and given tokens together; without given ones as views."""
        cuts = np.cumsum(self.lengths)[:-1]
        sampled = np.split(self.token_ids, cuts)
        claims = np.split(self.logprobs, cuts)
        if self.given is None:
            yield from map(Completion, sampled, claims, self.finished)
            return
        begin = 0
        runs_of = self.given.by_completion()
        for own, logprobs, finished, runs in zip(sampled, claims, self.finished, runs_of, strict=True):
            if not len(runs):
                yield Completion(own, logprobs, finished)
                continue
            where = _between(len(own), runs)
            end = begin + total(runs[:, 1])
            ids = np.empty(len(where), np.uint32)
            ids[~where] = own
            ids[where] = self.given.ids[begin:end]
            begin = end
            yield Completion(ids, logprobs, finished, given=where)

    def raw(self) -> list[bytes]:
        """The parts that follow the header, in their order. Raises PacketError if they do not fit together or the
        layout."""
        _check_lengths(self.lengths)
        tokens = sum(self.lengths)
        self.check("token_ids", self.token_ids, np.uint32, tokens)
        self.check("logprobs", self.logprobs, np.float32, tokens)
        records = np.empty(tokens, _RECORD)
        records["id"] = self.token_ids
        records["logprob"] = self.logprobs
        given = self.given
        if given is None:
            return [records.tobytes()]
        self.check("turns", given.turns, np.uint8, len(self.lengths))
        self.check("runs", given.runs, np.uint32, total(given.turns), 2)
        self.check("given ids", given.ids, np.uint32, total(given.runs[:, 1]))
        _check_runs(self)
        return [
            given.turns.tobytes(),
            given.runs.astype("<u4").tobytes(),
            records.tobytes(),
            given.ids.astype("<u4").tobytes(),
        ]


def _between(sampled: int, runs: Int64Array) -> BoolArray:
    """Which tokens of a completion are given, bool [sampled + given]: of so many sampled ones, with these runs (rows of
    `GivenTokens.runs`) between them."""
    last = sampled - total(runs[:, 0])  # the sampled tokens after the last given ones
    lengths = [*runs.reshape(-1), last]
    given = np.arange(len(lengths)) % 2 == 1  # sampled and given runs take turns
    return np.repeat(given, lengths)


def pack_group(
    *,
    run_id: bytes,
    author: bytes,
    round: int,
    slot: int,
    policy_step: int,
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
    turns: bool = False,
) -> Packet:
    """Build a packet from completions. `author` is the 38-byte peer id. Arrays may be of any integer and float type.

    turns: version 3, also where no token is given.

    Raises:
        PacketError: an id is not a u32, ids and log-probs differ in number, there are no completions, or one begins or
            ends with a given token.
    """
    wheres = [_where_given(completion) for completion in completions]
    ids = [np.asarray(completion.token_ids) for completion in completions]
    sampled = [own[~where] for own, where in zip(ids, wheres, strict=True)]
    claims = [np.asarray(completion.logprobs, np.float32) for completion in completions]
    if any(one.shape != two.shape for one, two in zip(sampled, claims, strict=True)):
        raise PacketError("every sampled token of a completion needs one id and one log-prob")
    if not turns and any(where.any() for where in wheres):
        raise PacketError("only a packet of turns has given tokens")
    header = header_for(
        run_id,
        author,
        round,
        slot,
        policy_step,
        prompt_ids,
        finished=[completion.finished for completion in completions],
        lengths=[len(part) for part in sampled],
    )
    given = None
    if turns:
        given = _given([own[where] for own, where in zip(ids, wheres, strict=True)], wheres)
    return Packet(*header.fields(), _ids_of(sampled), np.concatenate(claims), given)  # type: ignore[call-arg]


def _where_given(completion: Completion) -> BoolArray:
    """Which tokens of a completion are given, bool [T]. Raises PacketError unless first and last are sampled."""
    where = completion.given
    if where is None:
        where = np.zeros(len(completion), np.bool_)
    if np.shape(completion.token_ids) != where.shape or not len(where) or where[0] or where[-1]:
        raise PacketError("a completion must begin and end with a sampled token")
    return where


def _given(ids: Sequence[AnyArray], wheres: Sequence[BoolArray]) -> GivenTokens:
    """The given tokens of all completions: of each its given ids, and which of its tokens these are (`_where_given`).

    Raises PacketError if one has more than 255 runs.
    """
    runs = []
    for where in wheres:
        changes = np.flatnonzero(np.diff(where)) + 1  # from sampled to given and back
        own = np.diff(changes, prepend=0).reshape(-1, 2)  # lengths of runs: sampled, given, sampled, given, …
        if len(own) > 255:
            raise PacketError("a completion has at most 255 runs of given tokens")
        runs.append(own)
    turns = np.asarray([len(own) for own in runs], np.uint8)
    return GivenTokens(turns, np.concatenate(runs).astype(np.uint32), _ids_of(ids))


def _ids_of(parts: Sequence[AnyArray]) -> Uint32Array:
    """All ids, one part after another. Raises PacketError if one is no integer of 32 bits without a sign."""
    ids = np.concatenate(parts)
    if ids.size and (ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= _U32):
        raise PacketError("token ids must be integers from 0 to 2^32 − 1")
    return ids.astype(np.uint32)


def decode_tokens(data: bytes, fields: Sequence[Any]) -> Packet:
    """The packet in these bytes, whose header has these fields; `decode` has read them. Raises PacketError."""
    turned = fields[0] == TURN_PACKET_VERSION
    before = spelled(fields, 4 if turned else 1)
    at = 0
    header = header_of(fields)
    _check_lengths(header.lengths)

    def part(size: int, dtype: DTypeLike) -> AnyArray:
        """The next raw part, of `size` bytes; the calls follow the order of the layout."""
        nonlocal before, at
        raw, at = raw_part(data, at, before, size)
        before = b""
        return np.frombuffer(raw, dtype)

    given = None
    if turned:
        turns = part(len(header.lengths), np.uint8)
        runs = part(8 * total(turns), "<u4").reshape(-1, 2)
    records = part(RECORD_BYTES * sum(header.lengths), _RECORD)
    if turned:
        given = GivenTokens(turns, runs, part(4 * total(runs[:, 1]), "<u4"))
    if at != len(data):
        raise PacketError(f"{len(data) - at} bytes follow the packet")
    packet = Packet(*header.fields(), records["id"], records["logprob"], given)  # type: ignore[call-arg]
    _check_runs(packet)
    return packet


def _check_lengths(lengths: Sequence[int]) -> None:
    """Raise PacketError if a completion has no token, or more than a packet has room for."""
    if not all(1 <= length <= MAX_TOKENS for length in lengths):
        raise PacketError(f"a length must be an integer from 1 to {MAX_TOKENS}")


def _check_runs(packet: Packet) -> None:
    """Raise PacketError if a run is empty, or a completion ends with a given token."""
    if packet.given is None:
        return
    if not packet.given.runs.all():
        raise PacketError("a run of tokens is empty")
    for length, runs in zip(packet.lengths, packet.given.by_completion(), strict=True):
        if total(runs[:, 0]) >= length:
            raise PacketError("a completion must end with a sampled token")
