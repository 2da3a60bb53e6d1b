"""Packet version 2: one spelling of a group as text, and nothing else is accepted."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.packet import (
    PacketError,
    TextCompletion,
    TextPacket,
    decode,
    encode,
    pack_text_group,
)
from tests.support.swarm import is_in_specification

RUN_ID = bytes(range(16))
AUTHOR = bytes(range(38))


def completion(*pieces, end=-0.5):
    claims = -np.arange(1, len(pieces) + 1, dtype=np.float32) / 8
    return TextCompletion(b"".join(pieces), np.array([len(piece) for piece in pieces], np.uint8), claims, end)


def packet(*completions):
    return pack_text_group(
        run_id=RUN_ID, author=AUTHOR, round=7, slot=1, policy_step=3, prompt="2+2=", completions=completions
    )


def same(one, other):
    return (
        one.text == other.text
        and np.array_equal(one.pieces, other.pieces)
        and np.array_equal(one.logprobs, other.logprobs)
        and one.end == other.end
    )


PLAIN = (
    completion(b"<think>", b"4", b"</think>"),
    completion("é".encode()[:1], end=None),
    completion(),
)


def test_the_vector_of_the_specification():
    small = encode(packet(completion(b"4", b"2")))
    assert is_in_specification(small)


pieces = st.lists(st.binary(min_size=1, max_size=255), max_size=5)
claims = st.floats(-30, 0, width=32)


@st.composite
def completions(draw):
    parts = draw(pieces)
    end = draw(claims) if not parts or draw(st.booleans()) else None
    if end is None and draw(st.booleans()):
        parts.append(b"")
    logprobs = np.array([draw(claims) for _ in parts], np.float32)
    return TextCompletion(b"".join(parts), np.array([len(part) for part in parts], np.uint8), logprobs, end)


@given(st.lists(completions(), min_size=1, max_size=9))
def test_every_group_comes_back(group):
    data = encode(packet(*group))
    found = decode(data)
    assert isinstance(found, TextPacket)
    assert encode(found) == data
    assert all(same(one, other) for one, other in zip(found.completions(), group, strict=True))


IMPOSSIBLE = [
    ({"pieces": np.zeros(3, np.int64)}, "pieces must be"),
    ({"logprobs": np.zeros(3)}, "logprobs must be"),
    ({"text": b"no"}, "bytes of text"),
    ({"text": "<think>4</think>é"}, "bytes of text"),
    ({"finished": (True,)}, "logprobs must be"),
]


@pytest.mark.parametrize(("changes", "said"), IMPOSSIBLE)
def test_parts_that_do_not_fit_cannot_be_encoded(changes, said):
    with pytest.raises(PacketError, match=said):
        encode(replace(packet(*PLAIN), **changes))


def test_sizes_and_claims_cannot_move_between_completions():
    """Three log-probs for two pieces beside two for three would add up."""
    one = completion(b"1", b"22")
    other = completion(b"1", b"2", b"3")
    with pytest.raises(PacketError, match="one size and one log-prob"):
        packet(replace(one, logprobs=np.zeros(3, np.float32)), replace(other, logprobs=np.zeros(2, np.float32)))
    with pytest.raises(PacketError, match="are not its text"):
        packet(replace(one, text=b"1"), replace(other, text=b"12345"))
