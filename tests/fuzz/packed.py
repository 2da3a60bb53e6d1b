"""How to change a packet or an announcement: one of its fields, and then what others must be for it to get far."""

import random
import struct
from collections.abc import Callable
from typing import Any

import msgpack
from msgspec.structs import replace

from ftis_node.config.run import Run
from ftis_node.packet import MSGPACK_ERRORS, author_digest
from ftis_node.swarm.announcement import decode_announcement
from ftis_node.swarm.signed import Malformed
from tests.fuzz.changes import LOGPROBS, any_integer, raw
from tests.fuzz.world import AUTHOR, CONTEXTS, IDENTITIES, NOW, PEERS, TEXT, TURNS, drawn_digest


def other(value: Any, rng: random.Random) -> Any:
    """A value like this one, or one of another type."""
    if rng.random() < 0.05:
        return rng.choice((None, True, b"", [], {}, "text", 1.5, [[]], msgpack.ExtType(64, b"\x90"), -1))
    if isinstance(value, bytes):
        return raw(value, rng)
    if isinstance(value, str):
        return raw(value.encode(), rng).decode("utf-8", "ignore")
    if isinstance(value, int):
        return any_integer(rng)
    if isinstance(value, list):
        return _other_list(value, rng)
    return value


def _other_list(values: list[Any], rng: random.Random) -> list[Any]:
    if not values:
        return [0]
    place, values = rng.randrange(len(values)), list(values)
    match rng.randrange(6):
        case 0:
            del values[place]
        case 1:
            values.insert(place, values[rng.randrange(len(values))])
        case 2:
            second = rng.randrange(len(values))
            values[place], values[second] = values[second], values[place]
        case _:
            values[place] = other(values[place], rng)
    return values


def _spelled(value: Any, rng: random.Random) -> bytes:
    """msgpack, now and then with a longer prefix than need be."""
    if rng.random() < 0.99:
        packed: bytes = msgpack.packb(value)
        return packed
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, list):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(_spelled(item, rng) for item in value)
    if type(value) is int and 0 <= value < 1 << 64:
        return b"\xcf" + struct.pack(">Q", value)
    return _spelled(value, rng)


def _fields(data: bytes, count: int) -> list[Any] | None:
    """The fields of a msgpack array of so many; None of other bytes."""
    try:
        fields = msgpack.unpackb(data, strict_map_key=False)
    except MSGPACK_ERRORS:
        return None
    return fields if isinstance(fields, list) and len(fields) == count else None


def _written(head: bytes, fields: list[Any], data: bytes, rng: random.Random) -> bytes:
    """The packet of these fields; where they cannot be spelled, the old one with plain bytes changed."""
    try:
        return head + b"".join(_spelled(field, rng) for field in fields)
    except MSGPACK_ERRORS:
        return raw(data, rng)


