"""An announcement: "in this round I made these packets, and so many completions are right". Its author signs it; any
peer may pass it on.

proto/PACKET.md specifies the bytes and the signed part. Structure and signature have separate checks, so that a
receiver can budget the costlier one, the signature's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, starmap
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ftis_node.config.run import Run
from ftis_node.packet import MAX_PACKET_BYTES, RUN_ID_BYTES
from ftis_node.swarm.identity import AUTHOR_BYTES, SIGNATURE_BYTES, Identity, is_author, verify
from ftis_node.swarm.signed import Malformed, decode

ANNOUNCEMENT_VERSION = 2
SIGNATURE_CONTEXT = b"ftis/announce/2"
DIGEST_BYTES = 32

_HEAD = struct.Struct(">QQQ")
_REF = struct.Struct(">I32sIH")
# Upper bounds of the encoding: three u64, the bytes with their prefixes and an array prefix; a packet reference.
_FIXED_BYTES_MAX = 160
_REF_BYTES_MAX = 48

_Natural = Annotated[int, Meta(ge=0)]


class PacketRef(NamedTuple):
    """A reference to a packet. slot: u32. digest: sha256 of its bytes. size: in bytes, 1 … MAX_PACKET_BYTES.

    right: u16, the hint: the completions with the packet's highest reward by its author's own rule; 0 if none is above
    0. Other nodes reward for themselves, and use it only to choose what to pull.
    """

    slot: Annotated[int, Meta(ge=0, lt=1 << 32)]
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    size: Annotated[int, Meta(ge=1, le=MAX_PACKET_BYTES)]
    right: Annotated[int, Meta(ge=0, lt=1 << 16)]


def right_of(rewards: Sequence[float]) -> int:
    """The completions of a group [G] with its highest reward; 0 if that is not above 0. See `PacketRef.right`."""
    best = max(rewards)
    if best <= 0:
        return 0
    return sum(reward == best for reward in rewards)


def teaches(run: Run, right: int) -> bool:
    """Whether an announced packet has right and wrong completions; any part of a horizontal run's group may teach. A
    packet that does not is never pulled.

    right: the hint of its `PacketRef`, which its author may have made up.
    """
    return run.parts > 1 or 0 < right < run.group


class PacketRefs:
    """The packet references of an announcement, kept as the signed 42 bytes each; objects would take 270. They are read
    like a list. An index is also a packet's bit in the masks of `known.Known`. `packed` is not checked; `of` checks."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @classmethod
    def of(cls, refs: Iterable[PacketRef]) -> PacketRefs:
        """Pack references, or the fields of each, in their order. Raises ValueError if an announcement may not contain
        them: none, slots that do not ascend, or a field out of its bounds."""
        checked = msgspec.convert([tuple(ref) for ref in refs], list[PacketRef])
        if not checked or any(later.slot <= earlier.slot for earlier, later in pairwise(checked)):
            raise ValueError("an announcement names at least one packet, slots ascending")
        return cls(b"".join(starmap(_REF.pack, checked)))

    def __len__(self) -> int:
        return len(self.packed) // _REF.size

    def __iter__(self) -> Iterator[PacketRef]:
        return starmap(PacketRef, _REF.iter_unpack(self.packed))

    def __getitem__(self, index: int) -> PacketRef:
        place = range(len(self))[index]  # raises IndexError; a negative index counts from the end
        return PacketRef(*_REF.unpack_from(self.packed, place * _REF.size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PacketRefs) and self.packed == other.packed

    @property
    def largest(self) -> int:
        """Size of the largest packet in bytes."""
        sizes: list[int] = [size for _, _, size, _ in _REF.iter_unpack(self.packed)]
        return max(sizes)


class Announcement(msgspec.Struct, frozen=True, array_like=True, tag=ANNOUNCEMENT_VERSION, forbid_unknown_fields=True):
    """run_id: 16 bytes. author: 38-byte peer id. round, policy_step: u64. issued_at: u64, unix seconds.

    policy_step: the author's steps before it sampled. packets: at least one, slots ascending. signature: 64 bytes.
    """

    run_id: Annotated[bytes, Meta(min_length=RUN_ID_BYTES, max_length=RUN_ID_BYTES)]
    author: Annotated[bytes, Meta(min_length=AUTHOR_BYTES, max_length=AUTHOR_BYTES)]
    round: _Natural
    policy_step: _Natural
    issued_at: _Natural
    packets: PacketRefs
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    def signed_bytes(self) -> bytes:
        """The bytes that the signature covers. Every field after the context has a fixed width, so they are unique."""
        head = _HEAD.pack(self.round, self.policy_step, self.issued_at)
        return SIGNATURE_CONTEXT + self.run_id + self.author + head + self.packets.packed

    def verify(self) -> bool:
        """Whether the author's signature is valid. It takes about 0.1 ms of CPU, so the caller budgets it by peer."""
        return verify(self.author, self.signed_bytes(), self.signature)

    def encode(self) -> bytes:
        """The canonical bytes: about 140, and 42 per packet. The same announcement always has the same bytes, from
        which its id follows (`known.announcement_id`)."""
        return msgspec.msgpack.encode(self, enc_hook=lambda refs: list(_REF.iter_unpack(refs.packed)))


def announce(
    identity: Identity,
    *,
    run_id: bytes,
    round: int,
    policy_step: int,
    issued_at: int,
    packets: Sequence[PacketRef],
) -> Announcement:
    """Sign an announcement of this identity's; the fields are those of `Announcement`. Nothing is sent or stored.
    Raises Malformed if peers would refuse its form."""
    try:
        unsigned = Announcement(
            run_id,
            identity.author,
            round,
            policy_step,
            issued_at,
            PacketRefs.of(packets),
            signature=b"",
        )
        made = msgspec.structs.replace(unsigned, signature=identity.sign(unsigned.signed_bytes()))
    except (ValueError, struct.error) as error:
        raise Malformed(f"peers would refuse the announcement: {error}") from error
    return decode_announcement(made.encode(), max_packets=len(packets))


def decode_announcement(data: bytes, *, max_packets: int) -> Announcement:
    """Decode an announcement from untrusted bytes without checking its signature.

    Raises Malformed, and nothing else, unless it is well-formed, canonical and names 1 … max_packets packets.

    max_packets: the run's slots. Longer bytes than so many can take are not read.
    """
    most = _FIXED_BYTES_MAX + _REF_BYTES_MAX * max_packets
    found = decode(data, Announcement, most, "an announcement", lambda _, refs: PacketRefs.of(refs))
    if len(found.packets) > max_packets:
        raise Malformed(f"an announcement names at most {max_packets} packets here")
    if not is_author(found.author) or found.encode() != data:
        raise Malformed("the announcement is not in canonical form, or its author is not an Ed25519 peer id")
    return found
