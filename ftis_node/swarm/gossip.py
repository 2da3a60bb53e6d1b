"""Push–pull gossip of announcements: what to tell, and what to make of what one is told."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from ftis_node.config.run import Run
from ftis_node.host.clocks import unix_seconds
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.announcement import Announcement, AnnouncementError, decode_announcement
from ftis_node.swarm.bounded import remember
from ftis_node.swarm.budgets import Budgets
from ftis_node.swarm.limits import OWN, Limits
from ftis_node.swarm.standing import Standing
from ftis_node.swarm.table import Heard, Known, Table, announcement_id

PUSHED = 6  # so many peers get a new announcement of one's own whole; they cannot know it yet
LACKING_MAX = 512  # ids remembered of those that one peer mentioned
MENTIONERS_MAX = 256
UNSURE_MAX = 256
IDS_MAX = 4096
ASKS_MAX = 3  # of one peer for one announcement
# Who knows so many announcements with something left to pull asks for a few more at a time only: a large swarm makes
# far more than any node can use.
ENOUGH_OPEN = 128
A_FEW = 4
GIVEN_BYTES = 256 << 10  # of announcements in one message; a run may have very large ones
COUNT_SECONDS = 1.0
CHECKS_A_SECOND, CHECKS_AT_ONCE = 100.0, 2048.0  # of signatures, for one peer
# An announcement whose author contradicts itself costs its introducer so many checks. An honest node passes one on in
# good faith, so this is a matter of rate and not of blame.
CONTRADICTION_CHECKS = 100.0
ASKED_SECONDS = 5.0  # that somebody else waits, once, while one peer is asked for an announcement
# `issued_at` only fences replays; freshness is the age, which needs no common clock.
REPLAY_FENCE = 3 * 3600.0


@dataclass(slots=True)
class Lacking:
    """What a peer mentioned. held: bit mask of the packets that it holds; born: when it was signed, as the peer says,
    None if it does not; asks: how often it was asked for it."""

    held: int
    born: float | None
    asks: int = 0


class Gossip:
    """The announcement table, and the exchanges that fill it.

    An announcement goes whole to a node about once: an exchange mentions ids, eight bytes each, and who lacks one asks
    for it. `ask` opens an exchange, `answer` answers, `take` reads the answer and says what to send next, if anything.
    """

    def __init__(
        self,
        table: Table,
        run: Run,
        own: bytes,
        standing: Standing,
        seen: Callable[[bytes, int, int], bool],
        news: Callable[[], None],
        decode: Callable[..., Announcement] = decode_announcement,
    ) -> None:
        """
        Args:
            own: this node's 38-byte peer id.
            standing: who is left alone; its bans clear the table.
            seen: whether a group (author, round, slot) was dealt with before, also in an earlier life.
            news: told when there may be more to pull.
            decode: reads an announcement; a simulation of many nodes reads each only once.
        """
        self.table = table
        self.counts: Counter[str] = Counter()
        self._run = run
        self._run_id = run.id
        self._own = own
        self._standing = standing
        standing.banned_author.append(table.forget_author)
        self._seen = seen
        self._news = news
        self._decode = decode
        self.told_time: list[Callable[[bytes, float], None]] = []  # told of the time that a peer says it is
        self._newest: Known | None = None
        self._lacking: dict[bytes, dict[int, Lacking]] = {}  # by peer, what it mentioned and this node lacks
        self._asked: dict[int, float] = {}  # id → until when nobody else is asked for it; once asked, never again
        self._open, self._counted = 0, -math.inf  # announcements with something left to pull, and when that was counted
        self._checks = Budgets(table.clock, CHECKS_A_SECOND, CHECKS_AT_ONCE)
        self._unsure: dict[bytes, None] = {}  # peers that may have told what did not arrive
        self._owed: dict[bytes, int] = {}  # how many announcements a peer that asked was asked for in turn
        self._dealt: dict[int, None] = {}  # ids of announcements that are not wanted, whoever mentions them

    def announce(self, announcement: Announcement) -> None:
        """Adds an announcement of one's own, all of whose packets are held."""
        self.table.add(announcement, announcement.encode(), age=0.0, introducer=None)
        known = self.table.get(announcement.author, announcement.round)
        if known is not None:
            known.have = known.done = (1 << len(announcement.packets)) - 1
            self._newest = known

    def ask(self, peer: bytes, limits: Limits = OWN) -> ftis_pb2.ExchangeRequest:
        """Opens an exchange: what this node knows and `peer` may not, and what it lacks of what `peer` mentioned."""
        wanted, again = self._want(peer, limits, reserve=True), peer in self._unsure
        pushed, mentions = self._tell(peer, limits, limits.entries)
        return ftis_pb2.ExchangeRequest(entries=pushed, mentions=mentions, wanted=wanted, again=again)

    def answer(self, request: ftis_pb2.ExchangeRequest, peer: bytes, limits: Limits = OWN) -> ftis_pb2.ExchangeResponse:
        """Takes in what a peer sent, and answers."""
        if request.again:
            self.table.untell(peer)
        self._hear(request, peer, self._owed.pop(peer, 0))
        given = self._give(request.wanted, peer, limits)
        pushed, mentions = self._tell(peer, limits, limits.entries - len(given))
        # Whoever asks cannot keep others from being asked: it could do so again and again.
        wanted = self._want(peer, limits, reserve=False)
        if wanted:
            remember(self._owed, peer, len(wanted), MENTIONERS_MAX)
        return ftis_pb2.ExchangeResponse(entries=[*given, *pushed], mentions=mentions, wanted=wanted)

    def take(
        self, request: ftis_pb2.ExchangeRequest, answer: ftis_pb2.ExchangeResponse, peer: bytes, limits: Limits = OWN
    ) -> ftis_pb2.ExchangeRequest | None:
        """Takes in an answer; returns what is to be asked next, None if the two are through."""
        self._unsure.pop(peer, None)
        for id in request.wanted:  # what neither comes now nor is mentioned again, the peer does not have any more
            self._lacking.get(peer, {}).pop(id, None)
        self._hear(answer, peer, len(request.wanted))
        self._ask_others(request)
        entries, wanted = self._give(answer.wanted, peer, limits), self._want(peer, limits, reserve=True)
        return ftis_pb2.ExchangeRequest(entries=entries, wanted=wanted) if entries or wanted else None

    def unsent(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> None:
        """A request will not be sent, or nobody knows whether it arrived: what it tells counts as untold."""
        self._ask_others(request)
        for id in (*(mention.id for mention in request.mentions), *map(_id_of, request.entries)):
            if (known := self.table.find(id)) is not None:
                known.told.pop(peer, None)

    def failed(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> None:
        """No answer came, so this node may have missed what the peer told: the next exchange asks for it again."""
        self.unsent(request, peer)
        remember(self._unsure, peer, None, UNSURE_MAX)

    def forget_peer(self, peer: bytes) -> None:
        """A peer that comes back may have forgotten everything."""
        self.table.forget_peer(peer)

    # --- what is told ---------------------------------------------------------------------------------------------

    def _tell(self, peer: bytes, limits: Limits, room: int) -> tuple[list[ftis_pb2.Entry], list[ftis_pb2.Mention]]:
        """One's own newest announcement whole if hardly anybody can know it yet; of others, a sample is mentioned."""
        pushed: list[ftis_pb2.Entry] = []
        newest = self._newest if self._newest in self.table else None
        if room > 0 and newest is not None and peer not in newest.told and len(newest.told) < PUSHED:
            pushed = [self._entry(newest, peer)]
        mentions = []
        for known in self.table.sample(limits.mentions, peer):
            known.tell(peer)
            age = math.ceil(self.table.clock() - known.born)
            mentions.append(ftis_pb2.Mention(id=known.id, held=_held(known), age=max(1, age)))
        return pushed, mentions

    def _give(self, wanted: Iterable[int], peer: bytes, limits: Limits) -> list[ftis_pb2.Entry]:
        given: list[ftis_pb2.Entry] = []
        size = 0
        for id in dict.fromkeys(islice(wanted, limits.entries)):
            if (known := self.table.find(id)) is None:
                continue
            size += len(known.data)
            if given and size > GIVEN_BYTES:
                known.told.pop(peer, None)  # so it is mentioned again
                continue
            given.append(self._entry(known, peer))
        return given

    def _entry(self, known: Known, peer: bytes) -> ftis_pb2.Entry:
        known.tell(peer)
        age = self.table.clock() - known.born
        return ftis_pb2.Entry(announcement=known.data, age_ms=max(0, int(age * 1000)), held=_held(known))

    def _want(self, peer: bytes, limits: Limits, *, reserve: bool) -> list[int]:
        """Ids that `peer` mentioned, that are lacking still, and that nobody else is being asked for.

        Args:
            reserve: nobody else is asked for them for a while; of each id only once, or a peer that mentions and
                does not give could keep it from this node for good.
        """
        now = self.table.clock()
        mentioned = list(self._lacking.get(peer, {}).items())
        most = limits.entries
        if len(mentioned) > A_FEW and self._enough(now):
            most = min(most, A_FEW)
            mentioned.sort(key=lambda item: not item[1].held)  # first what could be pulled from this very peer
        wanted: list[int] = []
        for id, lacking in mentioned:
            if len(wanted) == most:
                break
            if self._asked.get(id, now) > now:
                continue
            if reserve:
                remember(self._asked, id, now + ASKED_SECONDS, IDS_MAX)
            wanted.append(id)
            lacking.asks += 1
            if lacking.asks == ASKS_MAX:
                del self._lacking[peer][id]
        return wanted

    def _enough(self, now: float) -> bool:
        if now >= self._counted + COUNT_SECONDS:
            self._counted = now
            self._open = sum(not known.settled for known in self.table)
        return self._open >= ENOUGH_OPEN

    def _ask_others(self, request: ftis_pb2.ExchangeRequest) -> None:
        """For what was asked for and did not come."""
        now = self.table.clock()
        for id in request.wanted:
            if id in self._asked:
                self._asked[id] = now

    # --- what is heard --------------------------------------------------------------------------------------------

    def _hear(self, message: ftis_pb2.ExchangeRequest | ftis_pb2.ExchangeResponse, peer: bytes, owed: int) -> None:
        """Takes in a message of a peer that was asked for so many announcements; besides those it gives its own newest
        at most."""
        news = False
        if len(message.entries) > owed + 1:
            self.counts["not asked for"] += len(message.entries) - owed - 1
            remember(self._unsure, peer, None, UNSURE_MAX)  # it takes them for told
        for entry in islice(message.entries, owed + 1):
            outcome = self._merge(entry, peer)
            self.counts[outcome] += 1
            news |= outcome == "new"
        for mention in islice(message.mentions, OWN.mentions):
            news |= self._note(mention, peer)
        if len(message.mentions) > OWN.mentions:
            self.counts["over the limits"] += 1
        if news:
            self._news()

    def _note(self, mention: ftis_pb2.Mention, peer: bytes) -> bool:
        """Whether there is somebody more who holds something."""
        known = self.table.find(mention.id)
        held = self._mask(mention.held)
        born = self.table.clock() - mention.age if mention.age else None
        if known is not None:
            return self.table.note_holder(known, peer, held, born) and not known.settled
        if mention.id not in self._dealt:
            if (forgotten := remember(self._lacking, peer, {}, MENTIONERS_MAX)) is not None:
                remember(self._unsure, forgotten, None, UNSURE_MAX)
            forgotten_id = remember(self._lacking[peer], mention.id, Lacking(held, born), LACKING_MAX)
            if forgotten_id is not None and self._open < ENOUGH_OPEN:
                remember(self._unsure, peer, None, UNSURE_MAX)
        return False

    def _merge(self, entry: ftis_pb2.Entry, introducer: bytes) -> str:
        id = _id_of(entry)
        self._asked.pop(id, None)
        known = self.table.find(id)
        if known is not None and known.data == entry.announcement:
            self.table.note_holder(known, introducer, self._mask(entry.held), self.table.clock() - entry.age_ms / 1000)
            return "known"
        outcome = self._read(entry, introducer)
        if outcome in ("forged", "malformed"):  # honest nodes check what they pass on
            self._standing.lied(introducer, f"passed on {outcome} announcements")
        if outcome in ("old", "over the budget"):  # its age is what the teller says; another may tell the truth
            return outcome
        known = self.table.find(id)
        for peer, lacking in self._lacking.items():
            if (mentioned := lacking.pop(id, None)) is not None and known is not None:
                self.table.note_holder(known, peer, mentioned.held, mentioned.born)
        if outcome != "new":
            remember(self._dealt, id, None, IDS_MAX)
        return outcome

    def _read(self, entry: ftis_pb2.Entry, introducer: bytes) -> str:
        try:
            announcement = self._decode(entry.announcement, max_packets=self._run.slots)
        except AnnouncementError:
            return "malformed"
        if announcement.run_id != self._run_id:
            return "other run"
        if announcement.packets.largest > self._run.packet_bytes_max:
            return "malformed"
        if announcement.author == self._own or self._standing.banned(announcement.author) is not None:
            return "own or banned"
        if announcement.author == introducer:
            for note in self.told_time:
                note(introducer, announcement.issued_at + entry.age_ms / 1000)
        if abs(unix_seconds() - announcement.issued_at) > REPLAY_FENCE:
            return "replayed"
        if not self._checks.take(introducer):
            return "over the budget"
        if not announcement.verify():
            return "forged"
        if not self._standing.rounds.follows(announcement.author, announcement.round):
            return "too far ahead"
        outcome = self.table.add(
            announcement,
            entry.announcement,
            age=entry.age_ms / 1000,
            introducer=introducer,
            held=self._mask(entry.held),
        )
        if outcome is Heard.EQUIVOCATION:
            self._checks.take(introducer, CONTRADICTION_CHECKS)
            self._standing.equivocated(announcement.author)
        elif outcome is Heard.OLD:
            self._standing.late(announcement.author)
        elif outcome is Heard.NEW:
            self._mark_done(announcement)
        return outcome.name.lower()

    def _mask(self, held: bytes) -> int:
        """Of a run's slots and no more, or what is remembered of mentions could be long."""
        return int.from_bytes(held[: (self._run.slots + 7) // 8], "little")

    def _mark_done(self, announcement: Announcement) -> None:
        known = self.table.get(announcement.author, announcement.round)
        if known is not None:
            for index, ref in enumerate(announcement.packets):
                if self._seen(announcement.author, announcement.round, ref.slot):
                    known.done |= 1 << index


def _held(known: Known) -> bytes:
    """The packets that this node holds, as a bit mask; empty if it holds none."""
    return known.have.to_bytes((known.have.bit_length() + 7) // 8, "little")


def _id_of(entry: ftis_pb2.Entry) -> int:
    return announcement_id(entry.announcement)
