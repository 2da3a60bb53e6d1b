"""A packet reads back as it was written, and nothing but a packet reads at all."""

import json
import struct
import tracemalloc
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.packet import (
    MAX_GROUP,
    MAX_PACKET_BYTES,
    Completion,
    Packet,
    PacketError,
    TextPacket,
    author_digest,
    decode,
    encode,
    pack_group,
    packet_digest,
    prompt_digest,
)
from tests.support.damage import damaged, one_spelling

FOLDER = Path(__file__).parent.parent / "proto" / "vectors"
VERSIONS = [json.loads((FOLDER / f"{kind}packets.json").read_text()) for kind in ("", "text_", "turn_")]
U64 = st.integers(0, 2**64 - 1)


@st.composite
def packets(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=20))
    tokens = sum(lengths)
    # Any 8 bytes are a record: NaN payloads must survive too, since only admission may judge them.
    data = draw(st.binary(min_size=8 * tokens, max_size=8 * tokens))
    records = np.frombuffer(data, "<u4").reshape(tokens, 2)
    return Packet(
        run_id=draw(st.binary(min_size=16, max_size=16)),
        author_digest=draw(st.binary(min_size=8, max_size=8)),
        round=draw(U64),
        slot=draw(U64),
        policy_step=draw(U64),
        prompt_digest=draw(st.binary(min_size=8, max_size=8)),
        finished=tuple(draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))),
        lengths=tuple(lengths),
        token_ids=records[:, 0],
        logprobs=records[:, 1].copy().view(np.float32),
    )


def small_packet(**changes):
    fields = {
        "run_id": bytes(range(16)),
        "author_digest": b"authored",
        "round": 7,
        "slot": 2,
        "policy_step": 300,
        "prompt_digest": b"prompted",
        "finished": (True, False, True),
        "lengths": (2, 3, 1),
        "token_ids": np.array([5, 9, 1, 2, 3, 9], np.uint32),
        "logprobs": np.array([-0.5, -0.25, -1, -2, -3, 0], np.float32),
    }
    return Packet(**(fields | changes))


def blank(*lengths, **changes):
    """A packet of completions of so many tokens, each token 0 with log-prob 0."""
    tokens = sum(lengths)
    zeros = {"token_ids": np.zeros(tokens, np.uint32), "logprobs": np.zeros(tokens, np.float32)}
    return small_packet(**{"lengths": lengths, "finished": (False,) * len(lengths)} | zeros | changes)


def by_the_book(fields, records):
    """A packet written with msgpack alone, for spellings that `encode` would not write."""
    return msgpack.packb([*fields, records], use_bin_type=True)


def small_fields():
    return [1, bytes(range(16)), b"authored", 7, 2, 300, b"prompted", b"\x05", [2, 3, 1]]


def small_records():
    packet = small_packet()
    return b"".join(struct.pack("<If", *record) for record in zip(packet.token_ids, packet.logprobs, strict=True))


@given(packets())
def test_every_packet_survives_the_round_trip(packet):
    data = encode(packet)
    back = decode(data)
    for name in ("run_id", "author_digest", "round", "slot", "policy_step", "prompt_digest", "finished", "lengths"):
        assert getattr(back, name) == getattr(packet, name)
    assert back.token_ids.tobytes() == packet.token_ids.astype("<u4").tobytes()
    assert back.logprobs.tobytes() == packet.logprobs.tobytes()
    assert encode(back) == data


@pytest.mark.parametrize("tokens", [1, 31, 32, 8191, 8192])
def test_the_records_prefix_is_msgpacks_shortest_on_both_sides_of_every_step(tokens):
    data = encode(blank(tokens))
    assert data == by_the_book([*small_fields()[:7], b"\0", [tokens]], bytes(8 * tokens))
    assert decode(data).lengths == (tokens,)


