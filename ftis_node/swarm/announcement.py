"""An announcement: "in this round I made these packets", signed by their author and passed on by anyone.

proto/PACKET.md specifies the bytes and what is signed. Structure and signature are checked apart, so that a receiver
can budget the costlier of the two.
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

ANNOUNCEMENT_VERSION = 1
SIGNATURE_CONTEXT = b"ftis/announce/1"

_U32 = 1 << 32
_U64 = 1 << 64
_HEAD = struct.Struct(">QQQ")
_REF = struct.Struct(">I32sI")
# The most that the encoding can need: three u64, the bytes with their prefixes, an array prefix; a reference.
_FIXED_BYTES_MAX = 160
_REF_BYTES_MAX = 45


class AnnouncementError(FtisError):
    """These bytes are not an announcement, or this announcement cannot be bytes."""


@dataclass(frozen=True, slots=True)
class PacketRef:
    """A packet by name. slot: u32. digest: sha256 of its bytes. size: its bytes, 1 … MAX_PACKET_BYTES."""

    slot: int
    digest: bytes
    size: int


class PacketRefs(Sequence[PacketRef]):
    """The packets of an announcement as the 40 bytes each that are signed; as objects they would take 270."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @classmethod
    def of(cls, refs: Iterable[PacketRef]) -> PacketRefs:
        """Packs these. Raises AnnouncementError unless they are what an announcement may name."""
        return _packed((ref.slot, ref.digest, ref.size) for ref in refs)

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
        """Bytes of the largest packet."""
        sizes: list[int] = [size for _, _, size in _REF.iter_unpack(self.packed)]
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
        """What the signature covers; every field after the context has a fixed width, so it reads one way only."""
        head = _HEAD.pack(self.round, self.policy_step, self.issued_at)
        return SIGNATURE_CONTEXT + self.run_id + self.author + head + self.packets.packed

    def verify(self) -> bool:
        """Whether its author signed it. About 0.1 ms of CPU."""
        return verify(self.author, self.signed_bytes(), self.signature)

    def encode(self) -> bytes:
        """The one spelling of this announcement, about 140 bytes and 41 a packet."""
        refs = list(_REF.iter_unpack(self.packets.packed))  # msgpack writes tuples as arrays
        fields = [ANNOUNCEMENT_VERSION, self.run_id, self.author, self.round, self.policy_step, self.issued_at, refs]
        packed: bytes = msgpack.packb([*fields, self.signature], use_bin_type=True)
        return packed


def announce(
    identity: Identity, *, run_id: bytes, round: int, policy_step: int, issued_at: int, packets: Sequence[PacketRef]
) -> Announcement:
    """Sign an announcement. Raises AnnouncementError if it would be refused by others."""
    unsigned = Announcement(
        run_id, identity.author, round, policy_step, issued_at, PacketRefs.of(packets), bytes(SIGNATURE_BYTES)
    )
    _check(unsigned)
    return replace(unsigned, signature=identity.sign(unsigned.signed_bytes()))


def decode_announcement(data: bytes, *, max_packets: int) -> Announcement:
    """Read an announcement from bytes that anybody may have sent; its signature is not looked at.

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
    if any(type(ref) is not list or len(ref) != 3 for ref in refs):
        raise AnnouncementError("a packet is named by slot, sha256 and size")
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
    """Raise AnnouncementError unless every field, of whatever type it came, is what it should be."""
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
    """Packs (slot, sha256, size) each. Raises AnnouncementError unless they are what an announcement may name."""
    parts = []
    last = -1
    for slot, digest, size in refs:
        _check_int("slot", slot, last + 1, _U32)
        _check_int("size", size, 1, MAX_PACKET_BYTES + 1)
        if type(digest) is not bytes or len(digest) != 32:
            raise AnnouncementError("a packet's sha256 must be 32 bytes")
        parts.append(_REF.pack(slot, digest, size))
        last = slot
    if not parts:
        raise AnnouncementError("an announcement names at least one packet")
    return PacketRefs(b"".join(parts))


def _check_int(name: str, value: Any, low: int, end: int) -> None:
    if type(value) is not int or not low <= value < end:
        raise AnnouncementError(f"a {name} must be an integer from {low} to {end - 1}")
