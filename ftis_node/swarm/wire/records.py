"""DHT records: small, signed, short-lived hints about the addresses of a run's nodes, and their keys."""

from __future__ import annotations

import functools
import hashlib
import struct
import time
from collections.abc import Sequence

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord

from ftis_node.packet import MSGPACK_ERRORS
from ftis_node.swarm.identity import Identity, author_of, verify
from ftis_node.swarm.wire.dht_limits import DEPTHS, MAX_RECORDS

MAX_VALUE_BYTES = 1024
MAX_SUBKEY_BYTES = 128
MAX_LIFETIME = 600.0
MAX_ADDRESSES = 8
MAX_ANSWER_BYTES = MAX_RECORDS * (MAX_VALUE_BYTES + MAX_SUBKEY_BYTES + 32)
_CONTEXT = b"ftis/record/1"
_SIGNATURE_BYTES = 64


def key_bytes(run_id: bytes, shard: str = "") -> bytes:
    """The DHT key, 20 bytes, under which nodes of a run publish their addresses; the subkey is the peer id.

    Args:
        shard: hexadecimal digits, as many as its depth.
    """
    found: bytes = DHTID.generate(source=f"ftis/2/{run_id.hex()}/{shard}").to_bytes()
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


class OwnerSigned:
    """Accepts only small, short-lived records that their owner signed under its own key."""

    def __init__(self, identity: Identity, run_id: bytes) -> None:
        self._identity = identity
        self._run_id = run_id

    def owner(self, record: DHTRecord) -> bytes | None:
        """The 38-byte peer id of the owner of a record of this run; None if the record is invalid."""
        signer = self.signer(record)
        return signer if signer is not None and self.ours(record.key, signer) else None

    def ours(self, key: bytes, owner: bytes) -> bool:
        """Whether this peer's records in this run lie under the key."""
        return key in keys_of(self._run_id, owner)

    def signer(self, record: DHTRecord) -> bytes | None:
        """The owner of a record of any run. Its key cannot be checked, for it is a hash of its run."""
        if len(record.value) > MAX_VALUE_BYTES or len(record.subkey) > MAX_SUBKEY_BYTES:
            return None
        if not time.time() - 60 < record.expiration_time <= time.time() + MAX_LIFETIME:
            return None
        try:
            owner = author_of(str(msgpack.unpackb(record.subkey)))
        except MSGPACK_ERRORS:
            return None
        value, signature = record.value[:-_SIGNATURE_BYTES], record.value[-_SIGNATURE_BYTES:]
        return owner if verify(owner, _message(record, value), signature) else None

    def sign(self, shard: str, addresses: Sequence[str], lifetime: float) -> DHTRecord:
        """Sign this node's own record, valid for so many seconds."""
        key, subkey = key_bytes(self._run_id, shard), msgpack.packb(self._identity.peer_id)
        value = msgpack.packb(pack_addresses(addresses))
        unsigned = DHTRecord(key, subkey, value, time.time() + lifetime)
        return DHTRecord(key, subkey, self.sign_value(unsigned), unsigned.expiration_time)

    def addresses(self, record: DHTRecord) -> list[str]:
        """The owner's own addresses in a validated record; addresses of other peers are left out."""
        try:
            ends = f"/p2p/{msgpack.unpackb(record.subkey)}"
            value = msgpack.unpackb(record.value[:-_SIGNATURE_BYTES], max_array_len=0, max_map_len=0, max_ext_len=0)
        except MSGPACK_ERRORS:
            return []
        return [text for text in unpack_addresses(value) if text.endswith(ends)]

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value + self._identity.sign(_message(record, record.value)))


def _message(record: DHTRecord, value: bytes) -> bytes:
    return b"".join((_CONTEXT, record.key, record.subkey, struct.pack(">d", record.expiration_time), value))