def columns(packet):
    """What a test vector says of a packet beside its header."""
    if isinstance(packet, TextPacket):
        return {"sizes": packet.pieces.tolist(), "text": packet.text.hex()}
    parts = {"token_ids": packet.token_ids}
    given = packet.given
    if given is not None:
        parts |= {"turns": given.turns, "runs": given.runs, "given": given.ids}
    return {name: part.tolist() for name, part in parts.items()}


@pytest.mark.parametrize("vector", [one for kind in VERSIONS for one in kind["accepted"]], ids=lambda one: one["name"])
def test_the_code_agrees_with_the_test_vectors(vector):
    data = bytes.fromhex(vector["packet"])
    found = decode(data)
    for name in ("round", "slot", "policy_step"):
        assert getattr(found, name) == vector[name]
    for name in ("finished", "lengths"):
        assert list(getattr(found, name)) == vector[name]
    assert found.run_id.hex() == vector["run_id"]
    assert found.author_digest == author_digest(bytes.fromhex(vector["author"]))
    prompt = "prompt" if isinstance(found, TextPacket) else "prompt_ids"
    assert found.prompt_digest == prompt_digest(vector[prompt])
    for name, values in columns(found).items():
        assert values == vector[name]
    bits = found.logprobs.copy().view(np.uint32).tolist()
    assert [f"{one:08x}" for one in bits] == vector["logprob_bits"]
    assert encode(found) == data
    assert packet_digest(data).hex() == vector["sha256"]


@pytest.mark.parametrize(
    "vector", [one for kind in VERSIONS for one in kind["refused"]], ids=lambda one: one.get("why") or one["name"]
)
def test_the_refused_test_vectors_are_refused(vector):
    with pytest.raises(PacketError):
        decode(bytes.fromhex(vector["packet"]))


def test_decoding_copies_no_records():
    data = encode(small_packet())
    packet = decode(data)
    whole = np.frombuffer(data, np.uint8)
    for part in (packet.token_ids, packet.logprobs):
        assert np.shares_memory(part, whole)
        assert not part.flags.writeable


def group_of(*completions, prompt_ids=()):
    return pack_group(
        run_id=bytes(16), author=b"me", round=0, slot=0, policy_step=0, prompt_ids=prompt_ids, completions=completions
    )


def test_packing_takes_plain_lists_and_wider_types():
    completion = Completion(np.array([5, 9]), np.array([-0.5, -0.25]), np.bool_(True))
    back = decode(encode(group_of(completion, prompt_ids=[1, 2])))
    assert back.token_ids.tolist() == [5, 9]
    assert back.logprobs.tolist() == [-0.5, -0.25]
    assert back.finished == (True,)
    assert back.author_digest == author_digest(b"me")
    assert back.prompt_digest == prompt_digest([1, 2])


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ([-1], [0.0]),
        ([2**32], [0.0]),
        ([1.5], [0.0]),
        ([1, 2], [0.0]),
        ([[1]], [[0.0]]),
    ],
    ids=["negative id", "id above u32", "fractional id", "missing log-prob", "two axes"],
)
def test_completions_that_make_no_sense_are_not_packed(ids, logprobs):
    with pytest.raises(PacketError):
        group_of(Completion(np.array(ids), np.array(logprobs), True))


def test_without_completions_there_is_no_packet_and_of_anything_but_token_ids_or_text_no_digest():
    with pytest.raises(PacketError, match="at least one"):
        group_of()
    for prompt in ([-1], [2**32], ["a"], [0.5], "\ud800"):
        with pytest.raises(PacketError):
            prompt_digest(prompt)


IMPOSSIBLE = [
    {"run_id": bytes(15)},
    {"author_digest": bytes(9)},
    {"prompt_digest": bytearray(8)},
    {"round": -1},
    {"slot": 2**64},
    {"policy_step": 1.0},
    {"policy_step": True},
    {"finished": (True, False)},
    {"lengths": (2, 4, 0)},
    {"lengths": (2, 3, 2)},
    {"lengths": (), "finished": ()},
    {"token_ids": np.zeros(6, np.int64)},
    {"token_ids": np.zeros(5, np.uint32)},
    {"logprobs": np.zeros(6, np.float64)},
    {"logprobs": np.zeros((6, 1), np.float32)},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=" ".join)
