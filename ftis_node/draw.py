"""Which row of the task's data a slot must answer: everybody can compute it, so nobody chooses prompts."""

import hashlib

_U64 = 1 << 64


def draw(run_id: bytes, author: bytes, round: int, slot: int, rows: int) -> int:
    """The row, 0 ≤ row < rows: ``u64be(sha256(run id ‖ author ‖ u64be(round) ‖ u64be(slot))[:8]) mod rows``.

    `run_id` is 16 bytes, `author` the 38-byte peer id, or nothing in a horizontal run. Raises ValueError if round or
    slot is not a u64 or rows < 1.
    The modulo favours low rows by less than rows / 2^64.
    """
    if not (0 <= round < _U64 and 0 <= slot < _U64):
        raise ValueError("round and slot must be from 0 to 2^64 − 1")
    if rows < 1:
        raise ValueError("there must be at least one row to draw from")
    seed = run_id + author + round.to_bytes(8, "big") + slot.to_bytes(8, "big")
    return int.from_bytes(hashlib.sha256(seed).digest()[:8], "big") % rows
