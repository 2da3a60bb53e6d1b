"""An announcement: "in this round I made these packets, and so many completions are right". Its author signs it; any
peer may pass it on.

proto/PACKET.md specifies the bytes and the signed part. Structure and signature have separate checks, so that a
receiver can budget the costlier one, the signature's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import msgpack

from ftis_node.errors import FtisError
from ftis_node.packet import MAX_PACKET_BYTES, MSGPACK_ERRORS, RUN_ID_BYTES
from ftis_node.swarm.identity import SIGNATURE_BYTES, Identity, is_author, verify

ANNOUNCEMENT_VERSION = 2
SIGNATURE_CONTEXT = b"ftis/announce/2"

_U16 = 1 << 16
_U32 = 1 << 32
_U64 = 1 << 64
_HEAD = struct.Struct(">QQQ")
_REF = struct.Struct(">I32sIH")
# Upper bounds of the encoding: three u64, the bytes with their prefixes and an array prefix; a packet reference.
_FIXED_BYTES_MAX = 160
_REF_BYTES_MAX = 48


class AnnouncementError(FtisError):
    """Bytes that are not an announcement, or an announcement that cannot be encoded."""


@dataclass(frozen=True, slots=True)
class PacketRef:
    """A reference to a packet. slot: u32. digest: sha256 of its bytes. size: in bytes, 1 … MAX_PACKET_BYTES.

    right: u16, the hint: the completions with the packet's highest reward by its author's own rule; 0 if none is above
    0. Other nodes reward for themselves, and use it only to choose what to pull.
    """

    slot: int
    digest: bytes
    size: int
    right: int


class PacketRefs(Sequence[PacketRef]):
    """The packet references of an announcement, kept as the signed 42 bytes each; objects would take 270."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @classmethod
    def of(cls, refs: Iterable[PacketRef]) -> PacketRefs:
        """Pack references. Raises AnnouncementError if an announcement may not contain them."""
        return _packed((ref.slot, ref.digest, ref.size, ref.right) for ref in refs)

    def __len__(self) -> int:
        return len(self.packed) // _REF.size

    @overload
    def __getitem__(self, index: int) -> PacketRef: ...

    @overload
    def __getitem__(self, index: slice) -> list[PacketRef]: ...

    def __getitem__(self, index: int | slice) -> PacketRef | list[PacketRef]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return PacketRef(*_REF.unpack_from(self.packed, place * _REF.size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PacketRefs) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"PacketRefs({list(self)!r})"

    @property
    def largest(self) -> int:
        """Size of the largest packet in bytes."""
        sizes: list[int] = [size for _, _, size, _ in _REF.iter_unpack(self.packed)]
        return max(sizes)


@dataclass(frozen=True, slots=True)
class Announcement:
    """run_id: 16 bytes. author: 38-byte peer id. round, policy_step: u64. issued_at: u64, unix seconds.

    packets: at least one, slots ascending. signature: 64 bytes.
    """

    run_id: bytes
    author: bytes
    round: int
    policy_step: int
    issued_at: int
    packets: PacketRefs
    signature: bytes

    def signed_bytes(self) -> bytes:
        """The bytes that the signature covers. Every field after the context has a fixed width, so they are unique."""
        head = _HEAD.pack(self.round, self.policy_step, self.issued_at)
        return SIGNATURE_CONTEXT + self.run_id + self.author + head + self.packets.packed

    def verify(self) -> bool:
        """Whether the author's signature is valid. About 0.1 ms of CPU."""
        return verify(self.author, self.signed_bytes(), self.signature)

    def encode(self) -> bytes:
        """The canonical bytes: about 140, and 42 per packet."""
        refs = list(_REF.iter_unpack(self.packets.packed))  # msgpack writes tuples as arrays
        fields = [ANNOUNCEMENT_VERSION, self.run_id, self.author, self.round, self.policy_step, self.issued_at, refs]
        packed: bytes = msgpack.packb([*fields, self.signature], use_bin_type=True)
        return packed


def announce(
    identity: Identity, *, run_id: bytes, round: int, policy_step: int, issued_at: int, packets: Sequence[PacketRef]
) -> Announcement:
    """Sign an announcement. Raises AnnouncementError if peers would refuse it."""
    unsigned = Announcement(
        run_id, identity.author, round, policy_step, issued_at, PacketRefs.of(packets), bytes(SIGNATURE_BYTES)
    )
    _check(unsigned)
    return replace(unsigned, signature=identity.sign(unsigned.signed_bytes()))


def decode_announcement(data: bytes, *, max_packets: int) -> Announcement:
    """Decode an announcement from untrusted bytes without checking its signature.

    Raises AnnouncementError, and nothing else, unless it is well-formed, canonical and names 1 … max_packets packets.
    """
    if len(data) > _FIXED_BYTES_MAX + _REF_BYTES_MAX * max_packets:
        raise AnnouncementError(f"{len(data)} bytes are too many for {max_packets} packets")
    fields = _unpack(data, max_packets)
    if type(fields) is not list or len(fields) != 8:
        raise AnnouncementError("an announcement is an array of eight")
    version, run_id, author, round_, policy_step, issued_at, refs, signature = fields
    if type(version) is not int or version != ANNOUNCEMENT_VERSION:
        raise AnnouncementError(f"only announcement version {ANNOUNCEMENT_VERSION} is understood here")
    if type(refs) is not list or len(refs) > max_packets:
        raise AnnouncementError(f"an announcement names at most {max_packets} packets here")
    if any(type(ref) is not list or len(ref) != 4 for ref in refs):
        raise AnnouncementError("a packet is named by slot, sha256, size and right completions")
    announcement = Announcement(run_id, author, round_, policy_step, issued_at, _packed(refs), signature)
    _check(announcement)
    if announcement.encode() != data:
        raise AnnouncementError("the announcement is not in canonical form")
    return announcement


def _unpack(data: bytes, max_packets: int) -> Any:
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=True,
            max_bin_len=SIGNATURE_BYTES,
            max_array_len=max(8, max_packets),
            max_str_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
    except MSGPACK_ERRORS as error:
        raise AnnouncementError(f"the announcement does not decode: {type(error).__name__}") from error


def _check(announcement: Announcement) -> None:
    """Raise AnnouncementError unless every field has the right type and value."""
    for name, value, size in (
        ("run id", announcement.run_id, RUN_ID_BYTES),
        ("signature", announcement.signature, SIGNATURE_BYTES),
    ):
        if type(value) is not bytes or len(value) != size:
            raise AnnouncementError(f"the {name} must be {size} bytes")
    if type(announcement.author) is not bytes or not is_author(announcement.author):
        raise AnnouncementError("the author is not an Ed25519 peer id")
    _check_int("round", announcement.round, 0, _U64)
    _check_int("policy step", announcement.policy_step, 0, _U64)
    _check_int("time", announcement.issued_at, 0, _U64)


def _packed(refs: Iterable[Sequence[Any]]) -> PacketRefs:
    """Pack the fields of references. Raises AnnouncementError if an announcement may not contain them."""
    parts = []
    last = -1
    for slot, digest, size, right in refs:
        _check_int("slot", slot, last + 1, _U32)
        _check_int("size", size, 1, MAX_PACKET_BYTES + 1)
        _check_int("number of right completions", right, 0, _U16)
        if type(digest) is not bytes or len(digest) != 32:
            raise AnnouncementError("a packet's sha256 must be 32 bytes")
        parts.append(_REF.pack(slot, digest, size, right))
        last = slot
    if not parts:
        raise AnnouncementError("an announcement names at least one packet")
    return PacketRefs(b"".join(parts))


def _check_int(name: str, value: Any, low: int, end: int) -> None:
    if type(value) is not int or not low <= value < end:
        raise AnnouncementError(f"a {name} must be an integer from {low} to {end - 1}")
