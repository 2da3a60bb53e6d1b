"""A group of completions as bytes, and back.

`decode` is the one place where bytes from strangers become values. So it allocates nothing that its input has not paid
for, accepts exactly one spelling of every packet, and raises nothing but `PacketError`. Checks that need the run (ids,
caps, EOS, log-probs) are in `ftis_node.swarm.admission`. proto/PACKET.md specifies the layout byte
by byte.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ftis_node.errors import FtisError

PACKET_VERSION = 1
MAX_PACKET_BYTES = 4 << 20
"""A packet above this many bytes is refused unread (a unary hivemind answer above 4 MiB would never arrive)."""
MAX_GROUP = 256
RECORD_BYTES = 8
MAX_TOKENS = MAX_PACKET_BYTES // RECORD_BYTES

RUN_ID_BYTES = 16
SHORT_DIGEST_BYTES = 8

_RECORD = np.dtype([("id", "<u4"), ("logprob", "<f4")])
_U64 = 1 << 64
_U32 = 1 << 32
_ARRAY_OF_TEN = 0x9A
# The longest header that can pass has 256 lengths of five bytes and is 1,392 bytes long.
_HEADER_BYTES_MAX = 2048
_LIMITS = {"max_bin_len": 32, "max_array_len": MAX_GROUP, "max_str_len": 0, "max_map_len": 0, "max_ext_len": 0}

# Everything that msgpack is known to raise on hostile bytes; the fuzz tests would show another.
MSGPACK_ERRORS = (msgpack.UnpackException, ValueError, TypeError, OverflowError, RecursionError)


class PacketError(FtisError):
    """These bytes are not a packet, or this packet cannot be bytes."""


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """One sampled answer.

    token_ids: uint32 [length], a sampled EOS included. logprobs: float32 [length], nats, of each id under the policy
    that sampled it. finished: the last id is an EOS.
    """

    token_ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    finished: bool

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False, slots=True)
class Packet:
    """The completions of one prompt by one author.

    run_id: 16 bytes. author_digest, prompt_digest: 8 bytes. round, slot, policy_step: u64.
    finished: bool [G]. lengths: tokens of each completion [G]. token_ids: uint32 [Σ lengths]. logprobs: float32
    [Σ lengths], nats. After `decode` both arrays are read-only, strided views into the received bytes.
    """

    run_id: bytes
    author_digest: bytes
    round: int
    slot: int
    policy_step: int
    prompt_digest: bytes
    finished: tuple[bool, ...]
    lengths: tuple[int, ...]
    token_ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]

    def completions(self) -> Iterator[Completion]:
        """The G completions in order, as views."""
        start = 0
        for length, finished in zip(self.lengths, self.finished, strict=True):
            end = start + length
            yield Completion(self.token_ids[start:end], self.logprobs[start:end], finished)
            start = end


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """An admitted packet. author: 38-byte peer id. row: of the task's data. digest: sha256 of its bytes, `data`; the
    arrays of `packet` are views of these.
    """

    author: bytes
    row: int
    packet: Packet
    digest: bytes
    data: bytes

    @property
    def key(self) -> tuple[bytes, int, int]:
        """(author, round, slot): at most one group with this key is ever trained on."""
        return (self.author, self.packet.round, self.packet.slot)


def packet_digest(data: bytes) -> bytes:
    """The name of a packet: sha256 of its bytes, 32 bytes."""
    return hashlib.sha256(data).digest()


def author_digest(author: bytes) -> bytes:
    """How a packet refers to its author: the first 8 bytes of the sha256 of the 38-byte peer id."""
    return hashlib.sha256(author).digest()[:SHORT_DIGEST_BYTES]


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """The first 8 bytes of the sha256 of the prompt's ids as u32le. Raises PacketError if an id is not a u32."""
    try:
        packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise PacketError(f"a prompt holds something that is not a token id: {error}") from error
    return hashlib.sha256(packed).digest()[:SHORT_DIGEST_BYTES]


def prompt_digests(prompts: Iterable[Sequence[int]]) -> bytes:
    """The digests of every row's prompt one after another, as admission wants them: token ids → 8 bytes a row."""
    return b"".join(prompt_digest(ids) for ids in prompts)


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
    if not completions:
        raise PacketError("a group needs at least one completion")
    for completion in completions:
        if np.shape(completion.token_ids) != np.shape(completion.logprobs) or np.ndim(completion.token_ids) != 1:
            raise PacketError("every token of a completion needs one id and one log-prob")
    ids = np.concatenate([np.asarray(completion.token_ids) for completion in completions])
    if ids.size and (ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= _U32):
        raise PacketError("token ids must be integers from 0 to 2^32 − 1")
    return Packet(
        run_id=run_id,
        author_digest=author_digest(author),
        round=round,
        slot=slot,
        policy_step=policy_step,
        prompt_digest=prompt_digest(prompt_ids),
        finished=tuple(bool(completion.finished) for completion in completions),
        lengths=tuple(len(completion) for completion in completions),
        token_ids=ids.astype(np.uint32),
        logprobs=np.concatenate([np.asarray(completion.logprobs, np.float32) for completion in completions]),
    )


