"""Packet version 3: completions of several turns, with runs of *given* tokens, which nobody sampled, between them.

An environment's messages are given: each receiver plays the episode again and compares. A given token has no log-prob
and counts in no loss. A completion begins and ends with a run of sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ftis_node.packet.layout import Header, PacketError, header_for, header_of, raw_part, spelled
from ftis_node.packet.tokens import RECORD, Completion, check_lengths, ids_of, records_of

TURN_PACKET_VERSION = 3
TURNS_MAX = 16
"""Most runs of sampled tokens in a completion."""

_RUN_BYTES, _GIVEN_BYTES = 8, 4


@dataclass(frozen=True, eq=False, slots=True)
class TurnPacket(Header):
    """The completions of one prompt by one author; `lengths` counts sampled tokens.

    turns: uint8 [G], the runs of given tokens in each completion. runs: uint32 [Σ turns, 2], how many tokens each of
    these has, after how many sampled ones: (sampled, given). token_ids: uint32 [Σ lengths], sampled. logprobs: float32
    [Σ lengths], nats. given: uint32 [Σ of the second column of runs], ids. After `decode` all are read-only views.
    """

    version: ClassVar[int] = TURN_PACKET_VERSION
    turns: npt.NDArray[np.uint8]
    runs: npt.NDArray[np.uint32]
    token_ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    given: npt.NDArray[np.uint32]

    def by_completion(self) -> Iterator[npt.NDArray[np.int64]]:
        """The rows of `runs` that belong to each completion: int64 [turns, 2]."""
        yield from np.split(self.runs.astype(np.int64), np.cumsum(self.turns[:-1], dtype=np.int64))

    @property
    def totals(self) -> list[int]:
        """Tokens of each completion, sampled and given."""
        given = (int(runs[:, 1].sum()) for runs in self.by_completion())
        return [length + more for length, more in zip(self.lengths, given, strict=True)]

    @property
    def interior_ends(self) -> npt.NDArray[np.int64]:
        """Where in `token_ids` the runs end that given tokens follow: int64 [Σ turns]."""
        starts = np.repeat(np.cumsum(self.lengths, dtype=np.int64) - self.lengths, self.turns)
        within = [np.cumsum(runs[:, 0]) for runs in self.by_completion()]
        return np.asarray(starts + np.concatenate(within) - 1)

    def completions(self) -> Iterator[Completion]:
        """The G completions in order, sampled and given tokens together."""
        sampled = given = 0
        for length, finished, runs in zip(self.lengths, self.finished, self.by_completion(), strict=True):
            more = int(runs[:, 1].sum())
            rest = length - int(runs[:, 0].sum())
            where = np.repeat(np.arange(2 * len(runs) + 1) % 2 == 1, [*runs.reshape(-1), rest])
            ids = np.empty(length + more, np.uint32)
            ids[~where] = self.token_ids[sampled : sampled + length]
            ids[where] = self.given[given : given + more]
            logprobs = self.logprobs[sampled : sampled + length]
            yield Completion(ids, logprobs, finished, given=where if len(runs) else None)
            sampled, given = sampled + length, given + more


def pack_turn_group(
    *,
    run_id: bytes,
    author: bytes,
    round: int,
    slot: int,
    policy_step: int,
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
) -> TurnPacket:
    """Build a packet from completions. `author` is the 38-byte peer id.

    Raises:
        PacketError: as `pack_group`, or a completion begins or ends with a given token.
    """
    ids, given, runs = [], [], []
    for completion in completions:
        where = np.zeros(len(completion), np.bool_) if completion.given is None else completion.given
        if where.shape != np.shape(completion.token_ids) or not len(where) or where[0] or where[-1]:
            raise PacketError("a completion must begin and end with a sampled token")
        ends = np.diff(np.flatnonzero(np.diff(where)) + 1, prepend=0)
        runs.append(ends.reshape(-1, 2))
        ids.append(np.asarray(completion.token_ids)[~where])
        given.append(np.asarray(completion.token_ids)[where])
    if any(len(own) > 255 for own in runs):
        raise PacketError("a completion has at most 255 runs of given tokens")
    claims = [np.asarray(completion.logprobs, np.float32) for completion in completions]
    if [len(part) for part in ids] != [len(part) for part in claims]:
        raise PacketError("every sampled token of a completion needs one id and one log-prob")
    finished, lengths = [completion.finished for completion in completions], [len(part) for part in ids]
    return TurnPacket(  # type: ignore[call-arg]
        *header_for(run_id, author, round, slot, policy_step, prompt_ids, finished, lengths).fields(),
        np.asarray([len(own) for own in runs], np.uint8),
        np.concatenate(runs).astype(np.uint32),
        ids_of(ids),
        np.concatenate(claims),
        ids_of(given),
    )


def encode_turns(packet: TurnPacket) -> bytes:
    """The one spelling of a packet. Raises PacketError if its parts do not fit together or the layout."""
    given, turns = int(packet.runs[:, 1].sum(dtype=np.int64)), int(packet.turns.sum(dtype=np.int64))
    for name, array, dtype, shape in (
        ("turns", packet.turns, np.uint8, (len(packet.lengths),)),
        ("runs", packet.runs, np.uint32, (turns, 2)),
        ("given", packet.given, np.uint32, (given,)),
    ):
        if array.dtype != dtype or array.shape != shape:
            raise PacketError(f"{name} must be {np.dtype(dtype)} {list(shape)}, not {array.dtype} {list(array.shape)}")
    records = records_of(packet.token_ids, packet.logprobs, packet.lengths)
    _check_runs(packet)
    raw = [packet.turns.tobytes(), packet.runs.astype("<u4").tobytes(), records, packet.given.astype("<u4").tobytes()]
    return packet.encoded(TURN_PACKET_VERSION, raw)


def decode_turns(data: bytes, fields: Sequence[Any]) -> TurnPacket:
    """The packet in these bytes, whose header has these fields. Raises PacketError."""
    start = spelled(fields, 4)
    header = header_of(fields)
    check_lengths(header.lengths)
    raw, at = raw_part(data, 0, start, len(header.lengths))
    turns = np.frombuffer(raw, np.uint8)
    raw, at = raw_part(data, at, b"", _RUN_BYTES * int(turns.sum(dtype=np.int64)))
    runs = np.frombuffer(raw, np.dtype("<u4")).reshape(-1, 2)
    raw, at = raw_part(data, at, b"", RECORD.itemsize * sum(header.lengths))
    records = np.frombuffer(raw, RECORD)
    raw, at = raw_part(data, at, b"", _GIVEN_BYTES * int(runs[:, 1].sum(dtype=np.int64)))
    given = np.frombuffer(raw, np.dtype("<u4"))
    if at != len(data):
        raise PacketError(f"{len(data) - at} bytes follow the packet")
    packet = TurnPacket(*header.fields(), turns, runs, records["id"], records["logprob"], given)  # type: ignore[call-arg]
    _check_runs(packet)
    return packet


def _check_runs(packet: TurnPacket) -> None:
    if not packet.runs.all():
        raise PacketError("a run of tokens is empty")
    for length, runs in zip(packet.lengths, packet.by_completion(), strict=True):
        if int(runs[:, 0].sum()) >= length:
            raise PacketError("a completion must end with a sampled token")
