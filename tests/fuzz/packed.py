"""How to change what msgpack packs, and then what others must be for it to get far."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import msgspec
import numpy as np

from ftis_node.packet import (
    Completion,
    Packet,
    PacketError,
    TextCompletion,
    decode,
    encode,
    pack_group,
    pack_text_group,
)
from ftis_node.packet.layout import MSGPACK_ERRORS
from ftis_node.swarm.announcement import decode_announcement
from ftis_node.swarm.signed import Malformed, Signed
from tests.fuzz.changes import LOGPROBS, Mutator, any_integer, raw
from tests.fuzz.world import AUTHOR, CONTEXTS, IDENTITIES, NOW, PEERS, RUN, TURNS, drawn_digest

TIMES = (-(10**6), -10801, -10800, -1, 0, 1, 10800, 10801, 10**9)  # seconds from now


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
    place = rng.randrange(len(values))
    values = list(values)
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


def changed(fields: Any, rng: random.Random) -> Any:
    """One field changed: a peer or a run by another of this world, a time by one about now, or anything."""
    if not isinstance(fields, list) or not fields:
        return other(fields, rng)
    fields = list(fields)
    place = rng.randrange(len(fields))
    value = fields[place]
    known = {len(AUTHOR.author): [peer.author for peer in PEERS], len(RUN.id): [one.run.id for one in CONTEXTS]}
    if isinstance(value, bytes) and len(value) in known and rng.random() < 0.8:
        fields[place] = rng.choice(known[len(value)])
    elif isinstance(value, int) and rng.random() < 0.3:
        fields[place] = NOW + rng.choice(TIMES)
    else:
        fields[place] = other(value, rng)
    return fields


def repacked(change: Callable[[Any, random.Random], Any]) -> Mutator:
    """The mutator of what msgpack packs. change: of the values."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        try:
            packed = msgpack.packb(change(msgpack.unpackb(data, strict_map_key=False), rng))
        except MSGPACK_ERRORS:
            return raw(data, rng)
        return packed

    return mutate


# --- what is signed ---------------------------------------------------------------------------------------------------


def signed_again(kind: type[Signed], signer: str) -> Callable[[Any, random.Random], Any]:
    """A change of a record's fields, mostly signed again by the peer whom its field `signer` names then."""

    def change(fields: Any, rng: random.Random) -> Any:
        fields = changed(fields, rng)
        try:
            made = msgspec.convert(fields, kind)
        except (msgspec.ValidationError, TypeError):
            return fields
        who = IDENTITIES.get(getattr(made, signer))
        if who is None or rng.random() < 0.1:
            return fields
        return msgspec.to_builtins(made.signed_by(who), builtin_types=(bytes,))

    return change


def announcement(data: bytes, rng: random.Random) -> bytes:
    """An announcement with some field changed, and mostly signed again by its author."""
    data = repacked(changed)(data, rng)
    try:
        made = decode_announcement(data, max_packets=1 << 12)
    except Malformed:
        return data
    who = IDENTITIES.get(made.author)
    if who is None or rng.random() < 0.15:
        return data
    return msgspec.structs.replace(made, signature=who.sign(made.signed_bytes())).encode()


# --- packets ----------------------------------------------------------------------------------------------------------


def packet(data: bytes, rng: random.Random) -> bytes:
    """A packet with one of its completions changed, which still adds up, or with some field of its msgpack changed."""
    if rng.random() < 0.4:
        return repacked(changed)(data, rng)
    try:
        made = decode(data)
        change = _of_tokens if isinstance(made, Packet) else _of_text
        completions = list(made.completions())
        place = rng.randrange(len(completions))
        match rng.randrange(8):
            case 0:
                del completions[place]
            case 1:
                completions.append(completions[place])
            case _:
                completions[place] = change(completions[place], rng)
        run = next((context.run for context in CONTEXTS if context.run.id == made.run_id), RUN)
        slot = rng.choice((made.slot, rng.randrange(run.slots + 1)))
        named = {
            "run_id": run.id,
            "author": AUTHOR.author,
            "round": made.round,
            "slot": slot,
            "policy_step": made.policy_step,
            "completions": completions,
        }
        if isinstance(made, Packet):
            again = pack_group(**named, prompt_ids=[], turns=run is TURNS)
        else:
            again = pack_text_group(**named, prompt="")
        return encode(replace(again, prompt_digest=drawn_digest(run, AUTHOR.author, made.round, slot)))
    except PacketError:
        return raw(data, rng)


def _length(length: int, rng: random.Random) -> int:
    return rng.choice((length, length, rng.randrange(length + 2)))


def _of_tokens(completion: Completion, rng: random.Random) -> Completion:
    """One with another length, another token or claim, or another end."""
    if completion.given is not None:
        ids = completion.token_ids.copy()
        ids[rng.randrange(len(ids))] = any_integer(rng) & 0xFFFFFFFF
        return replace(completion, token_ids=ids)
    length = _length(len(completion), rng)
    ids = np.resize(completion.token_ids, length)
    claims = np.resize(completion.logprobs, length)
    if length:
        ids[rng.randrange(length)] = rng.choice((any_integer(rng) & 0xFFFFFFFF, int(completion.token_ids[-1])))
        claims[rng.randrange(length)] = rng.choice((-0.5, *LOGPROBS))
    return Completion(ids, claims, completion.finished ^ (rng.random() < 0.2))


def _of_text(completion: TextCompletion, rng: random.Random) -> TextCompletion:
    """One of other pieces, claims, text or end."""
    length = _length(len(completion), rng)
    pieces = np.resize(completion.pieces, length)
    claims = np.resize(completion.logprobs, length)
    if length:
        pieces[rng.randrange(length)] = rng.choice((0, 1, 2, 255))
        claims[rng.randrange(length)] = rng.choice((-0.5, *LOGPROBS))
    size = int(pieces.sum())
    text = (raw(completion.text, rng) + b"4" * size)[:size]
    return TextCompletion(text, pieces, claims, rng.choice((None, completion.end, *LOGPROBS)))
