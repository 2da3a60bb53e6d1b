"""Reputation by a node's own evidence: of authors from what they signed, of holders from what they delivered.

A forged or malformed packet and a second announcement of one round prove a fault. They lead to a ban, a longer one each
time. Suspicion costs weight first. A node never uses what peers say about one another.
"""

import logging
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ftis_node.host.clocks import Clock, unix_seconds
from ftis_node.swarm.books import (
    ADMITTED_EVIDENCE,
    HOLDERS_MAX,
    STRIKES,
    AuthorBooks,
    Ban,
    Books,
    Holder,
    struck_out,
)
from ftis_node.swarm.claims import DISPROVED, DOUBTED, Claims
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.pool import NO_LIMIT
from ftis_node.swarm.rounds import Rounds

CLAIMS = "claims"
NEWCOMERS = "newcomers"
DEFENCES = (CLAIMS, NEWCOMERS)

NEWCOMERS_PART = 4  # all authors without a record share one part in so many of a batch
# The number of an author's latest groups that decide how much this node pulls from it. If less than one in four has a
# signal, the node pulls less, down to one group per step.
SIGNAL_GROUPS = 32
ENOUGH_SIGNAL = 0.25
LEAST_SHARE = 0.25  # of the chance to be asked that the holder has which served least lately

logger = logging.getLogger(__name__)


