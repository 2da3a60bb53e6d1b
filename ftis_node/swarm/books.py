"""The books on authors and holders, bounded: identities are free, so evidence decides which book makes room."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ftis_node.swarm.bounded import make_room
from ftis_node.swarm.claims import Claims

NEWCOMER_GROUPS = 20  # trained on with sound claims: from then on an author has a record
AUTHORS_MAX, HOLDERS_MAX = 2048, 1024
STRANGERS_BANNED_MAX = 1024
BAN_SECONDS = 600.0
LONGEST_BAN_SECONDS = 24 * 3600.0
FORGIVING_SECONDS = 24 * 3600.0  # after so long without another, a ban no longer makes the next one longer
STRIKES = 3  # refused packets within about an hour
STRIKE_HALF_LIFE = 3600.0
FAILURE_HALF_LIFE = 600.0
# Evidence is the count of an author's sound groups, half of it forgotten in a week: one that left makes room in time.
EVIDENCE_HALF_LIFE = 7 * 24 * 3600.0
ADMITTED_EVIDENCE = 0.01  # of a packet that has the right form


@dataclass(slots=True)
class Fading:
    """A count of which half is forgotten every `half_life` seconds."""

    half_life: float
    value: float = 0.0
    at: float = 0.0

    def add(self, now: float, amount: float = 1.0) -> float:
        """Counts something; returns what there is now."""
        self.value, self.at = self.now(now) + amount, now
        return self.value

    def now(self, now: float) -> float:
        return self.value * math.pow(0.5, (now - self.at) / self.half_life) if self.value else 0.0


@dataclass(slots=True)
class Ban:
    """until: on this node's clock (`boot_seconds`). level: how many there were lately; each makes the next one four
    times as long."""

    until: float = -math.inf
    reason: str = ""
    level: int = 0

    def extend(self, now: float, reason: str) -> None:
        self.level = self.level + 1 if now - self.until < FORGIVING_SECONDS else 1
        self.until = now + min(BAN_SECONDS * 4.0 ** (self.level - 1), LONGEST_BAN_SECONDS)
        self.reason = reason


@dataclass(slots=True)
class Author:
    """What an author signed, and what came of it. sound: groups trained on while its claims held. signal: part of its
    latest groups that had one. evidence: what keeps its book."""

    admitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    late: int = 0
    no_signal: int = 0
    signal: float = 1.0
    bytes: int = 0
    sound: int = 0
    completions: int = 0
    tokens: int = 0
    rewarded: int = 0
    reward: float = 0.0
    loss_share: float = 0.0
    claims: Claims = field(default_factory=Claims)
    strikes: Fading = field(default_factory=lambda: Fading(STRIKE_HALF_LIFE))
    pulled: Fading = field(default_factory=lambda: Fading(1.0))
    evidence: Fading = field(default_factory=lambda: Fading(EVIDENCE_HALF_LIFE))
    ban: Ban = field(default_factory=Ban)

    @property
    def has_record(self) -> bool:
        return self.sound >= NEWCOMER_GROUPS


@dataclass(slots=True)
class Holder:
    """What a peer passed on. fakes: packets that it had told it held, and had not. lies: what no honest node sends."""

    delivered: int = 0
    bytes: int = 0
    failures: int = 0
    fakes: int = 0
    lies: Counter[str] = field(default_factory=Counter)
    lately: Fading = field(default_factory=lambda: Fading(FAILURE_HALF_LIFE))  # of all three
    strikes: Fading = field(default_factory=lambda: Fading(STRIKE_HALF_LIFE))
    ban: Ban = field(default_factory=Ban)


class AuthorBooks:
    """At most `AUTHORS_MAX` books. Half of the room is for authors with a record: while they have no more than that,
    only books of others make room. The book with the least evidence goes first.

    Bans of authors without any evidence lie apart, so that throw-away keys evict one another only.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.books: dict[bytes, Author] = {}
        self.recorded: set[bytes] = set()  # authors with a record, banned or not
        self.strangers: dict[bytes, Ban] = {}
        self._clock = clock

    def open(self, author: bytes) -> Author:
        """The author's book, a new one if there is none."""
        found = self.books.get(author)
        if found is None:
            if len(self.books) >= AUTHORS_MAX:
                crowded = len(self.recorded) > AUTHORS_MAX // 2
                self._close(self._least(self.recorded if crowded else self.books.keys() - self.recorded))
            found = self.books[author] = Author()
        return found

    def earn(self, author: bytes, groups: int) -> None:
        """So many groups of it were trained on, and its claims hold."""
        book = self.open(author)
        book.sound += groups
        book.evidence.add(self._clock(), groups)
        self.keep_record(author)

    def keep_record(self, author: bytes) -> None:
        """Notes whether the author has a record, after its book was changed."""
        if self.books[author].has_record:
            self.recorded.add(author)
        else:
            self.recorded.discard(author)

    def ban_of(self, author: bytes) -> Ban | None:
        """Its ban, past or present."""
        book = self.books.get(author)
        return book.ban if book is not None and book.ban.level else self.strangers.get(author)

    def ban(self, author: bytes, reason: str) -> None:
        """Extends its ban: in its book if there is evidence in that, otherwise among the strangers'."""
        book = self.books.get(author)
        if book is not None and (book.evidence.value >= 1.0 or book.ban.level):
            ban = book.ban
        else:
            make_room(self.strangers, author, STRANGERS_BANNED_MAX)
            ban = self.strangers.setdefault(author, Ban())
        ban.extend(self._clock(), reason)

    def take_stranger(self, author: bytes, ban: Ban) -> None:
        """Puts back a ban of an author without evidence, from an earlier life."""
        if ban.level:
            make_room(self.strangers, author, STRANGERS_BANNED_MAX)
            self.strangers[author] = ban

    def _least(self, authors: Iterable[bytes]) -> bytes:
        """The author with the least evidence; of several, a banned one last."""
        now = self._clock()
        books = self.books
        return min(authors, key=lambda author: (books[author].evidence.now(now), books[author].ban.level))

    def _close(self, author: bytes) -> None:
        del self.books[author]
        self.recorded.discard(author)


def open_holder(holders: dict[bytes, Holder], holder: bytes) -> Holder:
    """A peer's book as a holder, a new one if there is none.

    Of at most `HOLDERS_MAX`, the one that delivered least makes room; banned ones last, unless they fill half.
    """
    found = holders.get(holder)
    if found is None:
        if len(holders) >= HOLDERS_MAX:
            banned = [peer for peer, book in holders.items() if book.ban.level]
            idle = (peer for peer, book in holders.items() if not book.ban.level)
            crowded = len(banned) > HOLDERS_MAX // 2
            del holders[banned[0] if crowded else min(idle, key=lambda peer: holders[peer].delivered)]
        found = holders[holder] = Holder()
    return found


def struck_out(strikes: Fading, now: float) -> bool:
    """Counts a strike; whether it was the third, from which on counting begins anew."""
    if strikes.add(now) <= STRIKES - 0.5:
        return False
    strikes.value = 0.0
    return True