def packet(data: bytes, rng: random.Random) -> bytes:
    """A packet with some field changed, and most of what follows from the others put right again."""
    fields = next((found for count in _KINDS if (found := _fields(data, count)) is not None), None)
    if fields is None or rng.random() < 0.1:
        return raw(data, rng)
    places, records, put_right = _KINDS[len(fields)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.choice(places)
        fields[place] = _records(fields[place], rng) if place == records else other(fields[place], rng)
    if rng.random() < 0.85:
        put_right(fields, rng)
    return _written(bytes([0x90 + len(fields)]), fields, data, rng)


def _of_text(fields: list[Any], rng: random.Random) -> None:
    """Pieces, text and log-probs of a packet of text mostly add up again."""
    fields[1], fields[2] = TEXT.id, author_digest(AUTHOR.author)
    if all(type(value) is int and 0 <= value < 1 << 64 for value in fields[3:5]):
        fields[6] = drawn_digest(TEXT, AUTHOR.author, fields[3], fields[4])
    _add_up(fields, rng)


def _of_turns(fields: list[Any], rng: random.Random) -> None:
    """Runs, records and given ids of a packet of turns mostly add up again."""
    lengths, turns, runs, records, given = fields[8:]
    whole = isinstance(lengths, list) and all(type(length) is int and 0 < length <= 512 for length in lengths)
    if whole and all(isinstance(part, bytes) for part in (turns, runs, records, given)):
        _put_right(fields, TURNS, rng)
        fields[9] = turns = bytes(count % 4 for count in (turns + bytes(len(lengths)))[: len(lengths)])
        fields[10] = runs = (runs + struct.pack("<II", 1, 1) * sum(turns))[: 8 * sum(turns)]
        fields[11] = (records + bytes(8) * sum(lengths))[: 8 * sum(lengths)]
        count = sum(more for _, more in struct.iter_unpack("<II", runs))
        fields[12] = (given + bytes(4) * min(count, 512))[: 4 * count]


def _add_up(fields: list[Any], rng: random.Random) -> None:
    mask, lengths, pieces, text, claims = fields[7:]
    if not isinstance(lengths, list) or not all(isinstance(part, bytes) for part in (mask, pieces, text, claims)):
        return
    if len(lengths) > 256 or not all(type(length) is int and 0 <= length <= 512 for length in lengths):
        return
    bits = int.from_bytes(mask, "little") & ((1 << len(lengths)) - 1)
    fields[7] = bits.to_bytes((len(lengths) + 7) // 8, "little")
    count = sum(lengths)
    fields[9] = pieces = (pieces + b"\1" * count)[:count]
    fields[10] = (text + b"4" * sum(pieces))[: sum(pieces)]
    size = 4 * (count + bits.bit_count())
    fields[11] = (claims + struct.pack("<f", rng.choice(LOGPROBS)) * size)[:size]


def _records(records: Any, rng: random.Random) -> Any:
    """One token of a packet changed."""
    if not isinstance(records, bytes) or len(records) < 8 or rng.random() < 0.05:
        return other(records, rng)
    start = 8 * rng.randrange(len(records) // 8)
    if rng.random() < 0.5:
        record = struct.pack("<I", any_integer(rng) & 0xFFFFFFFF) + records[start + 4 : start + 8]
    else:
        record = records[start : start + 4] + struct.pack("<f", rng.choice(LOGPROBS))
    return records[:start] + record + records[start + 8 :]


def _put_right(fields: list[Any], run: Run, rng: random.Random) -> None:
    """Whose it is, what it answers, and that its lengths add up."""
    round, slot, lengths = fields[3], fields[4], fields[8]
    fields[1], fields[2] = run.id, author_digest(AUTHOR.author)
    if all(type(value) is int and 0 <= value < 1 << 64 for value in (round, slot)):
        fields[6] = drawn_digest(run, AUTHOR.author, round, slot)
    if not isinstance(lengths, list) or not isinstance(fields[9], bytes) or rng.random() < 0.05:
        return
    if len(lengths) <= 256 and all(type(length) is int and 1 <= length <= 512 for length in lengths):
        size = 8 * sum(lengths)
        fields[9] = (fields[9] * (size // max(1, len(fields[9])) + 1))[:size]
        mask = fields[7] if isinstance(fields[7], bytes) else b""
        bits = int.from_bytes(mask, "little") & ((1 << len(lengths)) - 1)
        fields[7] = bits.to_bytes((len(lengths) + 7) // 8, "little")


def announcement(data: bytes, rng: random.Random) -> bytes:
    """An announcement with some field changed, and mostly signed again by its author."""
    fields = _fields(data, 8)
    if fields is None or rng.random() < 0.1:
        return raw(data, rng)
    place = rng.choice((1, 2, 3, 4, 5, 6, 6, 6, 6, 7))
    if place == 5 and rng.random() < 0.5:
        fields[5] = NOW + rng.choice((-10801, -10800, 10800, 10801, 0))
    elif place == 2 and rng.random() < 0.8:
        fields[2] = rng.choice(PEERS).author
    elif place == 1 and rng.random() < 0.5:
        fields[1] = rng.choice(CONTEXTS).run.id
    else:
        fields[place] = other(fields[place], rng)
    try:
        changed = b"\x98" + b"".join(_spelled(field, rng) for field in fields)
    except MSGPACK_ERRORS:
        return raw(data, rng)
    return _signed(changed) if rng.random() < 0.85 else changed


def _signed(data: bytes) -> bytes:
    """With its author's signature, if it is an announcement of somebody whose key is known here."""
    try:
        made = decode_announcement(data, max_packets=1 << 12)
    except Malformed:
        return data
    who = IDENTITIES.get(made.author)
    return replace(made, signature=who.sign(made.signed_bytes())).encode() if who is not None else data


# By the number of its fields: those that are changed, the one that is records, and what puts the others right.
_KINDS: dict[int, tuple[tuple[int, ...], int | None, Callable[[list[Any], random.Random], None]]] = {
    10: (
        (1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9, 9, 9),
        9,
        lambda fields, rng: _put_right(fields, rng.choice(CONTEXTS).run, rng),
    ),
    12: ((1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9, 10, 10, 11, 11), None, _of_text),
    13: ((3, 4, 5, 7, 8, 8, 9, 9, 10, 10, 10, 11, 11, 12, 12), 11, _of_turns),
}
