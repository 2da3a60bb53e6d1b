"""What a node thinks of others, by evidence of its own: of authors by what they signed, of holders by what they gave.

Forged or malformed packets and two announcements of one round are somebody's doing: they lead to a ban, a longer one
each time. What only looks wrong costs weight first. Nobody is believed because of what others say of them.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ftis_node.swarm.bounded import make_room
from ftis_node.swarm.identity import peer_id

CLAIMS, NEWCOMERS = "claims", "newcomers"
DEFENCES = (CLAIMS, NEWCOMERS)

NEWCOMER_GROUPS = 20  # trained on with sound claims: from then on an author has a record
NEWCOMERS_PART = 4  # one part in so many of a batch is for all together who have none
AUTHORS_MAX = HOLDERS_MAX = 1024
BAN_SECONDS = 600.0
LONGEST_BAN_SECONDS = 24 * 3600.0
FORGIVING_SECONDS = 24 * 3600.0  # after so long without another, a ban no longer makes the next one longer
STRIKES = 3  # refused packets within about an hour
STRIKE_HALF_LIFE = 3600.0
# How far above the highest round of an author the next may lie; once an hour further, for a node that lost its store
# begins anew at its clock's milliseconds.
ROUNDS_AHEAD = 64
ROUNDS_A_SECOND = 16.0
JUMP_SECONDS = 3600.0
HEARD_MAX = 4096  # authors whose highest round is remembered
# Of an author's claims: over how many samples the memory fades, how many say anything at all, how far above its bound a
# mean may lie for rounding's sake, and by how many standard errors it must to be doubted, and to be disproved.
FADING_SAMPLES = 1000.0
FEWEST_SAMPLES = 32.0
TOLERANCE = 0.02
DOUBTED, DISPROVED = 2.0, 3.0
FAILURE_HALF_LIFE = 600.0
# Of an author's latest groups about so many count for how much is pulled of it; if less than one in four of them has a
# signal, less is, down to one in the time of a step.
SIGNAL_GROUPS, ENOUGH_SIGNAL = 32, 0.25

logger = logging.getLogger(__name__)
_R = TypeVar("_R", "Author", "Holder")


@dataclass
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
        return self.value * math.pow(0.5, (now - self.at) / self.half_life)


@dataclass
class Claims:
    """Whether an author's tokens are as likely as it says, over about its last thousand samples.

    Tokens drawn from what is claimed have E[ρ] = 1, so the sum of min(ρ, 2) − 1 over a sample's tokens has a mean of at
    most 0. Claims that are too low, which buy weight, make it positive: by how many of its standard errors, tells.
    `surprising` tokens are those that the author claims a thousand times likelier than this node finds them; they are
    shown and not held against anybody, for a peer of another style has many.
    """

    samples: float = 0.0
    tokens: float = 0.0
    excess: float = 0.0
    squares: float = 0.0
    surprising: float = 0.0
    likelihood: float = 0.0

    def add(self, figures: Mapping[str, float]) -> None:
        """Takes in a source's figures of one step, see `Diagnostics.summary`."""
        kept = 0.5 ** (figures["samples"] / FADING_SAMPLES)
        self.samples = kept * self.samples + figures["samples"]
        self.tokens = kept * self.tokens + figures["tokens"]
        self.excess = kept * self.excess + figures["excess"]
        self.squares = kept * kept * self.squares + figures["excess_squares"]
        self.surprising = kept * self.surprising + figures["surprising"]
        self.likelihood = kept * self.likelihood + figures["likelihood"] * figures["samples"]

    @property
    def mean_weight(self) -> float:
        """Mean of min(ρ, 2) over tokens; at most 1 of honest claims."""
        return 1.0 + self.excess / self.tokens if self.tokens else 1.0

    @property
    def error(self) -> float:
        """Standard error of `mean_weight`."""
        return math.sqrt(self.squares) / self.tokens if self.tokens else 0.0

    def too_low(self, errors: float) -> bool:
        """Whether the mean lies above 1 by so many standard errors, and by more than rounding may do."""
        margin = max(TOLERANCE, errors * self.error)
        return self.samples >= FEWEST_SAMPLES and self.mean_weight > 1.0 + margin


