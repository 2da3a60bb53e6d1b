"""Packet version 2: completions as text, cut into their author's tokens, with a log-prob for each.

Models of any tokenizer can read it. A *piece* is the text of one token of the author. A piece of length 0 is a token
without text other than the end (a special token); it stands only at the end of an unfinished completion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ftis_node.packet.arrays import Float32Array, Uint8Array, total
from ftis_node.packet.layout import MAX_PACKET_BYTES, Header, PacketError, header_for, header_of, raw_part, spelled

TEXT_PACKET_VERSION = 2
PIECE_BYTES_MAX = 255
PIECES_MAX = MAX_PACKET_BYTES // 5  # each has a length in one byte and a log-prob in four


@dataclass(frozen=True, eq=False, slots=True)
class TextCompletion:
    """One sampled answer as text.

    text: the bytes of all pieces; a cut may end inside a character. pieces: uint8 [n], how many bytes each has.
    logprobs: float32 [n], nats. end: log-prob of the sampled end, nats; None: unfinished.
    """

    text: bytes
    pieces: Uint8Array
    logprobs: Float32Array
    end: float | None

    @property
    def finished(self) -> bool:
        """Whether the model sampled an end."""
        return self.end is not None

    def __len__(self) -> int:
        """The author's tokens: the pieces, and the end if one was sampled."""
        return len(self.pieces) + self.finished


@dataclass(frozen=True, eq=False, slots=True)
class TextPacket(Header):
    """The completions of one prompt by one author, as text; `lengths` counts pieces, and no end.

    pieces: uint8 [Σ lengths], how many bytes each has. text: bytes of all pieces. logprobs: float32 [Σ lengths + how
    many finished], nats, completion by completion, an end's after its last piece's. After `decode` the arrays are views
    of its bytes.
    """

    version: ClassVar[int] = TEXT_PACKET_VERSION
    pieces: Uint8Array
    text: bytes
    logprobs: Float32Array

    def completions(self) -> Iterator[TextCompletion]:
        """The G completions in order; their arrays are views."""
        piece = byte = claim = 0  # where the next one begins: in `pieces`, in `text` and in `logprobs`
        for length, finished in zip(self.lengths, self.finished, strict=True):
            pieces = self.pieces[piece : piece + length]
            size = total(pieces)
            end = float(self.logprobs[claim + length]) if finished else None
            yield TextCompletion(self.text[byte : byte + size], pieces, self.logprobs[claim : claim + length], end)
            piece += length
            byte += size
            claim += length + finished

    def raw(self) -> list[bytes]:
        """The three parts that follow the header. Raises PacketError if they do not fit together or the layout."""
        count = sum(self.lengths)
        self.check("pieces", self.pieces, np.uint8, count)
        self.check("logprobs", self.logprobs, np.float32, count + sum(self.finished))
        _check_lengths(self.lengths, self.finished)
        if type(self.text) is not bytes or len(self.text) != total(self.pieces):
            raise PacketError(f"{len(self.text)} bytes of text are not those of the pieces")
        return [self.pieces.tobytes(), self.text, self.logprobs.astype("<f4").tobytes()]


def pack_text_group(
    *,
    run_id: bytes,
    author: bytes,
    round: int,
    slot: int,
    policy_step: int,
    prompt: str,
    completions: Sequence[TextCompletion],
) -> TextPacket:
    """Build a packet from completions, whose arrays are copied. `author` is the 38-byte peer id.

    Raises PacketError if there are no completions, or one's pieces, text and log-probs do not fit together.
    """
    for completion in completions:
        if np.shape(completion.pieces) != np.shape(completion.logprobs) or np.ndim(completion.pieces) != 1:
            raise PacketError("every piece of a completion needs one size and one log-prob")
        if total(completion.pieces) != len(completion.text):
            raise PacketError("the pieces of a completion are not its text")
    header = header_for(
        run_id,
        author,
        round,
        slot,
        policy_step,
        prompt,
        finished=[completion.finished for completion in completions],
        lengths=[len(completion.pieces) for completion in completions],
    )
    claims: list[Any] = []
    for completion in completions:
        claims.append(completion.logprobs)
        if completion.end is not None:
            claims.append([completion.end])
    return TextPacket(  # type: ignore[call-arg]
        *header.fields(),
        np.concatenate([completion.pieces for completion in completions]).astype(np.uint8),
        b"".join(completion.text for completion in completions),
        np.concatenate(claims).astype(np.float32),
    )


def decode_text(data: bytes, fields: Sequence[Any]) -> TextPacket:
    """The packet in these bytes, whose header has these fields; `decode` has read them. Raises PacketError."""
    start = spelled(fields, 3)
    header = header_of(fields)
    _check_lengths(header.lengths, header.finished)
    count = sum(header.lengths)
    claims = count + sum(header.finished)
    pieces, at = raw_part(data, 0, start, count)
    sizes = np.frombuffer(pieces, np.uint8)
    text, at = raw_part(data, at, b"", total(sizes))
    logprobs, at = raw_part(data, at, b"", 4 * claims)
    if at != len(data):
        raise PacketError(f"{len(data) - at} bytes follow the packet")
    claimed = np.frombuffer(logprobs, np.dtype("<f4"))
    return TextPacket(*header.fields(), sizes, bytes(text), claimed)  # type: ignore[call-arg]


def _check_lengths(lengths: Sequence[int], finished: Sequence[bool]) -> None:
    """Raise PacketError if there are too many pieces, or a completion has neither a piece nor an end."""
    if sum(lengths) > PIECES_MAX:
        raise PacketError(f"a packet has at most {PIECES_MAX} pieces")
    if not all(length or end for length, end in zip(lengths, finished, strict=True)):
        raise PacketError("a completion without a piece must be finished")
