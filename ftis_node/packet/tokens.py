"""Packet version 1: completions as token ids with log-probs, 8 bytes a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ftis_node.packet.layout import (
    MAX_PACKET_BYTES,
    Header,
    PacketError,
    bin_prefix,
    header_for,
    header_of,
    spelled,
)

PACKET_VERSION = 1
RECORD_BYTES = 8
MAX_TOKENS = MAX_PACKET_BYTES // RECORD_BYTES

RECORD = np.dtype([("id", "<u4"), ("logprob", "<f4")])
_U32 = 1 << 32


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """One sampled answer in this node's tokens.

    token_ids: uint32 [T], a sampled EOS included. finished: the last id is an EOS. logprobs: float32 [C], nats, of each
    chunk under the policy that sampled it. chunks: int64 [T], the chunk of each token, ascending from 0 to C − 1; None:
    each sampled token is a chunk. counts: int64 [C], the author's tokens in each chunk; None: one. given: bool [T],
    which tokens an environment put between sampled ones; None: none.
    """

    token_ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    finished: bool
    chunks: npt.NDArray[np.int64] | None = None
    counts: npt.NDArray[np.int64] | None = None
    given: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> int:
        """Tokens that are not given."""
        return len(self) - (0 if self.given is None else int(np.count_nonzero(self.given)))


@dataclass(frozen=True, eq=False, slots=True)
class Packet(Header):
    """The completions of one prompt by one author, as token ids.

    token_ids: uint32 [Σ lengths]. logprobs: float32 [Σ lengths], nats. After `decode` both are read-only, strided views
    into the received bytes.
    """

    version: ClassVar[int] = PACKET_VERSION
    token_ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]

    def completions(self) -> Iterator[Completion]:
        """The G completions in order, as views."""
        start = 0
        for length, finished in zip(self.lengths, self.finished, strict=True):
            end = start + length
            yield Completion(self.token_ids[start:end], self.logprobs[start:end], finished)
            start = end


def pack_group(
    *,
    run_id: bytes,
    author: bytes,
    round: int,
    slot: int,
    policy_step: int,
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
) -> Packet:
    """Build a packet from completions. `author` is the 38-byte peer id. Arrays may be of any integer and float type.

    Raises PacketError if an id is not a u32, or ids and log-probs differ in number, or there are no completions.
    """
    for completion in completions:
        if np.shape(completion.token_ids) != np.shape(completion.logprobs) or np.ndim(completion.token_ids) != 1:
            raise PacketError("every token of a completion needs one id and one log-prob")
    finished, lengths = [one.finished for one in completions], [len(one) for one in completions]
    return Packet(  # type: ignore[call-arg]
        *header_for(run_id, author, round, slot, policy_step, prompt_ids, finished, lengths).fields(),
        ids_of([np.asarray(completion.token_ids) for completion in completions]),
        np.concatenate([np.asarray(completion.logprobs, np.float32) for completion in completions]),
    )


def ids_of(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint32]:
    """The token ids in all parts. Raises PacketError if one is not a u32."""
    ids = np.concatenate(parts)
    if ids.size and (ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= _U32):
        raise PacketError("token ids must be integers from 0 to 2^32 − 1")
    return ids.astype(np.uint32)


def records_of(token_ids: npt.NDArray[Any], logprobs: npt.NDArray[Any], lengths: Sequence[int]) -> bytes:
    """8 bytes a token. Raises PacketError unless the arrays are of these lengths, and of the types of a packet."""
    tokens = sum(lengths)
    check_lengths(lengths)
    for name, array, kind in (("token_ids", token_ids, "u"), ("logprobs", logprobs, "f")):
        if array.dtype.kind != kind or array.dtype.itemsize != 4 or array.shape != (tokens,):
            raise PacketError(f"{name} must be {kind}4 [{tokens}], not {array.dtype} {list(array.shape)}")
    records = np.empty(tokens, RECORD)
    records["id"] = token_ids
    records["logprob"] = logprobs
    return records.tobytes()


def encode_tokens(packet: Packet) -> bytes:
    """The one spelling of a packet. Raises PacketError if its parts do not fit together or the layout."""
    return packet.encoded(PACKET_VERSION, [records_of(packet.token_ids, packet.logprobs, packet.lengths)])


def decode_tokens(data: bytes, fields: Sequence[Any]) -> Packet:
    """The packet in these bytes, whose header has these fields. Raises PacketError."""
    # Writing the header again and comparing settles canonical form and the records' size at once.
    header, lengths = spelled(fields, 1), fields[-1]
    check_lengths(lengths)
    tokens = sum(lengths)
    header += bin_prefix(tokens * RECORD_BYTES)
    if len(data) != len(header) + tokens * RECORD_BYTES:
        raise PacketError(f"{len(data)} bytes do not fit {tokens} tokens after a header of {len(header)} bytes")
    if not data.startswith(header):
        raise PacketError("the header is not in canonical form")
    records = np.frombuffer(data, RECORD, count=tokens, offset=len(header))
    return Packet(*header_of(fields).fields(), records["id"], records["logprob"])  # type: ignore[call-arg]


def check_lengths(lengths: Sequence[int]) -> None:
    """Raises PacketError unless each completion has tokens, and not too many."""
    if not all(1 <= length <= MAX_TOKENS for length in lengths):
        raise PacketError(f"a length must be an integer from 1 to {MAX_TOKENS}")
