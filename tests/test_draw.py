"""Everybody draws the same rows, and no row is drawn more often than another."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.draw import draw

VECTORS = json.loads((Path(__file__).parent.parent / "proto" / "vectors" / "draws.json").read_text())
RUN = bytes(range(16))
AUTHOR = bytes.fromhex("002408011220") + bytes(range(32))
U64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['round']}/{vector['slot']}")
def test_the_code_agrees_with_the_test_vectors(vector):
    row = draw(
        bytes.fromhex(vector["run_id"]),
        bytes.fromhex(vector["author"]),
        int(vector["round"]),
        int(vector["slot"]),
        int(vector["rows"]),
    )
    assert row == vector["row"]


@given(
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=38, max_size=38),
    U64,
    U64,
    st.integers(1, 10**9),
)
def test_the_row_is_the_specified_one(run_id, author, round_, slot, rows):
    row = draw(run_id, author, round_, slot, rows)

    message = run_id + author + round_.to_bytes(8, "big") + slot.to_bytes(8, "big")
    first = hashlib.sha256(message).digest()[:8]
    assert row == int.from_bytes(first) % rows


@pytest.mark.parametrize(
    ("round_", "slot", "rows"),
    [
        (-1, 0, 5),
        (0, 2**64, 5),
        (2**64, 0, 5),
        (0, 0, 0),
    ],
)
def test_a_draw_out_of_range_is_a_value_error(round_, slot, rows):
    with pytest.raises(ValueError):
        draw(RUN, AUTHOR, round_, slot, rows)
