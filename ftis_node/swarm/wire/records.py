"""DHT records: small, signed, short-lived hints about the addresses of a run's nodes, their keys and their shelf."""

import functools
import hashlib
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from msgspec import Meta

from ftis_node.swarm.addresses import peer_at
from ftis_node.swarm.identity import Identity, OfPeer, author_of, verify
from ftis_node.swarm.limits import Bounded
from ftis_node.swarm.signed import Malformed, decode
from ftis_node.swarm.wire.dht_limits import DEPTHS, MAX_RECORDS

MAX_VALUE_BYTES = 1024
MAX_SUBKEY_BYTES = 128
MAX_LIFETIME = 600.0
MAX_ADDRESSES = 8
MAX_ANSWER_BYTES = MAX_RECORDS * (MAX_VALUE_BYTES + MAX_SUBKEY_BYTES + 32)
MAX_KEYS = 128  # kept: 64 records of at most 1.2 KB each: at most 10 MB
OTHERS_MAX = 256  # records of other runs that are kept
_CONTEXT = b"ftis/record/1"
_SIGNATURE_BYTES = 64

_Addresses = Annotated[list[Any], Meta(max_length=MAX_ADDRESSES)]
_Rows = Annotated[list[tuple[bytes, bytes, Any]], Meta(max_length=MAX_RECORDS)]
"""Subkey, value and time of each record in an answer."""


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
    return msgspec.msgpack.encode(addresses[:MAX_ADDRESSES])


def unpack_addresses(value: bytes) -> list[str]:
    """Read the output of `pack_addresses`. Raises Malformed."""
    addresses = decode(value, _Addresses, MAX_VALUE_BYTES, "a list of addresses")
    return [address for address in addresses if isinstance(address, str)]


def pack_answer(records: Sequence[DHTRecord]) -> bytes:
    """Pack the records of one key for the answer to a look-up."""
    some = records[:MAX_RECORDS]
    rows = [[record.subkey, record.value, record.expiration_time] for record in some]
    return msgspec.msgpack.encode(rows)


def unpack_answer(key: bytes, answer: bytes) -> list[DHTRecord]:
    """Read the output of `pack_answer` without validation; empty if it is malformed or has over 64 records."""
    try:
        rows = decode(answer, _Rows, MAX_ANSWER_BYTES, "an answer of the DHT")
    except Malformed:
        return []
    if not all(isinstance(expiration, float) for _, _, expiration in rows):
        return []
    return [DHTRecord(key, *row) for row in rows]


@dataclass
class OwnerSigned:
    """Accepts only small, short-lived records that their owner signed under its own key."""

    identity: Identity
    run_id: bytes

    def owner(self, record: DHTRecord) -> bytes | None:
        """The 38-byte peer id of the owner of a record of this run; None if the record is invalid."""
        signer = self.signer(record)
        if signer is None or not self.ours(record.key, signer):
            return None
        return signer

    def ours(self, key: bytes, owner: bytes) -> bool:
        """Whether this peer's records in this run lie under the key."""
        return key in keys_of(self.run_id, owner)

    def signer(self, record: DHTRecord) -> bytes | None:
        """The owner of a record of any run; None if it is too large, too old or too new, or not signed by its owner.
        Its key cannot be checked, for it is a hash of its run."""
        if len(record.value) > MAX_VALUE_BYTES:
            return None
        if not time.time() - 60 < record.expiration_time <= time.time() + MAX_LIFETIME:
            return None
        try:
            owner = author_of(decode(record.subkey, str, MAX_SUBKEY_BYTES, "a peer id"))
        except (Malformed, ValueError):
            return None
        message = _message(record, record.value[:-_SIGNATURE_BYTES])
        if not verify(owner, message, record.value[-_SIGNATURE_BYTES:]):
            return None
        return owner

    def sign(self, shard: str, addresses: Sequence[str], lifetime: float) -> DHTRecord:
        """Sign this node's own record, valid for so many seconds."""
        unsigned = DHTRecord(
            key_bytes(self.run_id, shard),
            msgspec.msgpack.encode(self.identity.peer_id),
            msgspec.msgpack.encode(pack_addresses(addresses)),
            time.time() + lifetime,
        )
        return replace(unsigned, value=self.sign_value(unsigned))

    def addresses(self, record: DHTRecord, owner: bytes) -> list[str]:
        """The owner's own addresses in its validated record; addresses of other peers are left out."""
        try:
            packed = decode(record.value[:-_SIGNATURE_BYTES], bytes, MAX_VALUE_BYTES, "a record's value")
            return [text for text in unpack_addresses(packed) if peer_at(text) == owner]
        except Malformed:
            return []

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value of an unsigned record with this node's signature behind it."""
        return bytes(record.value + self.identity.sign(_message(record, record.value)))


