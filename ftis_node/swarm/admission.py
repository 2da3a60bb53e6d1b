"""Whether a packet may enter this node: one pure function from bytes to a `Group` or a typed `Rejection`.

Cheap checks come first, so that an invalid packet costs little. Every check uses only the run and the announcement. No
check trusts a claim or uses a foreign id as an index.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from ftis_node.config.run import Run
from ftis_node.draw import draw
from ftis_node.packet import (
    SHORT_DIGEST_BYTES,
    AnyPacket,
    Group,
    Packet,
    PacketError,
    TextPacket,
    author_digest,
    decode,
    packet_digest,
)
from ftis_node.packet.arrays import BoolArray, Int64Array, Uint32Array

LOGPROB_MAX = 1e-3
"""Rounding may put the log of a probability of 1 a little above zero."""
LOGPROB_MARGIN = 18.0
"""An honest sampler goes below −(ln V + 18) with probability e⁻¹⁸ a token; a lie below it would buy weight."""


class Reason(StrEnum):
    """Why a packet is not taken. The first two are the holder's fault: it sent none, or other bytes; `admit` never
    returns them, `Pulling` counts them. All others are the fault of the announcement's signer, whatever name is in the
    packet. Metrics and status show the texts."""

    HOLDER = "holder"
    WRONG_BYTES = "wrong bytes"

    TOO_LARGE = "too large"
    MALFORMED = "malformed"
    OTHER_RUN = "other run"
    OTHER_AUTHOR = "other author"
    NOT_AS_ANNOUNCED = "not as announced"
    SLOT_OUT_OF_RANGE = "slot out of range"
    WRONG_GROUP_SIZE = "wrong group size"
    WRONG_PROMPT = "wrong prompt"
    TOO_LONG = "too long"
    CUT_SHORT = "cut short"
    UNKNOWN_TOKEN = "unknown token"
    LOGPROB_OUT_OF_RANGE = "log-prob out of range"
    OTHER_VERSION = "other packet version"
    EMPTY_PIECE = "empty piece"
    EOS_MISSING = "EOS missing"
    EOS_INTERIOR = "EOS interior"
    EOS_UNDECLARED = "EOS undeclared"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A refused packet's reason. `detail` holds only our own words and numbers, safe to print."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class AdmissionContext:
    """The input of every admission. prompt_digests: 8 bytes for each row of the task's data, in order.

    Raises ValueError if there is no row or an incomplete digest.
    """

    run: Run
    prompt_digests: bytes

    def __post_init__(self) -> None:
        if not self.prompt_digests or len(self.prompt_digests) % SHORT_DIGEST_BYTES:
            raise ValueError(f"prompt_digests must be {SHORT_DIGEST_BYTES} bytes for each of at least one row")

    @property
    def rows(self) -> int:
        """How many rows the task's data has, at least one."""
        return len(self.prompt_digests) // SHORT_DIGEST_BYTES

    @cached_property
    def run_id(self) -> bytes:
        """The run's id, 16 bytes."""
        return self.run.id

    @cached_property
    def logprob_min(self) -> float:
        """−(ln V + 18) in a token run, the run's own bound in a text run; in nats."""
        if self.run.text:
            return self.run.logprob_min
        return -(math.log(self.run.vocabulary) + LOGPROB_MARGIN)

    def row_of(self, author: bytes, round: int, slot: int, issued_at: int = 0) -> int:
        """The row that a slot must answer, from 0; all authors share it in a horizontal run, and in common slots.

        issued_at: of its announcement, unix seconds; only common slots need it. Raises ValueError if round or slot is
        no u64.
        """
        common = slot < self.run.common
        if common:
            round = self.run.epoch_at(issued_at)
        if common or self.run.parts != 1:
            author = b""  # so it is the same row for all
        return draw(self.run_id, author, round, slot, self.rows)

    def digest_of_row(self, row: int) -> bytes:
        """The 8 bytes that a packet must give for its prompt. row: as `row_of` gives it."""
        start = row * SHORT_DIGEST_BYTES
        return self.prompt_digests[start : start + SHORT_DIGEST_BYTES]


