"""What a node thinks of others, by evidence of its own: of authors by what they signed, of holders by what they gave.

Forged or malformed packets and two announcements of one round are somebody's doing: they lead to a ban, a longer one
each time. What only looks wrong costs weight first. Nobody is believed because of what others say of them.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftis_node.host.clocks import unix_seconds
from ftis_node.swarm.books import (
    ADMITTED_EVIDENCE,
    STRIKES,
    Author,
    AuthorBooks,
    Ban,
    Holder,
    open_holder,
    struck_out,
)
from ftis_node.swarm.claims import DISPROVED, DOUBTED, Claims
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.rounds import Rounds

CLAIMS, NEWCOMERS = "claims", "newcomers"
DEFENCES = (CLAIMS, NEWCOMERS)

NEWCOMERS_PART = 4  # one part in so many of a batch is for all together who have none
# Of an author's latest groups about so many count for how much is pulled of it; if less than one in four of them has a
# signal, less is, down to one in the time of a step.
SIGNAL_GROUPS, ENOUGH_SIGNAL = 32, 0.25

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerStanding:
    """A peer's row, by this node's own evidence.

    standing                         in words
    accepted, refused, late          packets that it signed; refused by reason
    no_signal, record                its groups without a signal; groups trained on with sound claims
    weight                           what its samples count in the loss, 0 to 1
    mean_importance (_error)         mean of min(ρ, 2) over its tokens, and the standard error
    surprising_tokens                share of its tokens that it claims a thousand times likelier than the policy does
    likelihood                       mean log-prob of its tokens under the policy, nats
    mean_length, mean_reward         tokens of a completion; reward
    loss_share                       share of the loss, smoothed
    delivered, fetch_failures, fake_holds, lies   as a holder: packets, failures, packets it lacked, lies by kind
    """

    standing: str
    accepted: int
    refused: dict[str, int]
    late: int
    no_signal: int
    record: int
    weight: float
    mean_importance: float | None
    mean_importance_error: float | None
    surprising_tokens: float
    likelihood: float | None
    mean_length: float | None
    mean_reward: float | None
    loss_share: float
    delivered: int
    fetch_failures: int
    fake_holds: int
    lies: dict[str, int]


class Standing:
    """Evidence goes into bounded books, verdicts come out of them."""

    def __init__(
        self,
        clock: Callable[[], float],
        defences: Collection[str] = DEFENCES,
        unix: Callable[[], float] = unix_seconds,
    ) -> None:
        """
        Args:
            clock: seconds, which go on while the machine sleeps (`boot_seconds`).
            defences: which of `DEFENCES` act; evidence is gathered for all.
            unix: the wall clock, in seconds since 1970, near which authors number their rounds.
        """
        self._books = AuthorBooks(clock)
        self.authors = self._books.books
        self.holders: dict[bytes, Holder] = {}
        self.rounds = Rounds(clock, unix)
        self.banned_author: list[Callable[[bytes], None]] = []  # told of each ban
        self._clock = clock
        self._defences = frozenset(defences)

    # --- authors: evidence ----------------------------------------------------------------------------------------

    def admitted(self, author: bytes, *, completions: int, tokens: int, size: int) -> None:
        """A packet of it was admitted."""
        book = self._books.open(author)
        book.admitted += 1
        book.evidence.add(self._clock(), ADMITTED_EVIDENCE)
        book.completions += completions
        book.tokens += tokens
        book.bytes += size

    def refused(self, author: bytes, reason: str) -> None:
        """A packet that it signed is not as it must be; three within about an hour are a ban."""
        book = self._books.open(author)
        book.refused[reason] += 1
        if struck_out(book.strikes, self._clock()):
            self.ban(author, f"{STRIKES} of its packets were refused, last: {reason}")

    def equivocated(self, author: bytes) -> None:
        """It signed two different announcements of one round, which nobody else can do for it."""
        if (book := self.authors.get(author)) is not None:  # a throw-away key is not worth one
            book.refused["equivocation"] += 1
        self.ban(author, "it signed two different announcements of one round")

    def late(self, author: bytes) -> None:
        """An announcement of it came too late, which is nobody's fault."""
        if (book := self.authors.get(author)) is not None:
            book.late += 1

    def scored(self, author: bytes, rewards: Sequence[float], *, signal: bool) -> None:
        """A group of it has its rewards."""
        book = self._books.open(author)
        book.rewarded += len(rewards)
        book.reward += sum(rewards)
        book.no_signal += not signal
        book.signal += (signal - book.signal) / SIGNAL_GROUPS

    def trained(self, author: bytes, groups: int, figures: Mapping[str, float]) -> None:
        """A step was taken on so many of its groups.

        Args:
            figures: what `Diagnostics.summary` says of it as a source.
        """
        book = self._books.open(author)
        book.loss_share += 0.05 * (figures["loss_share"] - book.loss_share)
        if not figures["samples"]:
            return
        book.claims.add(figures)
        if not book.claims.too_low(DOUBTED):
            self._books.earn(author, groups)
        if CLAIMS in self._defences and (evidence := book.claims.evidence(DISPROVED)):
            book.claims, book.sound = Claims(), 0
            self._books.keep_record(author)
            self.ban(author, f"it claims too low probabilities: {evidence}, honest ≤ 1")

    def ban(self, author: bytes, reason: str) -> None:
        """Its announcements and groups are left alone: ten minutes, then four times as long each time, up to a day."""
        if self.banned(author) is None:
            logger.warning("Author %s is left alone: %s", peer_id(author), reason)
        self._books.ban(author, reason)
        for told in self.banned_author:
            told(author)

    # --- authors: verdicts ----------------------------------------------------------------------------------------

    def banned(self, author: bytes) -> str | None:
        """Why it is left alone, or None if it is not."""
        ban = self._books.ban_of(author)
        return ban.reason if ban is not None and ban.until > self._clock() else None

    def established(self, author: bytes) -> bool:
        """Whether it has a record."""
        return author in self._books.recorded and self.banned(author) is None

    def record(self, author: bytes) -> int:
        """Its groups that were trained on with sound claims."""
        book = self.authors.get(author)
        return book.sound if book is not None else 0

    def newcomers_room(self, batch: int) -> int | None:
        """Groups of a batch that all together may have who have no record; None: there is no limit, as nobody has."""
        if NEWCOMERS not in self._defences or not any(map(self.established, self._books.recorded)):
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
        pulled = self._books.open(author).pulled
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
        book = open_holder(self.holders, holder)
        book.delivered += 1
        book.bytes += size

    def failed(self, holder: bytes) -> None:
        """It did not answer, or stopped half-way."""
        book = open_holder(self.holders, holder)
        book.failures += 1
        book.lately.add(self._clock())

    def faked(self, holder: bytes) -> None:
        """It had told that it held a packet, and did not."""
        book = open_holder(self.holders, holder)
        book.fakes += 1
        book.lately.add(self._clock())

    def busy(self, holder: bytes) -> None:
        """It had no time; who never has is asked less."""
        open_holder(self.holders, holder).lately.add(self._clock(), 0.25)

    def lied(self, holder: bytes, what: str) -> None:
        """It sent what no honest node sends, as forged announcements or other bytes than those that were asked for;
        three times within about an hour are a ban."""
        book = open_holder(self.holders, holder)
        now = self._clock()
        book.lies[what] += 1
        book.lately.add(now)
        if struck_out(book.strikes, now):
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

    def report(self, peer: bytes) -> PeerStanding:
        """What `ftis-node peers` shows of a peer, as an author and as a holder."""
        author, holder = self.authors.get(peer, Author()), self.holders.get(peer, Holder())
        claims = author.claims
        return PeerStanding(
            standing=self._in_words(peer),
            accepted=author.admitted,
            refused=dict(author.refused),
            late=author.late,
            no_signal=author.no_signal,
            record=author.sound,
            weight=self.weight(peer),
            mean_importance=claims.mean_weight,
            mean_importance_error=claims.error,
            surprising_tokens=claims.surprising / claims.tokens if claims.tokens else 0.0,
            likelihood=claims.mean_likelihood,
            mean_length=author.tokens / author.completions if author.completions else None,
            mean_reward=author.reward / author.rewarded if author.rewarded else None,
            loss_share=author.loss_share,
            delivered=holder.delivered,
            fetch_failures=holder.failures,
            fake_holds=holder.fakes,
            lies=dict(holder.lies),
        )

    def left_alone(self) -> dict[bytes, str]:
        """Who is banned, as an author or altogether, and why."""
        known = (*self.authors, *self._books.strangers)
        found = {author: reason for author in known if (reason := self.banned(author)) is not None}
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
        none = Author()
        strangers = {author: none for author in self._books.strangers if author not in self.authors}
        return {
            "authors": {
                author.hex(): {
                    "sound": book.sound,
                    "claims": asdict(book.claims),
                    "loss_share": book.loss_share,
                    "evidence": book.evidence.now(now),
                    "ban": {"left": max(0.0, ban.until - now), "reason": ban.reason, "level": ban.level},
                }
                for author, book in (self.authors | strangers).items()
                if (ban := self._books.ban_of(author) or none.ban).level or book.sound
            }
        }

    def take_up(self, facts: Mapping[str, Any]) -> None:
        """Puts back what `facts` gave. Raises ValueError, TypeError or KeyError if it is something else."""
        now = self._clock()
        for name, told in facts["authors"].items():
            author = bytes.fromhex(name)
            ban = Ban(now + float(told["ban"]["left"]), str(told["ban"]["reason"]), int(told["ban"]["level"]))
            sound = int(told["sound"])
            evidence = float(told.get("evidence", sound))  # older homes did not keep it
            if evidence < 1.0:
                self._books.take_stranger(author, ban)
                continue
            book = self._books.open(author)
            book.sound, book.ban = sound, ban
            book.claims = Claims(**{key: float(value) for key, value in told["claims"].items()})
            book.loss_share = float(told.get("loss_share", 0.0))  # the first homes did not keep it
            book.evidence.add(now, evidence)
            self._books.keep_record(author)
