"""The header, limits and digests that all versions of a packet share."""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack
import numpy as np

from ftis_node.errors import FtisError
from ftis_node.packet.arrays import AnyArray

MAX_PACKET_BYTES = 4 << 20
"""A packet above this many bytes is refused unread (a unary hivemind answer above 4 MiB would never arrive)."""
MAX_GROUP = 256
"""Completions of one prompt."""
RUN_ID_BYTES = 16
SHORT_DIGEST_BYTES = 8

_U64 = 1 << 64
_FIELDS = 9  # of a header; raw bytes follow
# The longest header that can pass has MAX_GROUP lengths of five bytes and is 1,392 bytes long.
_HEADER_BYTES_MAX = 2048
_LIMITS = {"max_bin_len": 32, "max_array_len": MAX_GROUP, "max_str_len": 0, "max_map_len": 0, "max_ext_len": 0}

# Everything that msgpack is known to raise on hostile bytes; the fuzz tests would show another.
MSGPACK_ERRORS = (msgpack.UnpackException, ValueError, TypeError, OverflowError, RecursionError)


class PacketError(FtisError):
    """These bytes are not a packet, or this packet cannot be bytes."""


@dataclass(frozen=True, eq=False, slots=True)
class Header:
    """The fields that all versions have.

    run_id: 16 bytes. author_digest, prompt_digest: 8 bytes. round, slot, policy_step: u64; the last one is the author's
    count of steps when it sampled. finished: bool [G], whether a completion ends with a sampled end. lengths: sampled
    tokens, or pieces, of each completion [G].

    The order of the fields is that of the bytes.
    """

    run_id: bytes
    author_digest: bytes
    round: int
    slot: int
    policy_step: int
    prompt_digest: bytes
    finished: tuple[bool, ...]
    lengths: tuple[int, ...]

    def fields(self) -> tuple[Any, ...]:
        """The values of the fields above, in order; those that a kind of packet adds are left out."""
        return tuple(getattr(self, field.name) for field in fields(Header))

    @staticmethod
    def check(name: str, array: AnyArray, dtype: type, *shape: int) -> None:
        """Raise PacketError unless the array has this type and shape; the error calls it by `name`."""
        if array.dtype != dtype or array.shape != shape:
            raise PacketError(f"{name} must be {np.dtype(dtype)} {list(shape)}, not {array.dtype} {list(array.shape)}")

    def encoded(self, version: int, raw: Sequence[bytes]) -> bytes:
        """The one spelling of a packet with this header and these raw parts, each of which gets its prefix here. Raises
        PacketError."""
        if len(self.finished) != len(self.lengths):
            raise PacketError(f"{len(self.finished)} finished flags for {len(self.lengths)} lengths")
        bits = sum(1 << i for i, flag in enumerate(self.finished) if flag)
        mask = bits.to_bytes((len(self.finished) + 7) // 8, "little")
        data = spelled([version, *self.fields()[:-2], mask, list(self.lengths)], len(raw))  # a mask for `finished`
        data += b"".join(bin_prefix(len(part)) + part for part in raw)
        if len(data) > MAX_PACKET_BYTES:
            raise PacketError(f"a packet of {len(data)} bytes is above the {MAX_PACKET_BYTES} allowed")
        return data


def author_digest(author: bytes) -> bytes:
    """How a packet refers to its author: the first 8 bytes of the sha256 of the 38-byte peer id."""
    return hashlib.sha256(author).digest()[:SHORT_DIGEST_BYTES]


def packet_digest(data: bytes) -> bytes:
    """The name of a packet: sha256 of its bytes, 32 bytes."""
    return hashlib.sha256(data).digest()


def prompt_digest(prompt: Sequence[int] | str) -> bytes:
    """The first 8 bytes of the sha256 of the prompt: of its ids as u32le, or in a text run of its UTF-8.

    Raises PacketError if an id is not a u32, or the text has no UTF-8.
    """
    try:
        packed = prompt.encode() if isinstance(prompt, str) else struct.pack(f"<{len(prompt)}I", *prompt)
    except UnicodeEncodeError as error:
        raise PacketError(f"a prompt holds something that is no character: {error}") from error
    except struct.error as error:
        raise PacketError(f"a prompt holds something that is not a token id: {error}") from error
    return hashlib.sha256(packed).digest()[:SHORT_DIGEST_BYTES]


def prompt_digests(prompts: Iterable[Sequence[int] | str]) -> bytes:
    """The digests of every row's prompt one after another, as admission wants them: 8 bytes a row, in the order of the
    task's data."""
    return b"".join(prompt_digest(prompt) for prompt in prompts)


def header_for(
    run_id: bytes,
    author: bytes,
    round: int,
    slot: int,
    policy_step: int,
    prompt: Sequence[int] | str,
    finished: Sequence[bool],
    lengths: Sequence[int],
) -> Header:
    """The header of a group of this author. Raises PacketError if there are no completions; `encoded` checks more."""
    if not lengths:
        raise PacketError("a group needs at least one completion")
    return Header(
        run_id,
        author_digest(author),
        round,
        slot,
        policy_step,
        prompt_digest(prompt),
        tuple(map(bool, finished)),
        tuple(lengths),
    )


def unpack_fields(data: bytes) -> tuple[int, list[Any]]:
    """How many parts of raw bytes follow the header, and the header's nine fields, of whatever types the sender chose.
    It reads no more than 2 KiB; `spelled` checks the fields.

    Raises PacketError.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=_HEADER_BYTES_MAX, strict_map_key=True, **_LIMITS)
    try:
        unpacker.feed(data[:_HEADER_BYTES_MAX])
        raw = unpacker.read_array_header() - _FIELDS
        return raw, [unpacker.unpack() for _ in range(_FIELDS)]
    except MSGPACK_ERRORS as error:
        raise PacketError(f"the header does not decode: {type(error).__name__}") from error


def header_of(fields: Sequence[Any]) -> Header:
    """The header in nine fields that `spelled` has accepted."""
    _, run_id, author, round_, slot, policy_step, prompt, mask, lengths = fields
    finished = tuple(bool(mask[i >> 3] >> (i & 7) & 1) for i in range(len(lengths)))
    return Header(run_id, author, round_, slot, policy_step, prompt, finished, tuple(lengths))


def spelled(fields: Sequence[Any], raw: int) -> bytes:
    """A header's bytes, before its `raw` parts. The nine fields may be anything at all; raises PacketError unless they
    fit. The first one, the version, is left to the caller.

    Completion i is bit i mod 8, least significant first, of byte i div 8 of the finished mask.
    """
    _, run_id, author, round_, slot, policy_step, prompt, mask, lengths = fields
    for name, value, size in (
        ("run id", run_id, RUN_ID_BYTES),
        ("author digest", author, SHORT_DIGEST_BYTES),
        ("prompt digest", prompt, SHORT_DIGEST_BYTES),
    ):
        if type(value) is not bytes or len(value) != size:
            raise PacketError(f"the {name} must be {size} bytes")
    for name, value in (("round", round_), ("slot", slot), ("policy step", policy_step)):
        if type(value) is not int or not 0 <= value < _U64:
            raise PacketError(f"the {name} must be an integer from 0 to 2^64 − 1")
    if type(lengths) is not list or not 1 <= len(lengths) <= MAX_GROUP:
        raise PacketError(f"a group has 1 to {MAX_GROUP} completions")
    if any(type(length) is not int or not 0 <= length <= MAX_PACKET_BYTES for length in lengths):
        raise PacketError(f"a length must be an integer from 0 to {MAX_PACKET_BYTES}")
    spare = -len(lengths) % 8
    if type(mask) is not bytes or len(mask) != (len(lengths) + 7) // 8 or mask[-1] >> (8 - spare):
        raise PacketError(f"the finished mask must hold {len(lengths)} bits")
    packed: bytes = msgpack.packb(list(fields), use_bin_type=True)
    return bytes((0x90 + _FIELDS + raw,)) + packed[1:]  # an array of the fields and of the parts that follow


def raw_part(data: bytes, at: int, before: bytes, size: int) -> tuple[memoryview, int]:
    """The `size` raw bytes at a place in `data`, behind their prefix, and the place after them. Raises PacketError.

    Args:
        before: what must stand at that place first: the header's one spelling for the first part, else nothing.
    """
    if len(data) < at + size:
        raise PacketError(f"{len(data)} bytes are too few for what the packet counts")
    prefix = before + bin_prefix(size)
    begin = at + len(prefix)
    if data[at:begin] != prefix:
        raise PacketError("the packet is not in canonical form")
    if len(data) < begin + size:
        raise PacketError(f"{len(data)} bytes are too few for what the packet counts")
    return memoryview(data)[begin : begin + size], begin + size


def bin_prefix(size: int) -> bytes:
    """The shortest msgpack prefix of `size` raw bytes; msgpack's own packer would want the bytes as well."""
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    return struct.pack(">BH", 0xC5, size) if size < 1 << 16 else struct.pack(">BI", 0xC6, size)