def admit(
    context: AdmissionContext,
    author: bytes,
    data: bytes,
    *,
    announced: tuple[int, int] | None = None,
    issued_at: int = 0,
    digest: bytes | None = None,
) -> Group | Rejection:
    """Judge a packet. Never raises, whatever the bytes, and changes nothing.

    The caller has compared the bytes with the announced size and sha256, and checked the announcement's signature. The
    arrays of the returned group are views of `data`.

    Args:
        author: the 38-byte peer id that signed the announcement.
        announced: the announced (round, slot); None: any, for a packet that was admitted before.
        issued_at: of the announcement; only a run with common rows needs it.
        digest: the sha256 of `data`, if the caller has computed it: `swarm.fetch` compares it with the announced one.
    """
    run = context.run
    if len(data) > run.packet_bytes_max:
        return Rejection(Reason.TOO_LARGE, f"{len(data)} bytes; this run has at most {run.packet_bytes_max}")
    try:
        packet = decode(data)
    except PacketError as error:
        return Rejection(Reason.MALFORMED, str(error))
    row = context.row_of(author, packet.round, packet.slot, issued_at)
    rejection = (
        _check_origin(context, author, packet, announced)
        or _check_prompt(context, packet, row)
        or _check_logprobs(context, packet)
        or _check_content(run, packet)
    )
    if rejection is not None:
        return rejection
    epoch = 0
    if run.common:
        epoch = run.epoch_at(issued_at)
    return Group(
        author,
        row,
        packet,
        digest or packet_digest(data),
        data,
        epoch,
    )


def _check_origin(
    context: AdmissionContext,
    author: bytes,
    packet: AnyPacket,
    announced: tuple[int, int] | None,
) -> Rejection | None:
    """Why a packet is not the announced one of this author and run. announced: its (round, slot); None: any."""
    if packet.run_id != context.run_id:
        return Rejection(Reason.OTHER_RUN, f"it belongs to run {packet.run_id.hex()}")
    if packet.version != context.run.packet:
        return Rejection(Reason.OTHER_VERSION, f"this run has packets of version {context.run.packet}")
    if packet.author_digest != author_digest(author):
        return Rejection(Reason.OTHER_AUTHOR, "it names another author than the one who announced it")
    if announced is not None and (packet.round, packet.slot) != announced:
        found = f"round {packet.round}, slot {packet.slot}"
        promised = f"round {announced[0]}, slot {announced[1]}"
        return Rejection(Reason.NOT_AS_ANNOUNCED, f"it holds {found} but was announced as {promised}")
    if packet.slot >= context.run.slots:
        return Rejection(Reason.SLOT_OUT_OF_RANGE, f"slot {packet.slot} of {context.run.slots}")
    return None


def _check_prompt(context: AdmissionContext, packet: AnyPacket, row: int) -> Rejection | None:
    """Why a packet does not answer this row with as many completions as a packet of the run has."""
    expected = context.run.completions
    if len(packet.lengths) != expected:
        return Rejection(Reason.WRONG_GROUP_SIZE, f"{len(packet.lengths)} completions instead of {expected}")
    if packet.prompt_digest != context.digest_of_row(row):
        return Rejection(Reason.WRONG_PROMPT, f"it does not answer the drawn row {row}")
    return None


def _check_content(run: Run, packet: AnyPacket) -> Rejection | None:
    """Why the completions are not whole, within the run's limits and of its vocabulary."""
    if isinstance(packet, TextPacket):
        return _check_pieces(run, packet)
    return _check_lengths(run, packet) or _check_turns(run, packet) or _check_tokens(run, packet)


def _check_lengths(run: Run, packet: Packet) -> Rejection | None:
    """Why a completion is longer than the run's cap, or ends before it without being finished. Given tokens count."""
    cap = run.completion_tokens
    for length, finished in zip(packet.totals, packet.finished, strict=True):
        if length > cap:
            return Rejection(Reason.TOO_LONG, f"a completion of {length} tokens; the cap is {cap}")
        if not finished and length != cap:
            return Rejection(Reason.CUT_SHORT, f"an unfinished completion of {length} tokens; the cap is {cap}")
    return None