@dataclass
class Ban:
    """until: on this node's clock. level: how many there were lately; each makes the next one four times
    as long."""

    until: float = -math.inf
    reason: str = ""
    level: int = 0

    def extend(self, now: float, reason: str) -> None:
        self.level = self.level + 1 if now - self.until < FORGIVING_SECONDS else 1
        self.until = now + min(BAN_SECONDS * 4.0 ** (self.level - 1), LONGEST_BAN_SECONDS)
        self.reason = reason


@dataclass
class Author:
    """What an author signed, and what came of it. sound: groups trained on while its claims held. signal: part of its
    latest groups that had one."""

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
    ban: Ban = field(default_factory=Ban)


@dataclass
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


class Standing:
    """The books on authors and holders, bounded; who has a record or is banned makes room last."""

    def __init__(self, clock: Callable[[], float], defences: Collection[str] = DEFENCES) -> None:
        """
        Args:
            clock: seconds, which go on while the machine sleeps (`boot_seconds`).
            defences: which of `DEFENCES` act; evidence is gathered for all.
        """
        self.authors: dict[bytes, Author] = {}
        self.holders: dict[bytes, Holder] = {}
        self.banned_author: list[Callable[[bytes], None]] = []  # told of each ban
        self._clock = clock
        self._defences = frozenset(defences)
        self._rounds: dict[bytes, tuple[int, float]] = {}  # by author: the highest heard of, and when
        self._jumped: dict[bytes, float] = {}  # when an author's rounds last began anew

    # --- authors: evidence ----------------------------------------------------------------------------------------

    def admitted(self, author: bytes, *, completions: int, tokens: int, size: int) -> None:
        """A packet of it was admitted."""
        book = self._author(author)
        book.admitted += 1
        book.completions += completions
        book.tokens += tokens
        book.bytes += size

    def refused(self, author: bytes, reason: str) -> None:
        """A packet that it signed is not as it must be; three within about an hour are a ban."""
        book = self._author(author)
        book.refused[reason] += 1
        if _struck_out(book.strikes, self._clock()):
            self.ban(author, f"{STRIKES} of its packets were refused, last: {reason}")

    def equivocated(self, author: bytes) -> None:
        """It signed two different announcements of one round, which nobody else can do for it."""
        self._author(author).refused["equivocation"] += 1
        self.ban(author, "it signed two different announcements of one round")

    def late(self, author: bytes) -> None:
        """An announcement of it came too late, which is nobody's fault."""
        self._author(author).late += 1

    def scored(self, author: bytes, rewards: Sequence[float], *, signal: bool) -> None:
        """A group of it has its rewards."""
        book = self._author(author)
        book.rewarded += len(rewards)
        book.reward += sum(rewards)
        book.no_signal += not signal
        book.signal += (signal - book.signal) / SIGNAL_GROUPS

    def trained(self, author: bytes, groups: int, figures: Mapping[str, float]) -> None:
        """A step was taken on so many of its groups.

        Args:
            figures: what `Diagnostics.summary` says of it as a source.
        """
        book = self._author(author)
        book.loss_share += 0.05 * (figures["loss_share"] - book.loss_share)
        if not figures["samples"]:
            return
        book.claims.add(figures)
        if not book.claims.too_low(DOUBTED):
            book.sound += groups
        if CLAIMS in self._defences and book.claims.too_low(DISPROVED):
            mean, error = book.claims.mean_weight, book.claims.error
            book.claims, book.sound = Claims(), 0
            self.ban(author, f"it claims too low probabilities: mean of min(ρ, 2) {mean:.3f} ± {error:.3f}, honest ≤ 1")

    def ban(self, author: bytes, reason: str) -> None:
        """Its announcements and groups are left alone: ten minutes, then four times as long each time, up to a day."""
        if self.banned(author) is None:
            logger.warning("Author %s is left alone: %s", peer_id(author), reason)
        self._author(author).ban.extend(self._clock(), reason)
        for told in self.banned_author:
            told(author)

    def follows(self, author: bytes, round: int) -> bool:
        """Whether a round may follow on the highest heard of: else an author would go and look for easy prompts."""
        now = self._clock()
        highest, at = self._rounds.get(author, (round, now))
        if round < highest:
            return True
        if round > highest + ROUNDS_AHEAD + ROUNDS_A_SECOND * (now - at):
            if now - self._jumped.get(author, -math.inf) < JUMP_SECONDS:
                return False
            make_room(self._jumped, author, HEARD_MAX)
            self._jumped[author] = now
        make_room(self._rounds, author, HEARD_MAX)
        self._rounds[author] = (round, now)
        return True

    # --- authors: verdicts ----------------------------------------------------------------------------------------

    def banned(self, author: bytes) -> str | None:
        """Why it is left alone, or None if it is not."""
        book = self.authors.get(author)
        return book.ban.reason if book is not None and book.ban.until > self._clock() else None

    def established(self, author: bytes) -> bool:
        """Whether it has a record."""
        book = self.authors.get(author)
        return book is not None and book.sound >= NEWCOMER_GROUPS and self.banned(author) is None

    def newcomers_room(self, batch: int) -> int | None:
        """Groups of a batch that all together may have who have no record; None: there is no limit, as nobody has."""
        if NEWCOMERS not in self._defences or not any(map(self.established, self.authors)):
            return None
        return max(1, batch // NEWCOMERS_PART)

    def heads(self, authors: Collection[bytes]) -> int:
        """For how many of these authors there is to be room in a batch: all, or once some have a record a third as many
        again of those who have none, for they have a quarter together."""
        known = sum(map(self.established, authors))
        if NEWCOMERS not in self._defences or not known:
            return len(authors)
        return known + min(len(authors) - known, math.ceil(known / (NEWCOMERS_PART - 1)))

    def weight(self, author: bytes) -> float:
        """What its samples count in the loss: 1, half while its claims are doubted, 0 while it is banned."""
        if self.banned(author) is not None:
            return 0.0
        book = self.authors.get(author)
        return 0.5 if book is not None and CLAIMS in self._defences and book.claims.too_low(DOUBTED) else 1.0

    def note_pull(self, author: bytes, step_seconds: float) -> None:
        """A packet of it is being pulled."""
        pulled = self._author(author).pulled
        pulled.add(self._clock())
        pulled.half_life = max(step_seconds, 1e-3)

    def pulled(self, author: bytes) -> float:
        """About how many packets of it were pulled in the time of a step."""
        book = self.authors.get(author)
        return book.pulled.now(self._clock()) if book is not None else 0.0

    def may_be_pulled(self, author: bytes, most: int) -> bool:
        """Whether another packet of it may be: at most so many in the time of a step, fewer if few have a signal."""
        book = self.authors.get(author)
        part = min(1.0, book.signal / ENOUGH_SIGNAL) if book is not None else 1.0
        return self.pulled(author) < max(1.0, most * part)

    # --- holders --------------------------------------------------------------------------------------------------

    def delivered(self, holder: bytes, size: int) -> None:
        """It gave a packet that it was asked for."""
        book = self._holder(holder)
        book.delivered += 1
        book.bytes += size

    def failed(self, holder: bytes) -> None:
        """It did not answer, or stopped half-way."""
        book = self._holder(holder)
        book.failures += 1
        book.lately.add(self._clock())

    def faked(self, holder: bytes) -> None:
        """It had told that it held a packet, and did not."""
        book = self._holder(holder)
        book.fakes += 1
        book.lately.add(self._clock())

    def busy(self, holder: bytes) -> None:
        """It had no time; who never has is asked less."""
        self._holder(holder).lately.add(self._clock(), 0.25)

    def lied(self, holder: bytes, what: str) -> None:
        """It sent what no honest node sends, as forged announcements or other bytes than those that were asked for;
        three times within about an hour are a ban."""
        book = self._holder(holder)
        now = self._clock()
        book.lies[what] += 1
        book.lately.add(now)
        if _struck_out(book.strikes, now):
            book.ban.extend(now, f"it {what}")
            logger.warning("Peer %s is left alone: it %s", peer_id(holder), what)

    def shunned(self, holder: bytes) -> str | None:
        """Why it is neither asked nor answered, or None if it is."""
        book = self.holders.get(holder)
        return book.ban.reason if book is not None and book.ban.until > self._clock() else None

    def pick(self, holders: Sequence[bytes], rng: random.Random) -> bytes:
        """One of them by chance; who failed lately has a smaller one."""
        now = self._clock()
        books = [self.holders.get(holder) for holder in holders]
        return rng.choices(holders, [1.0 / (1.0 + book.lately.now(now)) if book else 1.0 for book in books])[0]

    # --- what is told and kept ------------------------------------------------------------------------------------

    def report(self, peer: bytes) -> dict[str, Any]:
        """What `ftis-node peers` shows of a peer, as an author and as a holder."""
        author, holder = self.authors.get(peer, Author()), self.holders.get(peer, Holder())
        claims = author.claims
        return {
            "standing": self._in_words(peer),
            "accepted": author.admitted,
            "refused": dict(author.refused),
            "late": author.late,
            "no_signal": author.no_signal,
            "record": author.sound,
            "weight": self.weight(peer),
            "mean_importance": claims.mean_weight,
            "mean_importance_error": claims.error,
            "surprising_tokens": claims.surprising / claims.tokens if claims.tokens else 0.0,
            "likelihood": claims.likelihood / claims.samples if claims.samples else None,
            "mean_length": author.tokens / author.completions if author.completions else None,
            "mean_reward": author.reward / author.rewarded if author.rewarded else None,
            "loss_share": author.loss_share,
            "delivered": holder.delivered,
            "fetch_failures": holder.failures,
            "fake_holds": holder.fakes,
            "lies": dict(holder.lies),
        }

    def left_alone(self) -> dict[bytes, str]:
        """Who is banned, as an author or altogether, and why."""
        found = {author: reason for author in self.authors if (reason := self.banned(author)) is not None}
        return found | {holder: reason for holder in self.holders if (reason := self.shunned(holder)) is not None}

    def _in_words(self, peer: bytes) -> str:
        if (reason := self.banned(peer)) is not None:
            return f"banned as an author: {reason}"
        if (reason := self.shunned(peer)) is not None:
            return f"banned: {reason}"
        if self.weight(peer) < 1.0:
            return "doubted: its claimed probabilities look too low"
        return "established" if self.established(peer) else "newcomer"

    def facts(self) -> dict[str, Any]:
        """In plain values, for a next start: bans and records, with times as seconds from now."""
        now = self._clock()
        return {
            "authors": {
                author.hex(): {
                    "sound": book.sound,
                    "claims": vars(book.claims),
                    "loss_share": book.loss_share,
                    "ban": {"left": max(0.0, book.ban.until - now), "reason": book.ban.reason, "level": book.ban.level},
                }
                for author, book in self.authors.items()
                if book.sound or book.ban.level
            }
        }

    def take_up(self, facts: Mapping[str, Any]) -> None:
        """Puts back what `facts` gave. Raises ValueError, TypeError or KeyError if it is something else."""
        now = self._clock()
        for name, told in list(facts["authors"].items())[:AUTHORS_MAX]:
            book = self._author(bytes.fromhex(name))
            book.sound = int(told["sound"])
            book.claims = Claims(**{key: float(value) for key, value in told["claims"].items()})
            book.loss_share = float(told.get("loss_share", 0.0))  # the first homes did not keep it
            ban = told["ban"]
            book.ban = Ban(now + float(ban["left"]), str(ban["reason"]), int(ban["level"]))

    # --- the books ------------------------------------------------------------------------------------------------

    def _author(self, author: bytes) -> Author:
        return _book(self.authors, author, Author, AUTHORS_MAX, lambda book: book.sound > 0 or book.ban.level > 0)

    def _holder(self, holder: bytes) -> Holder:
        return _book(self.holders, holder, Holder, HOLDERS_MAX, lambda book: book.ban.level > 0)


def _struck_out(strikes: Fading, now: float) -> bool:
    """Counts a strike; whether it was the third, from which on counting begins anew."""
    if strikes.add(now) <= STRIKES - 0.5:
        return False
    strikes.value = 0.0
    return True


def _book(books: dict[bytes, _R], peer: bytes, make: Callable[[], _R], most: int, matters: Callable[[_R], bool]) -> _R:
    """Its book, a new one if there is none; identities are free, so the oldest that does not matter makes room."""
    found = books.get(peer)
    if found is None:
        if len(books) >= most:
            idle = (other for other, book in books.items() if not matters(book))
            del books[next(idle, next(iter(books)))]
        found = books[peer] = make()
    return found