class Reputation:
    """Evidence on authors and holders in bounded books, and the verdicts from it. Both are named by 38-byte peer ids.

    A node has one, in its network process. What `facts` returns outlives the process; all else begins anew with it.
    """

    def __init__(self, clock: Clock, defences: Collection[str] = DEFENCES, unix: Clock = unix_seconds) -> None:
        """
        Args:
            clock: seconds, including those in which the machine sleeps (`boot_seconds`).
            defences: the members of `DEFENCES` that act; all gather evidence.
            unix: the wall clock, in seconds since 1970, near which authors number their rounds.
        """
        self.authors = AuthorBooks(clock)
        self.holders = Books(
            Holder,
            HOLDERS_MAX,
            kept=lambda book: book.ban.level > 0,
            worth=lambda book: book.delivered,
        )
        self.rounds = Rounds(clock, unix)
        self._clock = clock
        self._defences = frozenset(defences)

    # --- authors: evidence ----------------------------------------------------------------------------------------

    def admitted(self, author: bytes, *, completions: int, tokens: int) -> None:
        """Count an admitted packet of the author: its completions, and the tokens in all of them."""
        book = self.authors.open(author)
        book.admitted += 1
        book.evidence.add(self._clock(), ADMITTED_EVIDENCE)
        book.completions += completions
        book.tokens += tokens

    def refused(self, author: bytes, reason: str) -> None:
        """Count a refused packet that the author signed; three within about an hour lead to a ban."""
        book = self.authors.open(author)
        book.refused[reason] += 1
        if struck_out(book.strikes, self._clock()):
            self.ban(author, f"{STRIKES} of its packets were refused, last: {reason}")

    def equivocated(self, author: bytes) -> None:
        """Ban an author that signed two different announcements of one round; nobody else can forge this."""
        if author in self.authors:  # a throw-away key gets no book
            self.authors[author].refused["equivocation"] += 1
        self.ban(author, "it signed two different announcements of one round")

    def late(self, author: bytes) -> None:
        """Count an announcement that came too late; it has no consequence."""
        if author in self.authors:
            self.authors[author].late += 1

    def scored(self, author: bytes, rewards: Sequence[float], *, signal: bool) -> None:
        """Count a group of the author that this node has scored.

        Args:
            rewards: this node's, of each completion; empty if it can read none.
            signal: whether they differ. If few groups have a signal, the node pulls less of the author.
        """
        book = self.authors.open(author)
        book.rewarded += len(rewards)
        book.reward += sum(rewards)
        book.no_signal += not signal
        book.signal += (signal - book.signal) / SIGNAL_GROUPS

    def trained(self, author: bytes, groups: int, figures: Mapping[str, float]) -> None:
        """Count a step on so many groups of the author, once it is taken; a skipped step is not counted.

        While its claims look sound, its record grows by these groups. If the claims are disproved, it is banned, and
        its record and the evidence on its claims begin anew.

        Args:
            figures: the author's figures from `Diagnostics.summary`.
        """
        book = self.authors.open(author)
        book.loss_share += 0.05 * (figures["loss_share"] - book.loss_share)  # a mean of about twenty steps
        if not figures["samples"]:
            return
        claims = book.claims
        claims.add(figures)
        if claims.paid < DOUBTED:
            book.sound += groups
            book.evidence.add(self._clock(), groups)
        if CLAIMS in self._defences and claims.paid >= DISPROVED:
            book.claims = Claims()
            book.sound = 0
            self.ban(author, f"it claims too low probabilities: {claims.evidence}, honest ≤ 1")

    def ban(self, author: bytes, reason: str) -> None:
        """Ignore its announcements and groups for ten minutes, four times as long each further time, up to a day."""
        if not self.banned(author):
            logger.warning("Author %s is left alone: %s", peer_id(author), reason)
        self.authors.ban(author, reason)

    # --- authors: verdicts ----------------------------------------------------------------------------------------

    def banned(self, author: bytes) -> str:
        """The reason of the author's present ban, or ""."""
        return self.authors.ban_of(author).now(self._clock())

    def established(self, author: bytes) -> bool:
        """Whether the author has a record and no ban."""
        return self.authors.of(author).has_record and not self.banned(author)

    def record(self, author: bytes) -> int:
        """The author's groups that were trained on while its claims were sound."""
        return self.authors.of(author).sound

    def newcomers_room(self, batch: int) -> int:
        """The groups of a batch that all newcomers share, one at least; `NO_LIMIT` if no author has a record."""
        if NEWCOMERS not in self._defences or not any(map(self.established, self.authors)):
            return NO_LIMIT
        return max(1, batch // NEWCOMERS_PART)

    def heads(self, authors: Collection[bytes]) -> int:
        """The number of these authors that a batch has room for, among whom the node divides it. Before any has a
        record: all. Then: those with a record and a third as many newcomers, because newcomers share a quarter."""
        known = sum(map(self.established, authors))
        if NEWCOMERS not in self._defences or not known:
            return len(authors)
        return known + min(len(authors) - known, math.ceil(known / (NEWCOMERS_PART - 1)))

    def weight(self, author: bytes) -> float:
        """The weight of its samples in the loss: 0 during a ban, a half while its claims are doubted, else 1."""
        if self.banned(author):
            return 0.0
        if self._doubted(author):
            return 0.5
        return 1.0

    def _doubted(self, author: bytes) -> bool:
        """Whether bets against its claims have paid so much that its samples weigh less."""
        return CLAIMS in self._defences and self.authors.of(author).claims.paid >= DOUBTED

    def note_pull(self, author: bytes, step_seconds: float) -> None:
        """Count a packet of the author whose pull begins.

        Args:
            step_seconds: about the length of a step; after it the count has halved.
        """
        pulled = self.authors.open(author).pulled
        pulled.add(self._clock())
        pulled.half_life = max(step_seconds, 1e-3)

    def pulled(self, author: bytes) -> float:
        """The approximate number of its packets pulled in the time of a step; it fades, so it is no whole number."""
        return self.authors.of(author).pulled.now(self._clock())

    def may_be_pulled(self, author: bytes, most: float) -> bool:
        """Whether the node may pull another of its packets: at most so many per step, fewer if few have a signal, but
        one at least; none of a banned author."""
        signal = self.authors.of(author).signal
        if signal < ENOUGH_SIGNAL:
            most = max(1.0, most * signal / ENOUGH_SIGNAL)
        return self.pulled(author) < max(1.0, most) and not self.banned(author)

    # --- holders --------------------------------------------------------------------------------------------------

    def delivered(self, holder: bytes) -> None:
        """Count a requested packet that the holder delivered."""
        self.holders.open(holder).delivered += 1
        self.answered(holder)

    def failed(self, holder: bytes) -> None:
        """Count a pull that the holder did not answer or did not finish."""
        book = self.holders.open(holder)
        book.failures += 1
        book.faults.add(self._clock())

    def faked(self, holder: bytes) -> None:
        """Count a packet that the holder had announced and lacked."""
        book = self.holders.open(holder)
        book.fakes += 1
        book.faults.add(self._clock())

    def answered(self, holder: bytes) -> None:
        """Count an answer, be it "busy" or a packet: who answers much gets fewer requests."""
        self.holders.open(holder).served.add(self._clock())

    def lied(self, holder: bytes, what: str) -> None:
        """Count a message that no honest node sends, such as forged announcements or wrong bytes; three within about an
        hour lead to a ban.

        Args:
            what: what the holder did; a text that goes on after "it", and by which `peers` counts.
        """
        book = self.holders.open(holder)
        now = self._clock()
        book.lies[what] += 1
        book.faults.add(now)
        if struck_out(book.strikes, now):
            book.ban.extend(now, f"it {what}")
            logger.warning("Peer %s is left alone: it %s", peer_id(holder), what)

    def shunned(self, holder: bytes) -> str:
        """The reason why this node neither calls nor answers the peer, or ""."""
        return self.holders.of(holder).ban.now(self._clock())

    def pick(self, holders: Sequence[bytes], rng: random.Random) -> bytes:
        """Draw one of these holders, at least one, at random.

        What a holder served lately, beside the others, lowers its chance to a quarter at most, so that none serves all.
        Those that have delivered nothing yet share one chance, so that fresh keys gain nothing. Faults lower a chance
        without end.
        """
        now = self._clock()
        books = list(map(self.holders.of, holders))
        served = [1.0 + book.served.now(now) for book in books]
        idle = min(served)
        fresh = sum(not book.delivered for book in books)
        weights = []
        for book, answers in zip(books, served, strict=True):
            share = max(LEAST_SHARE, (idle / answers) ** 4)
            if not book.delivered:
                share /= fresh
            weights.append(share / (1.0 + 4.0 * book.faults.now(now)) ** 2)
        return rng.choices(holders, weights)[0]

    # --- reports and persistence ----------------------------------------------------------------------------------

    def report(self, peer: bytes) -> dict[str, Any]:
        """A peer's row for `ftis-node peers`, as an author and as a holder, by this node's own evidence.

        standing                         in words
        accepted, refused, late          packets that it signed; refused by reason
        no_signal, record                its groups without a signal; groups trained on with sound claims
        weight                           weight of its samples in the loss, 0 to 1
        mean_importance (_error)         mean of min(ρ, 2) over its judged tokens, and the standard error
        surprising_tokens                share of its tokens claimed a thousand times likelier than by the policy
        likelihood                       mean log-prob of its tokens under the policy, nats
        mean_length, mean_reward         tokens of a completion; reward
        loss_share                       share of the loss, smoothed
        delivered, fetch_failures, fake_holds, lies   as a holder: packets, failures, packets it lacked, lies by kind
        """
        author = self.authors.of(peer)
        holder = self.holders.of(peer)
        claims = author.claims
        return {
            "standing": self._standing_text(peer),
            "accepted": author.admitted,
            "refused": dict(author.refused),
            "late": author.late,
            "no_signal": author.no_signal,
            "record": author.sound,
            "weight": self.weight(peer),
            "mean_importance": claims.mean_weight,
            "mean_importance_error": claims.error,
            "surprising_tokens": claims.surprising / claims.judged if claims.judged else 0.0,
            "likelihood": claims.mean_likelihood,
            "mean_length": author.tokens / author.completions if author.completions else None,
            "mean_reward": author.reward / author.rewarded if author.rewarded else None,
            "loss_share": author.loss_share,
            "delivered": holder.delivered,
            "fetch_failures": holder.failures,
            "fake_holds": holder.fakes,
            "lies": dict(holder.lies),
        }

    def left_alone(self) -> dict[bytes, str]:
        """All banned authors and peers with their reasons; a ban as a holder hides that as an author."""
        reasons = [(author, self.banned(author)) for author in (*self.authors, *self.authors.strangers)]
        reasons += [(holder, self.shunned(holder)) for holder in self.holders]
        return {peer: reason for peer, reason in reasons if reason}

    def _standing_text(self, peer: bytes) -> str:
        """The verdict on a peer in words, the worst that holds; a reason follows a colon.

        The first word is one of `STANDINGS` in observe/prometheus.py: metrics, and swarm.js of the page, read it.
        """
        banned = self.banned(peer)
        if banned:
            return f"banned as an author: {banned}"
        shunned = self.shunned(peer)
        if shunned:
            return f"banned: {shunned}"
        if self._doubted(peer):
            return "doubted: its claimed probabilities look too low"
        if self.established(peer):
            return "established"
        return "newcomer"

    def facts(self) -> dict[str, Any]:
        """Authors' bans and records as plain values for the next start (`standing.json`), with times as seconds from
        now. Holders' are not kept."""
        now = self._clock()
        rows = {}
        for author in dict.fromkeys((*self.authors, *self.authors.strangers)):
            book = self.authors.of(author)
            ban = self.authors.ban_of(author)
            if ban.level or book.sound:
                rows[author.hex()] = {
                    "sound": book.sound,
                    "claims": asdict(book.claims),
                    "loss_share": book.loss_share,
                    "evidence": book.evidence.now(now),
                    "ban": {"left": max(0.0, ban.until - now), "reason": ban.reason, "level": ban.level},
                }
        return {"authors": rows}

    def take_up(self, facts: Mapping[str, Any]) -> None:
        """Restore the output of `facts`, before anything else is counted. An author without evidence gets no book, but
        its ban is kept.

        Raises:
            ValueError, TypeError, KeyError: it is malformed; authors before the malformed one are restored.
        """
        now = self._clock()
        for name, row in facts["authors"].items():
            author = bytes.fromhex(name)
            kept = row["ban"]
            ban = Ban(now + float(kept["left"]), str(kept["reason"]), int(kept["level"]))
            sound = int(row["sound"])
            evidence = float(row.get("evidence", sound))  # older homes did not keep it
            if evidence < 1.0:
                if ban.level:
                    self.authors.strangers[author] = ban
                continue
            book = self.authors.open(author)
            book.sound = sound
            book.ban = ban
            book.claims = Claims.of(row["claims"])
            book.loss_share = float(row.get("loss_share", 0.0))  # the first homes did not keep it
            book.evidence.add(now, evidence)
