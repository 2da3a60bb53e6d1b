"""DHT records: small, signed, short-lived hints about the addresses of a run's nodes, and their keys."""

from __future__ import annotations

import functools
import hashlib
import struct
import time
from collections.abc import Sequence

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.serializer import MSGPackSerializer

from ftis_node.packet import MSGPACK_ERRORS
from ftis_node.swarm.identity import Identity, author_of, verify
from ftis_node.swarm.wire.shards import DEPTHS, MAX_RECORDS

MAX_VALUE_BYTES = 1024
MAX_SUBKEY_BYTES = 128
MAX_LIFETIME = 600.0
MAX_ADDRESSES = 8
MAX_NESTING = 4
MAX_LIST = 4096  # longest list or map that hivemind may decode
MAX_ANSWER_BYTES = MAX_RECORDS * (MAX_VALUE_BYTES + MAX_SUBKEY_BYTES + 32)
_CONTEXT = b"ftis/record/1"
_SIGNATURE_BYTES = 64


def record_key(run_id: bytes, shard: str = "") -> str:
    """The DHT key under which nodes of a run publish their addresses; the subkey is the peer id.

    Args:
        shard: hexadecimal digits, as many as its depth.
    """
    return f"ftis/2/{run_id.hex()}/{shard}"


def key_bytes(run_id: bytes, shard: str = "") -> bytes:
    """The key as the DHT has it: 20 bytes."""
    found: bytes = DHTID.generate(source=record_key(run_id, shard)).to_bytes()
    return found


def shard_of(author: bytes, depth: int) -> str:
    """The shard of this depth that a peer belongs to: the first digits of the SHA-256 of its 38-byte peer id."""
    return hashlib.sha256(author).hexdigest()[:depth]


@functools.lru_cache(maxsize=1024)
def keys_of(run_id: bytes, author: bytes) -> frozenset[bytes]:
    """The keys under which a peer's record may lie, one per depth."""
    return frozenset(key_bytes(run_id, shard_of(author, depth)) for depth in DEPTHS)


def pack_addresses(addresses: Sequence[str]) -> bytes:
    """A record's value: up to eight multiaddrs."""
    packed: bytes = msgpack.packb(list(addresses[:MAX_ADDRESSES]))
    return packed


def unpack_addresses(value: object) -> list[str]:
    """Read the output of `pack_addresses`; any other value gives an empty list."""
    if not isinstance(value, bytes) or len(value) > MAX_VALUE_BYTES:
        return []
    try:
        addresses = msgpack.unpackb(value)
    except MSGPACK_ERRORS:
        return []
    if not isinstance(addresses, list) or len(addresses) > MAX_ADDRESSES:
        return []
    return [address for address in addresses if isinstance(address, str) and len(address) <= 256]


def pack_answer(records: Sequence[DHTRecord]) -> bytes:
    """Pack the records of one key for the answer to a look-up."""
    packed: bytes = msgpack.packb([[r.subkey, r.value, r.expiration_time] for r in records[:MAX_RECORDS]])
    return packed


def unpack_answer(key: bytes, answer: bytes) -> list[DHTRecord]:
    """Read the output of `pack_answer` without validation; empty if it is malformed or has over 64 records."""
    if len(answer) > MAX_ANSWER_BYTES:
        return []
    try:
        rows = msgpack.unpackb(
            answer, max_array_len=MAX_RECORDS, max_bin_len=MAX_VALUE_BYTES, max_str_len=0, max_map_len=0, max_ext_len=0
        )
        return [_read(key, *row) for row in rows]
    except MSGPACK_ERRORS:
        return []


def _read(key: bytes, subkey: object, value: object, expiration: object) -> DHTRecord:
    if not (isinstance(subkey, bytes) and isinstance(value, bytes) and isinstance(expiration, float)):
        raise TypeError("a record has a subkey, a value and a time")
    return DHTRecord(key, subkey, value, expiration)


