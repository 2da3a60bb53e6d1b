"""A group of completions as bytes, and back: version 1 holds token ids, 2 text, 3 token ids of several turns.

`decode` is the one place where bytes from strangers become values. So it allocates nothing that its input has not paid
for, accepts exactly one spelling of every packet, and raises nothing but `PacketError`. Checks that need the run (ids,
caps, EOS, log-probs) are in `ftis_node.swarm.admission`. proto/PACKET.md specifies the layouts byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.packet.layout import (
    MAX_GROUP,
    MAX_PACKET_BYTES,
    MSGPACK_ERRORS,
    RUN_ID_BYTES,
    SHORT_DIGEST_BYTES,
    PacketError,
    author_digest,
    packet_digest,
    prompt_digest,
    prompt_digests,
    unpack_fields,
)
from ftis_node.packet.text import (
    PIECE_BYTES_MAX,
    TEXT_PACKET_VERSION,
    TextCompletion,
    TextPacket,
    decode_text,
    encode_text,
    pack_text_group,
)
from ftis_node.packet.tokens import (
    MAX_TOKENS,
    PACKET_VERSION,
    RECORD_BYTES,
    Completion,
    Packet,
    decode_tokens,
    encode_tokens,
    pack_group,
)
from ftis_node.packet.turns import (
    TURN_PACKET_VERSION,
    TURNS_MAX,
    TurnPacket,
    decode_turns,
    encode_turns,
    pack_turn_group,
)

__all__ = [
    "MAX_GROUP",
    "MAX_PACKET_BYTES",
    "MAX_TOKENS",
    "MSGPACK_ERRORS",
    "PACKET_VERSION",
    "PIECE_BYTES_MAX",
    "RECORD_BYTES",
    "RUN_ID_BYTES",
    "SHORT_DIGEST_BYTES",
    "TEXT_PACKET_VERSION",
    "TURNS_MAX",
    "AnyPacket",
    "Completion",
    "Group",
    "Packet",
    "PacketError",
    "TextCompletion",
    "TextPacket",
    "TurnPacket",
    "author_digest",
    "decode",
    "encode",
    "pack_group",
    "pack_text_group",
    "pack_turn_group",
    "packet_digest",
    "prompt_digest",
    "prompt_digests",
]


AnyPacket = Packet | TextPacket | TurnPacket


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """An admitted packet. author: 38-byte peer id. row: of the task's data. digest: sha256 of its bytes, `data`; the
    arrays of `packet` are views of these. epoch: in a run with common rows, that of its draw.
    """

    author: bytes
    row: int
    packet: AnyPacket
    digest: bytes
    data: bytes
    epoch: int = 0

    @property
    def key(self) -> tuple[bytes, int, int]:
        """(author, round, slot): at most one group with this key is ever trained on."""
        return (self.author, self.packet.round, self.packet.slot)


def encode(packet: AnyPacket) -> bytes:
    """The one spelling of a packet. Raises PacketError if its parts do not fit together or the layout."""
    match packet:
        case TextPacket():
            return encode_text(packet)
        case TurnPacket():
            return encode_turns(packet)
    return encode_tokens(packet)


def decode(data: bytes) -> AnyPacket:
    """Read a packet from bytes that anybody may have sent.

    Raises PacketError, and nothing else, unless `encode(decode(data)) == data`.
    """
    if len(data) > MAX_PACKET_BYTES:
        raise PacketError(f"{len(data)} bytes are above the {MAX_PACKET_BYTES} allowed")
    raw, fields = unpack_fields(data)
    match fields[0], raw:
        case (int() as version, 1) if type(version) is int and version == PACKET_VERSION:
            return decode_tokens(data, fields)
        case (int() as version, 3) if type(version) is int and version == TEXT_PACKET_VERSION:
            return decode_text(data, fields)
        case (int() as version, 4) if type(version) is int and version == TURN_PACKET_VERSION:
            return decode_turns(data, fields)
    raise PacketError(
        f"only packet versions {PACKET_VERSION}, {TEXT_PACKET_VERSION} and {TURN_PACKET_VERSION} are understood here"
    )