def test_an_impossible_packet_is_not_encoded(changes):
    with pytest.raises(PacketError):
        encode(small_packet(**changes))


def test_a_packet_of_too_much_is_not_encoded_and_refused_unread():
    for lengths in ([1] * (MAX_GROUP + 1), [MAX_PACKET_BYTES // 8]):
        with pytest.raises(PacketError):
            encode(blank(*lengths))
    with pytest.raises(PacketError, match="above"):
        decode(bytes(MAX_PACKET_BYTES + 1))


def test_the_largest_group_is_a_packet():
    packet = blank(*[1] * 256, finished=(False,) * 255 + (True,), token_ids=np.arange(256, dtype=np.uint32))
    assert decode(encode(packet)).finished == packet.finished


WHOLE = [bytes.fromhex(kind["accepted"][0]["packet"]) for kind in VERSIONS]


@pytest.mark.parametrize("data", WHOLE)
def test_a_packet_cut_anywhere_or_with_anything_after_it_is_refused(data):
    wrong = [data[:end] for end in range(len(data))]
    wrong += [data + tail for tail in (b"\0", b"\xc0", bytes(8))]
    for spoilt in wrong:
        with pytest.raises(PacketError):
            decode(spoilt)


@settings(max_examples=600)
@given(st.sampled_from(WHOLE).flatmap(damaged))
def test_damaged_bytes_are_refused_or_are_another_packet_with_one_spelling(data):
    found = one_spelling(data)
    assert found is None or len(list(found.completions())) == len(found.lengths)


# Beside those of the test vectors.
WRONG_FIELDS = {
    0: [True, 1.0],
    1: [bytes(15), "0123456789abcdef"],
    2: [None],
    4: [None],
    5: [[300]],
    6: [bytes(9)],
    7: [5, b""],
    8: [[2, 3], [2, 3, 2], [7, -2, 1], [2, 3, 1.0], [2, 3, True], [2, 3, 2**61], [2**64 - 1, 3, 4], [1] * 257, {2: 3}],
    9: [None, [], "x" * 48, bytes(40), bytes(47), bytes(56), b""],
}


@pytest.mark.parametrize(
    ("position", "value"), [(position, value) for position, values in WRONG_FIELDS.items() for value in values]
)
def test_a_field_of_the_wrong_type_range_or_size_is_refused(position, value):
    fields = [*small_fields(), small_records()]
    fields[position] = value
    with pytest.raises(PacketError):
        decode(by_the_book(fields[:9], fields[9]))


BOMBS = [
    b"\x91" * 100_000,
    b"\x9a" + b"\x91" * 100_000,
    b"\x9a" * 2000,
    b"\x9a\x01" + b"\x81\x01" * 1000,
    b"\xdd" + b"\xff" * 4,
    *(b"\x9a" + kind + b"\xff" * 4 for kind in (b"\xc6", b"\xdb", b"\xdd", b"\xdf")),
    b"\x9a\xc9\xff\xff\xff\xff\x40",
    b"\x9a\xd4\xff\x00",
    b"\x9a" + b"\xd4\x40" * 300,
    b"\x9a\xc7\x00\xff",
    b"\x9a\xa1\xff",
    b"\x9a\x81\x01\x02",
    b"\x9a\xc1",
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:6].hex())
def test_bombs_are_refused(bomb):
    with pytest.raises(PacketError):
        decode(bomb)


def test_claimed_sizes_allocate_nothing():
    lengths = [MAX_PACKET_BYTES // 8] * MAX_GROUP  # claims 1 GiB of records
    fields = [*small_fields()[:7], bytes(32), lengths]
    header = msgpack.packb(fields, use_bin_type=True)
    data = b"\x9a" + header[1:] + b"\xc6\x40\x00\x00\x00"
    tracemalloc.start()
    try:
        with pytest.raises(PacketError, match="too few"):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # of which msgpack's packer takes 256 KiB each time
    finally:
        tracemalloc.stop()