class OwnerSigned(RecordValidatorBase):  # type: ignore[misc]
    """Accepts only small, short-lived records of this run that their owner signed under its own key."""

    def __init__(self, identity: Identity, run_id: bytes) -> None:
        self._identity = identity
        self._run_id = run_id

    def owner(self, record: DHTRecord) -> bytes | None:
        """The 38-byte peer id of the record's owner; None if the record or its signature is invalid."""
        if len(record.value) > MAX_VALUE_BYTES or len(record.subkey) > MAX_SUBKEY_BYTES:
            return None
        if not time.time() - 60 < record.expiration_time <= time.time() + MAX_LIFETIME:
            return None
        try:
            owner = author_of(str(msgpack.unpackb(record.subkey)))
        except MSGPACK_ERRORS:
            return None
        value, signature = record.value[:-_SIGNATURE_BYTES], record.value[-_SIGNATURE_BYTES:]
        if not verify(owner, _message(record, value), signature) or record.key not in keys_of(self._run_id, owner):
            return None
        return owner

    def validate(self, record: DHTRecord) -> bool:
        return self.owner(record) is not None

    def sign(self, shard: str, addresses: Sequence[str], lifetime: float) -> DHTRecord:
        """Sign this node's own record, valid for so many seconds."""
        key, subkey = key_bytes(self._run_id, shard), MSGPackSerializer.dumps(self._identity.peer_id)
        value = MSGPackSerializer.dumps(pack_addresses(addresses))
        unsigned = DHTRecord(key, subkey, value, time.time() + lifetime)
        return DHTRecord(key, subkey, self.sign_value(unsigned), unsigned.expiration_time)

    def addresses(self, record: DHTRecord) -> list[str]:
        """The owner's own addresses in a validated record; addresses of other peers are left out."""
        try:
            ends = f"/p2p/{msgpack.unpackb(record.subkey)}"
            found = unpack_addresses(MSGPackSerializer.loads(self.strip_value(record)))
        except MSGPACK_ERRORS:
            return []
        return [text for text in found if text.endswith(ends)]

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value + self._identity.sign(_message(record, record.value)))

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value[:-_SIGNATURE_BYTES])


def _message(record: DHTRecord, value: bytes) -> bytes:
    return b"".join((_CONTEXT, record.key, record.subkey, struct.pack(">d", record.expiration_time), value))


class _Depth:
    """The present nesting depth of hivemind's serialiser; the DHT decodes in one thread only."""

    now = 0


_decode = MSGPackSerializer._decode_ext_types.__func__
_TUPLE = MSGPackSerializer._TUPLE_EXT_TYPE_CODE


def _decode_bounded(cls: type[MSGPackSerializer], type_code: int, data: bytes) -> object:
    """Decode with bounded nesting. hivemind decodes a DHT dictionary before validation, and each level takes C stack.
    One message of 1 KB, nested 200 deep, would end the process. Our records nest two deep."""
    if _Depth.now >= MAX_NESTING:
        raise ValueError(f"a DHT value nests more than {MAX_NESTING} deep")
    _Depth.now += 1
    try:
        return tuple(cls.loads(data)) if type_code == _TUPLE else _decode(cls, type_code, data)
    finally:
        _Depth.now -= 1


def _loads_bounded(cls: type[MSGPackSerializer], data: bytes) -> object:
    """Decode with bounded lists. msgpack allocates a list of the length in its header before it reads it, up to the
    bytes of the message, and a thousand may nest: 16 KB took a quarter of a second and 200 MB."""
    most = min(len(data), MAX_LIST)
    return msgpack.unpackb(data, ext_hook=cls._decode_ext_types, raw=False, max_array_len=most, max_map_len=most)


MSGPackSerializer._decode_ext_types = classmethod(_decode_bounded)
MSGPackSerializer.loads = classmethod(_loads_bounded)
