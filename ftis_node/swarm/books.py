"""Bounded books on authors and holders. Identities are free, so the book with the least evidence makes room."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ftis_node.host.clocks import Clock, backoff
from ftis_node.swarm.claims import Claims
from ftis_node.swarm.limits import Bounded

NEWCOMER_GROUPS = 20  # an author has a record after so many groups trained on with sound claims
AUTHORS_MAX = 2048
HOLDERS_MAX = 1024
STRANGERS_BANNED_MAX = 1024
BAN_SECONDS = 600.0
LONGEST_BAN_SECONDS = 24 * 3600.0
FORGIVING_SECONDS = 24 * 3600.0  # a ban older than this no longer lengthens the next one
STRIKES = 3  # refused packets within about an hour
STRIKE_HALF_LIFE = 3600.0
FAILURE_HALF_LIFE = 600.0
LONGEST_REST_SECONDS = 60.0  # of a holder, or an interval, if that is longer
# Evidence is the count of an author's sound groups with a half-life of a week, so an author that left makes room.
EVIDENCE_HALF_LIFE = 7 * 24 * 3600.0
ADMITTED_EVIDENCE = 0.01  # evidence of one admitted packet

Kind = TypeVar("Kind")


@dataclass(slots=True)
class Fading:
    """A count that decays with a half-life of `half_life` seconds. value: what it was at `at`, by the caller's clock,
    in seconds."""

    half_life: float
    value: float = 0.0
    at: float = 0.0

    def add(self, now: float, amount: float = 1.0) -> float:
        """Add to the count; return its present value."""
        self.value = self.now(now) + amount
        self.at = now
        return self.value

    def now(self, now: float) -> float:
        """The count at this time, which is not before the last `add`."""
        if not self.value:
            return 0.0
        return self.value * math.pow(0.5, (now - self.at) / self.half_life)


@dataclass(slots=True)
class Ban:
    """A ban. until: on this node's clock (`boot_seconds`). level: number of recent bans; each makes the next four
    times as long."""

    until: float = -math.inf
    reason: str = ""
    level: int = 0

    def now(self, now: float) -> str:
        """Its reason while it lasts, else ""."""
        if self.until <= now:
            return ""
        return self.reason

    def extend(self, now: float, reason: str) -> None:
        """Ban from now on, in place of a ban that still lasts. If the last one ended less than a day ago, this one is
        four times as long, up to a day; else it lasts ten minutes, as the first time."""
        if now - self.until < FORGIVING_SECONDS:
            self.level += 1
        else:
            self.level = 1
        self.until = now + backoff(self.level, BAN_SECONDS, LONGEST_BAN_SECONDS, 4.0)
        self.reason = reason


@dataclass(slots=True)
class Author:
    """The book on an author.

    admitted: packets. refused: packets by reason, and contradictions. late: announcements that came too late.
    no_signal: scored groups without a signal. signal: part of its latest scored groups (about 32) with one; 1 at first.
    sound: groups trained on while its claims were sound. completions, tokens: in its admitted packets. rewarded,
    reward: scored completions and the sum of their rewards. loss_share: of the loss of a step, 0 to 1, smoothed.

    strikes: refused packets that count towards a ban. pulled: packets pulled in about the time of a step; `note_pull`
    sets the half-life. evidence: decides whether the book stays.
    """

    admitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    late: int = 0
    no_signal: int = 0
    signal: float = 1.0
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
        """Whether enough groups were sound that it is no newcomer any more."""
        return self.sound >= NEWCOMER_GROUPS


@dataclass(slots=True)
class Holder:
    """The book on a holder. delivered: packets. failures: pulls that it did not answer or finish. fakes: packets that
    it announced and lacked. lies: messages that no honest node sends, by kind; strikes: those that count towards a ban.
    in_vain: pulls in a row that brought nothing."""

    delivered: int = 0
    failures: int = 0
    fakes: int = 0
    in_vain: int = 0
    lies: Counter[str] = field(default_factory=Counter)
    faults: Fading = field(default_factory=lambda: Fading(FAILURE_HALF_LIFE))  # failures, fakes and lies
    served: Fading = field(default_factory=lambda: Fading(FAILURE_HALF_LIFE))  # packets, and other answers
    strikes: Fading = field(default_factory=lambda: Fading(STRIKE_HALF_LIFE))
    ban: Ban = field(default_factory=Ban)

    def rest(self, interval: float) -> float:
        """The pause after a pull that lacked something, in seconds: an interval between exchanges, doubled for each
        further pull in a row that brought nothing, up to 60 s (or an interval, if that is longer). So a peer that
        announces much and delivers nothing costs ever less.
        """
        return backoff(max(1, self.in_vain), interval, max(LONGEST_REST_SECONDS, interval))


class Books(dict[bytes, Kind]):
    """One book for each of at most `most` peers; the worth of a book decides who makes room.

    Some books are worth keeping: of authors those with a record, of holders those with a ban. These may have half of
    the places. While they have no more, only other books make room; once they have more, only they do.

    The books on holders are a plain `Books`, which `Reputation` makes; those on authors are a subclass, `AuthorBooks`.
    """

    def __init__(
        self,
        make: Callable[[], Kind],
        most: int,
        kept: Callable[[Kind], bool],
        worth: Callable[[Kind], Any],
    ) -> None:
        """
        Args:
            make: returns an empty book.
            most: books at a time.
            kept: returns whether a book is worth keeping; it is asked again whenever room is needed.
            worth: returns what books are ordered by; of those that may have to make room, the one of least worth does.
        """
        super().__init__()
        self._make = make
        self._empty = make()
        self._most = most
        self._kept = kept
        self._worth = worth

    def of(self, peer: bytes) -> Kind:
        """The peer's book, only to read: if there is none, an empty one that all such peers share."""
        return self.get(peer, self._empty)

    def open(self, peer: bytes) -> Kind:
        """Return the peer's book to write in. If there is none, create it; in full books another makes room, which is
        searched for among all."""
        if peer not in self:
            if len(self) >= self._most:
                crowded = sum(map(self._kept, self.values())) > self._most // 2
                crowd = (one for one, book in self.items() if self._kept(book) == crowded)
                del self[min(crowd, key=lambda one: self._worth(self[one]))]
            self[peer] = self._make()
        return self[peer]


class AuthorBooks(Books[Author]):
    """The books on authors: those with a record are kept, and worth is evidence; if equal, one without a ban goes.

    Bans of authors without evidence are kept apart, so that throw-away keys evict only one another.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            Author,
            AUTHORS_MAX,
            kept=lambda book: book.has_record,
            worth=lambda book: (book.evidence.now(clock()), book.ban.level),
        )
        self.strangers = Bounded[bytes, Ban](STRANGERS_BANNED_MAX)
        self._clock = clock

    def ban_of(self, author: bytes) -> Ban:
        """The author's ban, past or present, only to read; one of level 0 if there was none."""
        ban = self.of(author).ban
        if ban.level:
            return ban
        return self.strangers.get(author, ban)

    def ban(self, author: bytes, reason: str) -> None:
        """Extend the author's ban: in its book if that has evidence, otherwise among the strangers' bans."""
        book = self.of(author)
        if book.evidence.value >= 1.0 or book.ban.level:
            ban = book.ban
        else:
            ban = self.strangers.setdefault(author, Ban())
        ban.extend(self._clock(), reason)


def struck_out(strikes: Fading, now: float) -> bool:
    """Count a strike. Return whether it was the third within about an hour; the count then restarts."""
    if strikes.add(now) <= STRIKES - 0.5:  # up to half a strike may have faded
        return False
    strikes.value = 0.0
    return True
