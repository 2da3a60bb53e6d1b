"""The records that this node keeps for the DHT: a few under each key; those of strangers make room first."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from hivemind.dht.validation import DHTRecord

from ftis_node.swarm.bounded import Bounded
from ftis_node.swarm.wire.dht_limits import DEPTHS, MAX_RECORDS
from ftis_node.swarm.wire.records import OwnerSigned

MAX_KEYS = 128  # 64 records of at most 1.2 KB each: at most 10 MB
OTHERS_MAX = 256  # records of other runs


class Shelf:
    """Valid records by key and owner, until they expire.

    Keys are free, so an attacker can fill a key with records of useless peers. A record of a peer in this node's view
    displaces a stranger's; a stranger's displaces none of the view.

    Records of other runs have little room of their own: for nodes that know nobody of their run but this one.
    """

    def __init__(self, validator: OwnerSigned, known: Callable[[bytes], bool]) -> None:
        """
        Args:
            known: returns whether this 38-byte peer id is in the node's view.
        """
        self._validator = validator
        self._known = known
        self._shelves: dict[bytes, dict[bytes, DHTRecord]] = {}
        self._others = Bounded[tuple[bytes, bytes], DHTRecord](OTHERS_MAX)  # by owner and key

    def keep(self, record: DHTRecord, caller: bytes) -> bool:
        """Keep a caller's own record. Return whether the key had room; a full one may have kept it nevertheless."""
        if self._validator.signer(record) != caller:
            return False
        if not self._validator.ours(record.key, caller):
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
        if place in self._others or sum(owner == caller for owner, _ in self._others) < len(DEPTHS):
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
        kept = {owner: record for shelf in self._shelves.values() for owner, record in shelf.items()}
        return {owner: self._validator.addresses(record) for owner, record in kept.items()}

    def _has_shelf(self, key: bytes, caller: bytes) -> bool:
        """Whether there is a shelf for this key, or room for one. Keys are free, so a shelf of strangers makes room.
        One with a record of the view makes room only for a peer of the view."""
        if key in self._shelves or len(self._shelves) < MAX_KEYS:
            return True
        for shelf in self._shelves.values():
            _expire(shelf)
        idle = [other for other, shelf in self._shelves.items() if not any(map(self._known, shelf))]
        if not idle and not self._known(caller):
            return False
        del self._shelves[random.choice(idle or list(self._shelves))]
        return True

    def _make_room(self, shelf: dict[bytes, DHTRecord], caller: bytes) -> bool:
        strangers = [owner for owner in shelf if not self._known(owner)]
        if not strangers and not self._known(caller):
            return False
        del shelf[random.choice(strangers or list(shelf))]
        return True


def _expire(shelf: dict[Any, DHTRecord]) -> None:
    now = time.time()
    for place in [place for place, record in shelf.items() if record.expiration_time < now]:
        del shelf[place]
