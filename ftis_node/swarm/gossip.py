"""Push–pull gossip of announcements: what a node sends, and what it does with what it receives."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from ftis_node.config.run import Run
from ftis_node.host.clocks import unix_seconds
from ftis_node.swarm.announcement import Announcement, decode_announcement, teaches
from ftis_node.swarm.common_rows import Answered
from ftis_node.swarm.ftis_pb2 import Entry, ExchangeRequest, ExchangeResponse, Mention
from ftis_node.swarm.identity import OfPeer
from ftis_node.swarm.known import Known, Outcome, announcement_id
from ftis_node.swarm.limits import OWN, Bounded, Budgets, Limits
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.sessions import LACKING_MAX, Lacking, Sessions, Told
from ftis_node.swarm.signed import Malformed
from ftis_node.swarm.table import Table

PUSHED = 6  # peers that get an own new announcement whole; they cannot know it yet
FRESH_SECONDS = 1.0  # after the signature; see `Gossip.tells_all`
IDS_MAX = 4096
# A node with so many announcements left to pull from requests only a few more at a time. A large swarm makes far more
# than any node can use.
ENOUGH_OPEN = 128
A_FEW = 4
FEW_LACKING = 32  # and remembers so many of those that one peer mentions
COUNT_SECONDS = 1.0
CHECKS_A_SECOND = 100.0  # signature checks for one peer
CHECKS_AT_ONCE = 2048.0
# An equivocating author's announcement costs its first sender so many checks. An honest node passes one on in good
# faith, so this limits the rate and does not blame.
CONTRADICTION_CHECKS = 100.0
# A faster peer always asks first. Then this node asks it too: only who asks is told again what was lost, and of peers.
# This is seldom, because the upload of a peer grows that many nodes ask (in `lab simulate` with 4 by a sixth).
ANSWERS_IN_A_ROW = 16
ASKED_SECONDS = 5.0  # after a request to one peer, requests to others for the same announcement wait so long, once
# `issued_at` only prevents replays; freshness is the age, which needs no common clock.
REPLAY_FENCE = 3 * 3600.0

Message: TypeAlias = ExchangeRequest | ExchangeResponse


@dataclass(eq=False)
class Gossip:
    """The announcement table, and the exchanges that fill it.

    A node receives a whole announcement about once: an exchange mentions ids, eight bytes each, and a node requests
    those that it lacks. `ask` opens an exchange, `answer` answers, `take` reads the answer and returns a next request.
    What a message holds counts as told once it is made. The caller sends it, or says with `unsent` or `failed` that it
    did not arrive. All runs in one event loop, and nothing here waits.

    own: this node's 38-byte peer id. reputation: nothing new of a banned author is taken. seen: whether the node has
    processed a group (author, round, slot), also before a restart. news: called when there may be more to pull. decode:
    reads an announcement; a simulation of many nodes reads each only once. welcomes: whether an author may take part;
    in a private run, whether it is a member. sessions: what is remembered of each peer. holds: whether the node has a
    packet of this digest. tells_all: the swarm is small, so an author sends its newest announcement to all its peers
    itself, and others mention it a moment later only; `Swarm` sets it before each round of exchanges.
    """

    table: Table
    run: Run
    own: bytes
    reputation: Reputation
    seen: Callable[[bytes, int, int], bool]
    news: Callable[[], None]
    decode: Callable[..., Announcement] = decode_announcement
    welcomes: OfPeer = lambda author: True
    sessions: Sessions = field(default_factory=Sessions)
    holds: Callable[[bytes], bool] = lambda digest: False
    tells_all: bool = False

    def __post_init__(self) -> None:
        self.run_id = self.run.id
        self._clock = self.table.clock
        self.counts = Counter[str]()  # announcements that peers sent, by `Outcome`; `status` shows it
        self.copied = False  # somebody else signs with this node's key; never taken back
        self.enough: float = ENOUGH_OPEN  # an observer sets it to infinity: it wants them all
        self._answered = Answered(self.run)
        self._newest: Known | None = None
        self._asked = Bounded[int, float](IDS_MAX)  # time until which no other peer is asked; set once per id
        self._open = 0  # announcements left to pull from, at the time `_counted`
        self._counted = -math.inf
        self._checks = Budgets(self._clock, CHECKS_A_SECOND, CHECKS_AT_ONCE)
        self._dealt = Bounded[int, None](IDS_MAX)  # ids of unwanted announcements, whatever peer mentions them

    def announce(self, announcement: Announcement) -> None:
        """Add an own announcement; the node holds all its packets. The next exchanges carry it."""
        known = self._add_own(announcement, announcement.encode(), 0.0)
        if known is not None:
            known.obtained(known.every)
            self._newest = known

    def recall(self, data: bytes, age: float) -> None:
        """Add an own announcement of an earlier start, made so many seconds ago, with the packets that are left. Called
        at the start, the oldest first."""
        announcement = self.decode(data, max_packets=self.run.slots)
        known = self._add_own(announcement, data, age)
        if known is not None:
            known.obtained(sum(1 << index for index, ref in enumerate(announcement.packets) if self.holds(ref.digest)))

    def _add_own(self, announcement: Announcement, data: bytes, age: float) -> Known | None:
        """Add an own announcement, of which nothing is to be pulled; None if it is too old for the table."""
        self.table.add(announcement, data, age=age, first_sender=None)
        known = self.table.get(announcement.author, announcement.round)
        if known is not None:
            known.done = known.every
        return known

    def ask(self, peer: bytes, limits: Limits = OWN) -> ExchangeRequest:
        """Open an exchange: announce what `peer` may not know; request what `peer` mentioned and this node lacks. These
        ids are asked of no other peer for a while (`_want`). limits: of a message between both nodes."""
        request = ExchangeRequest(wanted=self._want(peer, limits, reserve=True))
        session = self.sessions[peer]
        session.ask_again(request)
        session.asked = self._clock()
        session.answers = 0
        self._tell(request, peer, limits, limits.entries)
        session.request = _told(request)
        return request

    def answer(self, request: ExchangeRequest, peer: bytes, limits: Limits = OWN) -> ExchangeResponse:
        """Process a peer's request and answer it, with nothing if there is no room. Of an observer's, only what it asks
        for is read. What this node requests in the answer is to come with the peer's next request."""
        session = self.sessions[peer]
        if request.again:  # tell again what the last answer held; without `latest`, all announcements
            self._take_back(peer, session.answer)
            if not request.latest:
                self.table.untell(peer)
        session.answer = Told()
        owed = session.owed
        session.owed = []
        if not request.again:  # it has read what it was asked for, and gives it now or mentions it again
            for id in owed:
                session.lacking.pop(id, None)
        answer = ExchangeResponse()
        given = self._give(request.wanted, peer, limits)
        if not session.observer:
            answer.again = self._hear(request, peer, len(owed))
        if limits.room <= 0:
            return answer
        answer.entries.extend(given)
        room = limits.entries - len(given)
        if session.observer:
            room = 0
        self._tell(answer, peer, limits, room)
        session.answer = _told(answer)
        if not session.observer:
            # A caller reserves no ids: it could keep this node from asking others again and again.
            session.owed = self._want(peer, limits, reserve=False)
            session.answers += 1
            if session.answers <= ANSWERS_IN_A_ROW:
                session.asked = self._clock()
            answer.wanted.extend(session.owed)
        return answer

    def take(
        self,
        request: ExchangeRequest,
        answer: ExchangeResponse,
        peer: bytes,
        limits: Limits = OWN,
    ) -> ExchangeRequest | None:
        """Process the answer to a request; return the next request, or None when the exchange is complete. A next
        request has what the peer wanted and what this node wants. If the caller does not send it, it calls `unsent`."""
        session = self.sessions[peer]
        if answer.again:
            self._take_back(peer, session.request)
        for id in request.wanted:  # the peer no longer has an id that it neither sends now nor mentions again
            session.lacking.pop(id, None)
        session.missed |= self._hear(answer, peer, len(request.wanted))
        self._ask_others(request)
        entries = self._give(answer.wanted, peer, limits)
        further = ExchangeRequest(entries=entries, wanted=self._want(peer, limits, reserve=True))
        session.request = _told(further)
        if not further.entries and not further.wanted:
            return None
        session.ask_again(further)
        return further

    def unsent(self, request: ExchangeRequest, peer: bytes) -> None:
        """Undo the latest request, which was not sent, or may not have arrived: its contents count as unknown to the
        peer."""
        self._ask_others(request)
        session = self.sessions[peer]
        session.missed |= request.again
        session.forgot |= request.again and not request.latest  # it asked for all announcements
        self._take_back(peer, session.request)

    def failed(self, request: ExchangeRequest, peer: bytes) -> None:
        """Note that no answer to a request came. It may have been lost, so the next exchange asks for it again; and
        what the request held counts as unknown to the peer."""
        self.unsent(request, peer)
        self.sessions[peer].missed = True

    def _take_back(self, peer: bytes, told: Told) -> None:
        """Count what a message held as unknown to the peer: announcements, self-reports, members' records."""
        found = map(self.table.find, told.announcements)
        self.table.untell(peer, filter(None, found))
        self.sessions[peer].take_back(told)

    # --- sending --------------------------------------------------------------------------------------------------

    def pushes_to(self, peer: bytes) -> bool:
        """Whether this node sends the peer its newest announcement unasked: the peer cannot know it, nor can six
        others. In a small swarm all peers that cannot know it get it."""
        newest = self._newest
        if newest is None or self.table.find(newest.id) is not newest:  # it may have left the table
            return False
        if newest.knows & self.table.bit(peer):
            return False
        return self.tells_all or newest.knows.bit_count() < PUSHED

    def _tell(self, message: Message, peer: bytes, limits: Limits, room: int) -> None:
        """Add the own newest announcement whole while few peers can know it, and mentions of a sample of others. They
        count as told.

        Args:
            room: whole announcements that still fit into the message; an observer's has none.
        """
        newest = self._newest
        if room > 0 and newest is not None and self.pushes_to(peer):
            message.entries.append(self._entry(newest, peer))
        least_age = 0.0
        if self.tells_all and room > 0:  # until then its author tells it
            least_age = FRESH_SECONDS
        for known in self.table.sample(limits.mentions, peer, least_age):
            self.table.tell(peer, known)
            seconds = math.ceil(self._clock() - known.born)
            message.mentions.append(Mention(id=known.id, held=_held(known), age=max(1, seconds)))

    def _give(self, wanted: Iterable[int], peer: bytes, limits: Limits) -> list[Entry]:
        """The wanted announcements that are here and for which there is room, in the order of `wanted`; the first has
        room whatever its size, unless there is none at all. Only so many ids are read as the limits allow."""
        given = list[Entry]()
        size = 0
        ids = dict.fromkeys(islice(wanted, limits.entries))
        for known in filter(None, map(self.table.find, ids)):
            size += known.length
            if limits.room <= 0 or (given and size > limits.room):
                self.table.untell(peer, [known])  # so that it is mentioned again
            else:
                given.append(self._entry(known, peer))
        return given

    def _entry(self, known: Known, peer: bytes) -> Entry:
        """A whole announcement as it is sent to a peer, which counts as told of it."""
        self.table.tell(peer, known)
        age = self._clock() - known.born
        return Entry(
            announcement=known.announcement.encode(),
            age_ms=max(0, int(age * 1000)),
            held=_held(known),
        )

    def _want(self, peer: bytes, limits: Limits, *, reserve: bool) -> list[int]:
        """Ids that `peer` mentioned, that this node still lacks and requests from no other peer: as many as the limits
        allow, and only four while enough is left to pull. The oldest mention goes first.

        Args:
            reserve: ask no other peer for them for a while. An id is reserved once only; otherwise a peer that mentions
                it and never sends it could keep it from this node for good.
        """
        now = self._clock()
        session = self.sessions[peer]
        mentioned = list(session.lacking.items())
        most = limits.entries
        if len(mentioned) > A_FEW and self._enough(now):
            most = min(most, A_FEW)
            mentioned.sort(key=lambda item: not item[1].held)  # first those with packets that this peer holds
        wanted = list[int]()
        for id, _ in mentioned:
            if len(wanted) == most:
                break
            if self._asked.get(id, now) > now:
                continue
            if reserve:
                self._asked.setdefault(id, now + ASKED_SECONDS)
            wanted.append(id)
        return wanted

    def _enough(self, now: float) -> bool:
        """Whether enough announcements are left to pull from; they are counted once a second at most."""
        if now >= self._counted + COUNT_SECONDS:
            self._counted = now
            self._open = len(self.table.open_ones())
        return self._open >= self.enough

    def _ask_others(self, request: ExchangeRequest) -> None:
        """End the reservation of requested ids that did not come, so that other peers are asked."""
        now = self._clock()
        for id in request.wanted:
            if id in self._asked:
                self._asked[id] = now

    # --- receiving ------------------------------------------------------------------------------------------------

    def _hear(self, message: Message, peer: bytes, owed: int) -> bool:
        """Process a message of a peer that owes so many announcements; besides those it may push its own newest.

        Returns whether some were left that may be taken later. The peer believes that this node has them, so the caller
        has it asked for them again.
        """
        news = False
        unasked = len(message.entries) - owed - 1
        left = unasked > 0
        if left:
            self.counts[Outcome.UNASKED] += unasked
        for entry in islice(message.entries, owed + 1):
            outcome = self._merge(entry, peer)
            self.counts[outcome] += 1
            news |= outcome is Outcome.NEW
            left |= outcome in (Outcome.UNCHECKED, Outcome.NO_MEMBER)
        for mention in islice(message.mentions, OWN.mentions):
            news |= self._note(mention, peer)
        if len(message.mentions) > OWN.mentions:
            self.counts[Outcome.OVER_LIMITS] += 1
        if news:
            self.news()
        return left

    def _note(self, mention: Mention, peer: bytes) -> bool:
        """Process a mention: note its holder, or remember it as lacking. Return whether it names a new holder of an
        announcement that is here and has packets left to pull."""
        known = self.table.find(mention.id)
        held = self._mask(mention.held)
        born = None
        if mention.age:
            born = self._clock() - mention.age
        if known is not None:
            holds_more = self.table.note_holder(known, peer, held, born)
            return holds_more and known.unsettled > 0
        if mention.id in self._dealt or mention.age > self.table.max_age:
            return False
        session = self.sessions[peer]
        lacking = session.lacking
        most = LACKING_MAX
        if self._open >= self.enough:  # by the latest count, see `_enough`
            most = FEW_LACKING
        if mention.id not in lacking and len(lacking) >= most:
            del lacking[next(iter(lacking))]  # the oldest makes room
            session.forgot = True
        lacking.setdefault(mention.id, Lacking(held, born))
        return False

    def _merge(self, entry: Entry, first_sender: bytes) -> Outcome:
        """Take a whole announcement that a peer sent, known or new. Return what became of it. The id is lacking no more
        for any peer, unless another may bring what this one could not."""
        id = announcement_id(entry.announcement)
        self._asked.pop(id, None)
        known = self.table.find(id)
        if known is not None and known.announcement.encode() == entry.announcement:
            born = self._clock() - entry.age_ms / 1000
            self.table.note_holder(known, first_sender, self._mask(entry.held), born)
            return Outcome.KNOWN
        outcome = self._read(entry, first_sender)
        if outcome in (Outcome.FORGED, Outcome.MALFORMED):  # honest nodes check what they pass on
            self.reputation.lied(first_sender, f"passed on {outcome} announcements")
        # The sender may have lied about the age, and a member's certificate may come later: ask another peer.
        if outcome in (Outcome.OLD, Outcome.UNCHECKED, Outcome.NO_MEMBER):
            return outcome
        known = self.table.find(id)
        for peer, session in self.sessions.items():
            mentioned = session.lacking.pop(id, None)
            if mentioned is not None and known is not None:
                self.table.note_holder(known, peer, mentioned.held, mentioned.born)
        if outcome is not Outcome.NEW:
            self._dealt.setdefault(id, None)
        return outcome

    def _read(self, entry: Entry, first_sender: bytes) -> Outcome:
        """Check an announcement that is not here, the cheap checks first, and add it to the table. Return what became
        of it. Beside the table this notes a copy of this node's key, the sender's clock, and what the author did."""
        age = entry.age_ms / 1000
        try:
            announcement = self.decode(entry.announcement, max_packets=self.run.slots)
        except Malformed:
            return Outcome.MALFORMED
        if announcement.run_id != self.run_id:
            return Outcome.OTHER_RUN
        if announcement.packets.largest > self.run.packet_bytes_max:
            return Outcome.MALFORMED
        author = announcement.author
        if author == self.own:
            fresh = abs(unix_seconds() - announcement.issued_at) <= REPLAY_FENCE
            self.copied = self.copied or (fresh and self._of_a_copy(announcement, first_sender))
            return Outcome.UNWANTED
        if self.reputation.banned(author):
            return Outcome.UNWANTED
        if not self.welcomes(author):
            return Outcome.NO_MEMBER
        if author == first_sender and not self.run.common:  # with common rows `issued_at` is the time of the draw
            self.sessions[first_sender].note_time(announcement.issued_at + age)
        if abs(unix_seconds() - announcement.issued_at) > REPLAY_FENCE:
            return Outcome.REPLAYED
        if self.run.common and not self._answered.in_time(announcement, age):
            return Outcome.OLD
        if not self._checks.take(first_sender):
            return Outcome.UNCHECKED
        if not announcement.verify():
            return Outcome.FORGED
        if not self.reputation.rounds.follows(author, announcement.round):
            return Outcome.TOO_FAR_AHEAD
        held = self._mask(entry.held)
        outcome = self.table.add(
            announcement,
            entry.announcement,
            age=age,
            first_sender=first_sender,
            held=held,
        )
        if outcome is Outcome.EQUIVOCATION:
            self._checks.take(first_sender, CONTRADICTION_CHECKS)
            self.reputation.equivocated(author)
        elif outcome is Outcome.OLD:
            self.reputation.late(author)
        elif outcome is Outcome.NEW:
            self._mark_done(announcement)
        return outcome

    def _of_a_copy(self, announcement: Announcement, first_sender: bytes) -> bool:
        """Whether this node's key has signed what this node has not made: another process uses a copy of its home.

        What is not in the table any more counts as made here up to the newest round, as earlier starts made rounds too.
        """
        known = self.table.get(self.own, announcement.round)
        if known is not None:
            made = known.announcement.packets == announcement.packets
        else:
            made = self._newest is None or announcement.round <= self._newest.announcement.round
        if made or not self._checks.take(first_sender):
            return False
        return announcement.verify()  # else anybody could claim it

    def _mask(self, held: bytes) -> int:
        """Read a bit mask of held packets, at most as long as a run has slots, to bound the memory of mentions."""
        return int.from_bytes(held[: (self.run.slots + 7) // 8], "little")

    def _mark_done(self, announcement: Announcement) -> None:
        """Mark the packets of a new announcement that need not be pulled: those known already, those that teach nothing
        by the hint, and parts that do not count. Once for each, when it enters the table."""
        known = self.table.get(announcement.author, announcement.round)
        if known is not None:
            known.done |= self._answered.refused(announcement)
            for index, ref in enumerate(announcement.packets):
                seen = self.seen(announcement.author, announcement.round, ref.slot)
                if seen or not teaches(self.run, ref.right):
                    known.done |= 1 << index
                if seen and self.holds(ref.digest):
                    known.obtained(1 << index)


def _told(message: Message) -> Told:
    """The ids of the announcements of which a message tells, whole or mentioned."""
    whole = [announcement_id(entry.announcement) for entry in message.entries]
    mentioned = [mention.id for mention in message.mentions]
    return Told(whole + mentioned)


def _held(known: Known) -> bytes:
    """The packets that this node holds, as a bit mask in bytes, the lowest first; empty if it holds none."""
    return known.have.to_bytes((known.have.bit_length() + 7) // 8, "little")
