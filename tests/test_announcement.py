"""An announcement says who made what, and only its author could have said it."""

import json
from operator import attrgetter
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.packet import MAX_PACKET_BYTES
from ftis_node.swarm.announcement import PacketRef, announce, decode_announcement
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.signed import Malformed

VECTORS = json.loads((Path(__file__).parent.parent / "proto" / "vectors" / "announcements.json").read_text())
IDENTITY = Identity(bytes(range(32)))
U64 = st.integers(0, 2**64 - 1)
REF = st.builds(
    PacketRef,
    st.integers(0, 2**32 - 1),
    st.binary(min_size=32, max_size=32),
    st.integers(1, MAX_PACKET_BYTES),
    st.integers(0, 2**16 - 1),
)


def sample(**changes):
    fields = {
        "run_id": bytes(16),
        "round": 5,
        "policy_step": 12,
        "issued_at": 1_760_000_000,
        "packets": [PacketRef(0, bytes(32), 24_000, 1), PacketRef(3, b"\x01" * 32, 200, 1)],
    }
    return announce(IDENTITY, **(fields | changes))


@pytest.mark.parametrize("vector", VECTORS["accepted"], ids=lambda vector: vector["name"])
def test_the_code_agrees_with_the_test_vectors(vector):
    packets = []
    for ref in vector["packets"]:
        packets.append(PacketRef(ref["slot"], bytes.fromhex(ref["sha256"]), ref["size"], ref["right"]))
    made = announce(
        Identity(bytes.fromhex(vector["seed"])),
        run_id=bytes.fromhex(vector["run_id"]),
        round=vector["round"],
        policy_step=vector["policy_step"],
        issued_at=vector["issued_at"],
        packets=packets,
    )
    assert made.author.hex() == vector["author"]
    assert made.signed_bytes().hex() == vector["signed_bytes"]
    assert made.signature.hex() == vector["signature"]
    assert made.encode().hex() == vector["announcement"]
    assert decode_announcement(bytes.fromhex(vector["announcement"]), max_packets=64) == made


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["why"])
def test_the_refused_test_vectors_are_refused(vector):
    data = bytes.fromhex(vector["announcement"])
    try:
        accepted = decode_announcement(data, max_packets=64).verify()
    except Malformed:
        accepted = False
    assert not accepted


@given(
    run_id=st.binary(min_size=16, max_size=16),
    round=U64,
    policy_step=U64,
    issued_at=U64,
    packets=st.lists(REF, min_size=1, max_size=8, unique_by=attrgetter("slot")),
)
def test_every_announcement_survives_the_round_trip_and_verifies(packets, **fields):
    made = sample(**fields, packets=sorted(packets, key=attrgetter("slot")))
    back = decode_announcement(made.encode(), max_packets=8)
    assert back == made
    assert back.verify()


BAD_REFS = [
    [(1, 32, 5, 1)] * 2,
    [(2, 32, 5, 1), (1, 32, 5, 1)],
    [(2**32, 32, 5, 1)],
    [(0, 31, 5, 1)],
    [(0, 32, 0, 1)],
    [(0, 32, MAX_PACKET_BYTES + 1, 1)],
    [(0, 32, 5, -1)],
    [(0, 32, 5, 2**16)],
    [],
]
CHANGES = [
    {"run_id": bytes(15)},
    {"round": -1},
    {"policy_step": 2**64},
    {"issued_at": 1.5},
]
for refs in BAD_REFS:
    CHANGES.append({"packets": [PacketRef(slot, bytes(size), *numbers) for slot, size, *numbers in refs]})


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_what_others_would_refuse_is_not_announced(changes):
    with pytest.raises(Malformed):
        sample(**changes)


def listed(slot=0, sha256=bytes(32), size=5, right=1):
    return [slot, sha256, size, right]


PACKETS = [
    [],
    {},
    None,
    listed(),
    [listed()[:3]],
    [[*listed(), 1]],
    [listed(sha256="x" * 32)],
    [listed(slot=True)],
    [listed(size=5.0)],
    [listed(size=MAX_PACKET_BYTES + 1)],
    [listed(right=True)],
    [listed(right=2**16)],
    [listed(slot=1), listed()],
    [listed(), listed()],
    [listed(slot) for slot in range(9)],
]
WRONG = [
    [3, 1, True],
    [bytes(17), "x" * 16],
    [bytes(38), b"", None],
    [-1, 5.0],
    [None],
    [[1]],
    PACKETS,
    [bytes(63), bytes(65)],
]


@pytest.mark.parametrize(("position", "value"), [(place, one) for place, values in enumerate(WRONG) for one in values])
def test_a_field_of_the_wrong_type_or_range_is_refused(position, value):
    changed = msgpack.unpackb(sample().encode())
    changed[position] = value
    with pytest.raises(Malformed):
        decode_announcement(msgpack.packb(changed), max_packets=8)


DATA = sample().encode()
BOMBS = [b"\x98" + b"\x91" * 400, b"\x98" * 300, b"\xdd\xff\xff\xff\xff", b"\x98\xc6\xff\xff\xff\xff", bytes(10**6)]
BOMBS += [DATA[:60] + b"\x05\x0c\x0c" + array + b"\xff" * 4 for array in (b"\xdd", b"\xdf", b"\xc6")]


@pytest.mark.parametrize("damaged", [*BOMBS, *(DATA[:end] for end in range(len(DATA))), DATA + b"\0", DATA + DATA])
def test_bombs_and_what_is_cut_or_extended_are_refused(damaged):
    with pytest.raises(Malformed):
        decode_announcement(damaged, max_packets=8)


def test_more_packets_than_the_receiver_allows_are_refused():
    data = sample().encode()
    decode_announcement(data, max_packets=2)
    with pytest.raises(Malformed, match="no more than 208 bytes"):
        decode_announcement(data, max_packets=1)
    short = sample(packets=[PacketRef(slot, bytes(32), 5, 1) for slot in range(3)]).encode()
    with pytest.raises(Malformed, match="at most 2"):
        decode_announcement(short, max_packets=2)
