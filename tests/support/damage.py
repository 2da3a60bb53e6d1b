"""Bytes that were damaged on their way, and what a decoder may make of them."""

from hypothesis import strategies as st

from ftis_node.packet import Group, PacketError, decode, encode


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes, one to three of them changed, and perhaps cut short."""
    changed = bytearray(data)
    for place in draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=3)):
        changed[place] = draw(st.integers(0, 255))
    return bytes(changed[: draw(st.integers(0, len(changed)))] if draw(st.booleans()) else changed)


def one_spelling(data: bytes) -> Group | None:
    """The packet that the bytes are, of which they are the one spelling; None if they are refused."""
    try:
        packet = decode(data)
    except PacketError:
        return None
    assert encode(packet) == data
    return packet
