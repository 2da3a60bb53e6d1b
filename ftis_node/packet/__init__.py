"""A group of completions as bytes, and back: versions 1 and 3 hold token ids, 2 text.

`decode` is the one place where bytes from strangers become values. So it allocates nothing that its input has not paid
for, accepts exactly one spelling of every packet, and raises nothing but `PacketError`. Checks that need the run (ids,
caps, EOS, log-probs) are in `ftis_node.swarm.admission`. proto/PACKET.md specifies the layouts byte by byte.
"""

from dataclasses import dataclass

from ftis_node.packet.layout import (
    MAX_GROUP,
    MAX_PACKET_BYTES,
    RUN_ID_BYTES,
    SHORT_DIGEST_BYTES,
    PacketError,
    author_digest,
    packet_digest,
    prompt_digest,
    prompt_digests,
    unpack_fields,
)
from ftis_node.packet.text_packet import (
    PIECE_BYTES_MAX,
    TEXT_PACKET_VERSION,
    TextCompletion,
    TextPacket,
    decode_text,
    pack_text_group,
)
from ftis_node.packet.tokens import (
    MAX_TOKENS,
    PACKET_VERSION,
    RECORD_BYTES,
    TURN_PACKET_VERSION,
    TURNS_MAX,
    Completion,
    GivenTokens,
    Packet,
    decode_tokens,
    pack_group,
)

AnyPacket = Packet | TextPacket
_RAW_PARTS = {PACKET_VERSION: 1, TEXT_PACKET_VERSION: 3, TURN_PACKET_VERSION: 4}  # that follow the header


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """An admitted packet: a group, in a horizontal run a part of one.

    author: 38-byte peer id. row: of the task's data, from 0. digest: sha256 of its bytes, `data`; the arrays of
    `packet` are views of these. epoch: in a run with common rows, that of its draw; else 0.
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
    """The one spelling of a packet, whose sha256 is its name. Raises PacketError if its parts do not fit together, or
    not the layout."""
    return packet.encoded(packet.version, packet.raw())


def decode(data: bytes) -> AnyPacket:
    """Read a packet from bytes that anybody may have sent. Its arrays are read-only views of `data`.

    Raises PacketError, and nothing else, unless `encode(decode(data)) == data`.
    """
    if len(data) > MAX_PACKET_BYTES:
        raise PacketError(f"{len(data)} bytes are above the {MAX_PACKET_BYTES} allowed")
    raw, fields = unpack_fields(data)
    version = fields[0]
    if type(version) is not int or _RAW_PARTS.get(version) != raw:
        raise PacketError("only packet versions 1, 2 and 3 are understood here")
    if version == TEXT_PACKET_VERSION:
        return decode_text(data, fields)
    return decode_tokens(data, fields)
