"""Everybody draws the same rows, and no row is drawn more often than another."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.draw import draw

VECTORS = json.loads((Path(__file__).parent.parent / "proto" / "vectors" / "draws.json").read_text())
RUN, AUTHOR = bytes(range(16)), bytes.fromhex("002408011220") + bytes(range(32))
U64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['round']}/{vector['slot']}")
def test_the_code_agrees_with_the_test_vectors(vector: dict[str, str | int]) -> None:
    run_id, author = (bytes.fromhex(str(vector[name])) for name in ("run_id", "author"))
    round_, slot, rows = (int(vector[name]) for name in ("round", "slot", "rows"))
    assert draw(run_id, author, round_, slot, rows) == vector["row"]


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=38, max_size=38), U64, U64, st.integers(1, 10**9))
def test_the_row_is_the_specified_one(run_id: bytes, author: bytes, round_: int, slot: int, rows: int) -> None:
    message = run_id + author + round_.to_bytes(8, "big") + slot.to_bytes(8, "big")
    assert draw(run_id, author, round_, slot, rows) == int(hashlib.sha256(message).hexdigest()[:16], 16) % rows < rows


def test_rows_are_drawn_evenly() -> None:
    rows, per_row = 97, 200
    counts = Counter(draw(RUN, AUTHOR, n // 8, n % 8, rows) for n in range(rows * per_row))
    # 96 degrees of freedom: mean 96, standard deviation 13.9. The draw is fixed, so this cannot flicker.
    chi_square = sum((counts[row] - per_row) ** 2 / per_row for row in range(rows))
    assert 55 < chi_square < 147


def test_author_round_and_slot_each_change_the_draw() -> None:
    parts = [(RUN, AUTHOR, *numbers) for numbers in ((1, 2), (2, 2), (1, 3), (2, 1))]
    parts += [(RUN, AUTHOR[:-1] + b"x", 1, 2), (RUN[:-1] + b"x", AUTHOR, 1, 2)]
    assert len({draw(*one, 10**9) for one in parts}) == 6


def test_another_process_draws_the_same_rows() -> None:
    code = f"from ftis_node.draw import draw;print([draw({RUN!r}, {AUTHOR!r}, n, n % 5, 7473) for n in range(50)])"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env={"PYTHONHASHSEED": "12345"})
    assert json.loads(printed) == [draw(RUN, AUTHOR, n, n % 5, 7473) for n in range(50)]


@pytest.mark.parametrize(("round_", "slot", "rows"), [(-1, 0, 5), (0, 2**64, 5), (2**64, 0, 5), (0, 0, 0)])
def test_a_draw_out_of_range_is_a_value_error(round_: int, slot: int, rows: int) -> None:
    with pytest.raises(ValueError):
        draw(RUN, AUTHOR, round_, slot, rows)