def encode(packet: Packet) -> bytes:
    """The one spelling of a packet. Raises PacketError if its parts do not fit together or the layout."""
    if len(packet.finished) != len(packet.lengths):
        raise PacketError(f"{len(packet.finished)} finished flags for {len(packet.lengths)} lengths")
    header = _header(
        packet.run_id,
        packet.author_digest,
        packet.round,
        packet.slot,
        packet.policy_step,
        packet.prompt_digest,
        _mask(packet.finished),
        list(packet.lengths),
    )
    tokens = sum(packet.lengths)
    for name, array, kind in (("token_ids", packet.token_ids, "u"), ("logprobs", packet.logprobs, "f")):
        if array.dtype.kind != kind or array.dtype.itemsize != 4 or array.shape != (tokens,):
            raise PacketError(f"{name} must be {kind}4 [{tokens}], not {array.dtype} {list(array.shape)}")
    records = np.empty(tokens, _RECORD)
    records["id"] = packet.token_ids
    records["logprob"] = packet.logprobs
    data = header + records.tobytes()
    if len(data) > MAX_PACKET_BYTES:
        raise PacketError(f"a packet of {len(data)} bytes is above the {MAX_PACKET_BYTES} allowed")
    return data


def decode(data: bytes) -> Packet:
    """Read a packet from bytes that anybody may have sent.

    Raises PacketError, and nothing else, unless `encode(decode(data)) == data`.
    """
    if len(data) > MAX_PACKET_BYTES:
        raise PacketError(f"{len(data)} bytes are above the {MAX_PACKET_BYTES} allowed")
    version, run_id, author, round_, slot, policy_step, prompt, mask, lengths = _unpack_header(data)
    if type(version) is not int or version != PACKET_VERSION:
        raise PacketError(f"only packet version {PACKET_VERSION} is understood here")
    # Writing the header again and comparing settles canonical form and the records' size at once.
    header = _header(run_id, author, round_, slot, policy_step, prompt, mask, lengths)
    tokens = sum(lengths)
    if len(data) != len(header) + tokens * RECORD_BYTES:
        raise PacketError(f"{len(data)} bytes do not fit {tokens} tokens after a header of {len(header)} bytes")
    if not data.startswith(header):
        raise PacketError("the header is not in canonical form")
    records = np.frombuffer(data, _RECORD, count=tokens, offset=len(header))
    return Packet(
        run_id=run_id,
        author_digest=author,
        round=round_,
        slot=slot,
        policy_step=policy_step,
        prompt_digest=prompt,
        finished=tuple(bool(mask[i >> 3] >> (i & 7) & 1) for i in range(len(lengths))),
        lengths=tuple(lengths),
        token_ids=records["id"],
        logprobs=records["logprob"],
    )


def _unpack_header(data: bytes) -> list[Any]:
    """The nine fields before the records, of whatever types the sender chose."""
    unpacker = msgpack.Unpacker(max_buffer_size=_HEADER_BYTES_MAX, strict_map_key=True, **_LIMITS)
    try:
        unpacker.feed(data[:_HEADER_BYTES_MAX])
        if unpacker.read_array_header() != 10:
            raise PacketError("a packet is an array of ten")
        return [unpacker.unpack() for _ in range(9)]
    except MSGPACK_ERRORS as error:
        raise PacketError(f"the header does not decode: {type(error).__name__}") from error


def _header(
    run_id: Any, author: Any, round_: Any, slot: Any, policy_step: Any, prompt: Any, mask: Any, lengths: Any
) -> bytes:
    """Everything before the first record. The arguments may be anything at all; raises PacketError unless they fit."""
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
    if any(type(length) is not int or not 1 <= length <= MAX_TOKENS for length in lengths):
        raise PacketError(f"a length must be an integer from 1 to {MAX_TOKENS}")
    spare = -len(lengths) % 8
    if type(mask) is not bytes or len(mask) != (len(lengths) + 7) // 8 or mask[-1] >> (8 - spare):
        raise PacketError(f"the finished mask must hold {len(lengths)} bits")
    fields = [PACKET_VERSION, run_id, author, round_, slot, policy_step, prompt, mask, lengths]
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return bytes((_ARRAY_OF_TEN,)) + packed[1:] + _bin_prefix(sum(lengths) * RECORD_BYTES)


def _bin_prefix(size: int) -> bytes:
    """The shortest msgpack prefix of `size` raw bytes; msgpack's own packer would want the bytes as well."""
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    if size < 1 << 16:
        return struct.pack(">BH", 0xC5, size)
    return struct.pack(">BI", 0xC6, size)


def _mask(finished: Sequence[bool]) -> bytes:
    """Completion i is bit i mod 8, least significant first, of byte i div 8."""
    bits = sum(1 << i for i, flag in enumerate(finished) if flag)
    return bits.to_bytes((len(finished) + 7) // 8, "little")
