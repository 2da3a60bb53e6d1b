"""How to change an input and keep its structure, so that changes get past the first checks.

A mutator takes an input and a random generator and returns another input; of anything that it cannot read it changes
plain bytes, which the fuzzer does in turns with it.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hivemind.dht.validation import DHTRecord
from hivemind.proto import dht_pb2

from ftis_node.swarm.wire.records import OwnerSigned
from tests.fuzz.changes import LOGPROBS, Mutator, any_integer, raw
from tests.fuzz.frames import BODY_MAX, FRAMES_MAX, Frame, join, split
from tests.fuzz.packed import announcement
from tests.fuzz.world import NOW, PEERS, RUN

_RUN_JSON = """
{"run": {"hints": [] {} , : "a" \\ \\u0000 \\ud800 {question} 1e400 0x1 Infinity NaN -1 null true 99999999999999999999
"parts":2 "collaboration":"horizontal" \u2028 \u202e é 𝒳
"""
_MULTIADDR = """
/ip4/ /ip6/ /ip6zone/ /dns4/ /dns/ /dnsaddr/ /tcp/ /udp/ /quic-v1 /p2p/ /ipfs/ /p2p-circuit /unix/ /onion/ /onion3/ /ws
/http /tls /sni/ /certhash/ /garlic64/ 0 65535 65536 :: 127.0.0.1 %eth0 xn-- é \u202e . .. %00 2001:db8::1
"""


# --- protobuf ---------------------------------------------------------------------------------------------------------


def message(data: bytes, kind: type[Message], rng: random.Random) -> bytes:
    """A protobuf message with one field changed."""
    try:
        changed = kind.FromString(data)
    except DecodeError:
        return raw(data, rng)
    _change(changed, rng)
    return changed.SerializeToString()


def _change(changed: Message, rng: random.Random):
    field = rng.choice(list(changed.DESCRIPTOR.fields))
    if not field.is_repeated:
        if field.message_type is not None:
            _change(getattr(changed, field.name), rng)
        else:
            setattr(changed, field.name, _scalar(field, getattr(changed, field.name), rng))
        return
    values = getattr(changed, field.name)
    place = rng.randrange(len(values)) if values else 0
    match rng.randrange(6) if values else 0:
        case 0 if field.message_type is not None:
            _change(values.add(), rng)
        case 0:
            values.append(values[place] if values else _scalar(field, _EMPTY.get(field.type, 0), rng))
        case 1:
            del values[place]
        case 2:
            values.extend(list(values) * rng.choice((1, 2, 20)))
        case _ if field.message_type is not None:
            _change(values[place], rng)
        case _:
            values[place] = _scalar(field, values[place], rng)


_EMPTY = {FieldDescriptor.TYPE_BYTES: b"", FieldDescriptor.TYPE_STRING: ""}


def _scalar(field: FieldDescriptor, value: Any, rng: random.Random) -> Any:
    if field.name == "announcement":
        return announcement(value, rng)
    if field.name == "run_file":
        return run_file(value.encode(), rng).decode("utf-8", "ignore")
    if field.name in ("addresses", "peers"):
        return address(value.encode(), rng).decode("utf-8", "ignore")
    match field.type:
        case field.TYPE_BYTES:
            return rng.choice((b"", RUN.id, raw(value, rng), raw(value, rng)))
        case field.TYPE_STRING:
            return raw(value.encode(), rng).decode("utf-8", "ignore")
        case field.TYPE_BOOL:
            return not value
        case field.TYPE_DOUBLE:
            return rng.choice((0.0, -1.0, NOW + 1.0, NOW + 240.0, NOW + 600.0, NOW + 601.0, NOW - 61.0, *LOGPROBS))
        case field.TYPE_ENUM | field.TYPE_INT32:
            return rng.choice((0, 1, 2, 3, -1))
        case field.TYPE_UINT32:
            return any_integer(rng) & 0xFFFFFFFF
        case _:
            return any_integer(rng) & 0xFFFFFFFFFFFFFFFF


def frames(kinds: Sequence[type[Message] | None]) -> Mutator:
    """The mutator of conversations whose frames are of these messages, None for plain bytes."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        parts = split(data)
        if not parts:
            return raw(data, rng)
        place = rng.randrange(len(parts))
        frame = parts[place]
        match rng.randrange(10):
            case 0:
                del parts[place]
            case 1 if len(parts) < FRAMES_MAX:
                parts.insert(rng.randrange(len(parts) + 1), frame)
            case 2:
                parts[place] = replace(frame, peer=rng.randrange(16))
            case 3:
                parts[place] = replace(frame, kind=rng.randrange(len(kinds)))
            case _:
                kind = kinds[frame.kind % len(kinds)]
                body = raw(frame.body, rng) if kind is None else message(frame.body, kind, rng)
                parts[place] = Frame(frame.kind, frame.peer, body[:BODY_MAX])
        return join(parts)

    return mutate


def record(data: bytes, rng: random.Random) -> bytes:
    """A store request of the DHT, mostly signed again by those in whose name it is."""
    try:
        request = dht_pb2.StoreRequest.FromString(message(data, dht_pb2.StoreRequest, rng))
    except DecodeError:
        return raw(data, rng)
    rows = zip(request.keys, request.subkeys, list(request.values), request.expiration_time, strict=False)
    for place, row in enumerate(rows):
        made = DHTRecord(*row)
        owner = next((peer for peer in PEERS if peer.peer_id.encode() in made.subkey), None)
        if owner is not None and rng.random() < 0.7:
            signer = OwnerSigned(owner, RUN.id)
            request.values[place] = signer.sign_value(replace(made, value=made.value[:-64]))
    return bytes(request.SerializeToString())


# --- texts ------------------------------------------------------------------------------------------------------------


def _text(tokens: Sequence[str]) -> Mutator:
    words = [token.encode() for token in tokens]

    def mutate(data: bytes, rng: random.Random) -> bytes:
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((0, 0, 1, 4, 16)))
        word = rng.choice(words)
        times = rng.choice((1, 1, 1, 2, 50, 2000))
        return data[:start] + word * times + data[end:]

    return mutate


run_file = _text([*_RUN_JSON.split(), "\n", " ", "\t", '"'])
address = _text([*_MULTIADDR.split(), "\n", " ", PEERS[2].peer_id])
reply = _text([*"([{)]}-9*'_j,", "set()", "\\N{DASH}", "1e9", "9" * 5000])