def _check_pieces(run: Run, packet: TextPacket) -> Rejection | None:
    """Why the pieces of a text packet have no text, or its completions end too late or too early.

    Only the last piece of a completion may be without text, and only if the completion is not finished. A completion
    must end with the piece that reaches the run's cap of bytes, unfinished. An unfinished one must have reached a cap,
    or end in a piece without text.
    """
    cap = run.completion_tokens  # pieces, and the end of a finished completion
    most = run.completion_bytes
    for completion in packet.completions():
        pieces = completion.pieces
        size = len(completion.text)
        last = int(pieces[-1]) if len(pieces) else 0
        aborted = len(pieces) > 0 and last == 0  # the author sampled a token without text, and stopped
        without_text = len(pieces) - np.count_nonzero(pieces)
        if without_text != aborted or (aborted and completion.finished):
            return Rejection(
                Reason.EMPTY_PIECE, "a piece without text, which is not the end of an unfinished completion"
            )
        if len(completion) > cap:
            return Rejection(Reason.TOO_LONG, f"a completion of {len(completion)} tokens; the cap is {cap}")
        before_last = size - last
        if before_last >= most or (completion.finished and size >= most):
            return Rejection(Reason.TOO_LONG, f"a completion of {size} bytes goes on after the cap of {most}")
        if not (completion.finished or aborted or len(pieces) == cap or size >= most):
            return Rejection(Reason.CUT_SHORT, f"an unfinished completion of {len(pieces)} pieces and {size} bytes")
    return None


def _check_logprobs(context: AdmissionContext, packet: AnyPacket) -> Rejection | None:
    """Why a log-prob (nats) is out of the run's bounds, or is no number."""
    # A NaN is its own minimum and maximum, and fails both comparisons. The bounds are doubles, so compare as doubles.
    low = float(packet.logprobs.min())
    high = float(packet.logprobs.max())
    if not (low >= context.logprob_min and high <= LOGPROB_MAX):
        allowed = f"{context.logprob_min:.3f} … {LOGPROB_MAX}"
        return Rejection(Reason.LOGPROB_OUT_OF_RANGE, f"log-probs {low:.6g} … {high:.6g}; allowed are {allowed}")
    return None


def _check_turns(run: Run, packet: Packet) -> Rejection | None:
    """Why a completion has too many turns, or the tokens given between them are not of the vocabulary."""
    if packet.given is None:
        return None
    most = 1 + int(packet.given.turns.max())
    if most > run.turns:
        return Rejection(Reason.TOO_LONG, f"a completion of {most} turns; the run has at most {run.turns}")
    return _check_ids(run, packet.given.ids)


def _check_ids(run: Run, ids: Uint32Array) -> Rejection | None:
    """Why a token id is not of the run's vocabulary."""
    highest = int(ids.max(initial=0))
    if highest >= run.vocabulary:
        return Rejection(Reason.UNKNOWN_TOKEN, f"token id {highest}; the vocabulary has {run.vocabulary}")
    return None


def _check_tokens(run: Run, packet: Packet) -> Rejection | None:
    """Why a sampled token is not of the vocabulary, or an EOS is missing or where none belongs."""
    own_ends = np.cumsum(packet.lengths) - 1
    ends = np.concatenate([packet.interior_ends, own_ends])
    ids = packet.token_ids
    return _check_ids(run, ids) or _check_eos(_is_eos(ids, run.eos), ends, packet.finished)


def _is_eos(ids: Uint32Array, eos: tuple[int, ...]) -> BoolArray:
    """Which of these tokens are an EOS: bool [Σ lengths]. One comparison an EOS id: runs have one or two, and np.isin
    would sort."""
    found: BoolArray = ids == eos[0]
    for other in eos[1:]:
        found |= ids == other
    return found


def _check_eos(is_eos: BoolArray, ends: Int64Array, finished: Sequence[bool]) -> Rejection | None:
    """Why the EOS tokens are not where the packet says that a turn or a completion ended.

    Args:
        is_eos: bool [Σ lengths], of each token.
        ends: int [I + G], where in `token_ids` an EOS belongs: the interior ones first; the completions' own are last.
        finished: bool [G], whether each completion is said to have ended.
    """
    ends_in_eos = is_eos[ends]
    wanted = np.ones(len(ends), np.bool_)
    wanted[len(ends) - len(finished) :] = finished
    if (wanted & ~ends_in_eos).any():
        return Rejection(Reason.EOS_MISSING, "a completion or a turn is called finished and does not end in an EOS")
    if (ends_in_eos & ~wanted).any():
        return Rejection(Reason.EOS_UNDECLARED, "a completion ends in an EOS and is called unfinished")
    if np.count_nonzero(is_eos) != np.count_nonzero(ends_in_eos):
        return Rejection(Reason.EOS_INTERIOR, "a completion goes on after an EOS")
    return None
