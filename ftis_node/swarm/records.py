"""DHT records: small, signed, short-lived hints about where a run's nodes may be dialled."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.serializer import MSGPackSerializer

from ftis_node.packet import MSGPACK_ERRORS
from ftis_node.swarm.identity import Identity, author_of, verify

MAX_VALUE_BYTES = 1024
MAX_LIFETIME = 600.0
MAX_ADDRESSES = 8
MAX_NESTING = 4
MAX_LIST = 4096  # records under one key, at most
_CONTEXT = b"ftis/record/1"
_SIGNATURE_BYTES = 64


def record_key(run_id: bytes) -> str:
    """The DHT key under which a run's nodes leave their addresses; the subkey is the peer id."""
    return f"ftis/1/{run_id.hex()}"


def pack_addresses(addresses: Sequence[str]) -> bytes:
    """A record's value: up to eight multiaddrs."""
    packed: bytes = msgpack.packb(list(addresses[:MAX_ADDRESSES]))
    return packed


def unpack_addresses(value: object) -> list[str]:
    """What `pack_addresses` packed; whatever else somebody stored gives an empty list."""
    if not isinstance(value, bytes) or len(value) > MAX_VALUE_BYTES:
        return []
    try:
        addresses = msgpack.unpackb(value)
    except MSGPACK_ERRORS:
        return []
    if not isinstance(addresses, list) or len(addresses) > MAX_ADDRESSES:
        return []
    return [address for address in addresses if isinstance(address, str) and len(address) <= 256]


class OwnerSigned(RecordValidatorBase):  # type: ignore[misc]
    """Accepts only records of this run, under the owner's peer id as subkey, signed by it, small and short-lived."""

    def __init__(self, identity: Identity, run_id: bytes) -> None:
        self._identity = identity
        self._key = DHTID.generate(source=record_key(run_id)).to_bytes()

    def validate(self, record: DHTRecord) -> bool:
        if record.key != self._key or len(record.value) > MAX_VALUE_BYTES or len(record.subkey) > 128:
            return False
        if not time.time() - 60 < record.expiration_time <= time.time() + MAX_LIFETIME:
            return False
        try:
            owner = author_of(str(msgpack.unpackb(record.subkey)))
        except MSGPACK_ERRORS:
            return False
        value, signature = record.value[:-_SIGNATURE_BYTES], record.value[-_SIGNATURE_BYTES:]
        return verify(owner, _message(record, value), signature)

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value + self._identity.sign(_message(record, record.value)))

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value[:-_SIGNATURE_BYTES])


def _message(record: DHTRecord, value: bytes) -> bytes:
    return b"".join((_CONTEXT, record.key, record.subkey, struct.pack(">d", record.expiration_time), value))


class _Depth:
    """How deep hivemind's serialiser is in values within values right now; the DHT decodes in one thread only."""

    now = 0


_decode = MSGPackSerializer._decode_ext_types.__func__
_TUPLE = MSGPackSerializer._TUPLE_EXT_TYPE_CODE


def _decode_bounded(cls: type[MSGPackSerializer], type_code: int, data: bytes) -> object:
    """hivemind decodes a DHT dictionary before anybody validates it, and each level within takes C stack: one message
    of 1 KB, nested 200 deep, would end the process. A record of ours nests two deep."""
    if _Depth.now >= MAX_NESTING:
        raise ValueError(f"a DHT value nests more than {MAX_NESTING} deep")
    _Depth.now += 1
    try:
        return tuple(cls.loads(data)) if type_code == _TUPLE else _decode(cls, type_code, data)
    finally:
        _Depth.now -= 1


def _loads_bounded(cls: type[MSGPackSerializer], data: bytes) -> object:
    """msgpack makes a list as long as its header says before it reads it, up to the bytes of the message, and a
    thousand of them within one another: 16 KB took a quarter of a second and 200 MB."""
    most = min(len(data), MAX_LIST)
    return msgpack.unpackb(data, ext_hook=cls._decode_ext_types, raw=False, max_array_len=most, max_map_len=most)


MSGPackSerializer._decode_ext_types = classmethod(_decode_bounded)
MSGPackSerializer.loads = classmethod(_loads_bounded)