def _message(record: DHTRecord, value: bytes) -> bytes:
    """What the owner of a record signs. value: the record's without its signature."""
    expiration = struct.pack(">d", record.expiration_time)
    return b"".join((_CONTEXT, record.key, record.subkey, expiration, value))


@dataclass
class Shelf:
    """Valid records by key and owner, until they expire. known: returns whether a peer (38 bytes) is in the view.

    Keys are free, so an attacker can fill a key with records of useless peers. A record of a peer in this node's view
    displaces a stranger's; a stranger's displaces none of the view.

    Records of other runs have little room of their own: for nodes that know nobody of their run but this one.
    """

    validator: OwnerSigned
    known: OfPeer

    def __post_init__(self) -> None:
        self._shelves = dict[bytes, dict[bytes, DHTRecord]]()
        self._others = Bounded[tuple[bytes, bytes], DHTRecord](OTHERS_MAX)  # by owner and key

    def keep(self, record: DHTRecord, caller: bytes) -> bool:
        """Keep a caller's own record, this node's included.

        Returns:
            Whether the key has room for another after it: where too few keepers say so, the owner also publishes under
            a key one shard deeper (`Directory`). A full key may have kept the record all the same. Of another run's
            record, and one that is refused: whether it was kept.
        """
        if self.validator.signer(record) != caller:
            return False
        if not self.validator.ours(record.key, caller):
            return self._keep_of_others(record, caller)
        if not self._has_shelf(record.key, caller):
            return False
        shelf = self._shelves.setdefault(record.key, {})
        _expire(shelf)
        room = caller in shelf or len(shelf) < MAX_RECORDS
        if room or self._make_room(shelf, caller):
            shelf[caller] = record
        return len(shelf) < MAX_RECORDS

    def _keep_of_others(self, record: DHTRecord, caller: bytes) -> bool:
        """Keep a record of another run, of one owner as many as an honest one leaves."""
        place = caller, record.key
        known = [owner for owner, _ in self._others]
        if place in self._others or known.count(caller) < len(DEPTHS):
            self._others[place] = record
        return place in self._others

    def records(self, key: bytes) -> list[DHTRecord]:
        """The records of a key, at most 64."""
        shelf = self._shelves.get(key)
        if shelf is None:
            _expire(self._others)
            return [record for (_, at), record in self._others.items() if at == key][:MAX_RECORDS]
        _expire(shelf)
        if not shelf:
            del self._shelves[key]
        return list(shelf.values())

    def addresses(self) -> dict[bytes, list[str]]:
        """The addresses in all records here, by the 38-byte peer ids of their owners."""
        kept = dict[bytes, DHTRecord]()
        for shelf in self._shelves.values():
            kept.update(shelf)
        return {owner: self.validator.addresses(record, owner) for owner, record in kept.items()}

    def _has_shelf(self, key: bytes, caller: bytes) -> bool:
        """Whether there is a shelf for this key, or room for one. Keys are free, so a shelf of strangers makes room.
        One with a record of the view makes room only for a peer of the view."""
        if key in self._shelves or len(self._shelves) < MAX_KEYS:
            return True
        for shelf in self._shelves.values():
            _expire(shelf)
        idle = [other for other, shelf in self._shelves.items() if not any(map(self.known, shelf))]
        if not idle and not self.known(caller):
            return False
        del self._shelves[random.choice(idle or list(self._shelves))]
        return True

    def _make_room(self, shelf: dict[bytes, DHTRecord], caller: bytes) -> bool:
        """Remove a record of a full shelf: a stranger's, or if there is none and the caller is of the view, any. Return
        whether there is room now."""
        strangers = [owner for owner in shelf if not self.known(owner)]
        if not strangers and not self.known(caller):
            return False
        del shelf[random.choice(strangers or list(shelf))]
        return True


def _expire(shelf: dict[Any, DHTRecord]) -> None:
    """Remove the records of which the time has passed."""
    now = time.time()
    for place in [place for place, record in shelf.items() if record.expiration_time < now]:
        del shelf[place]
