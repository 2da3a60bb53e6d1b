"""Push–pull gossip of announcements: what to tell, and what to make of what one is told."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from ftis_node.run import Run
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.announcement import Announcement, AnnouncementError, decode_announcement
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.limits import OWN, Limits
from ftis_node.swarm.table import Heard, Known, Table, announcement_id

PUSHED = 6  # so many peers get a new announcement of one's own whole; they cannot know it yet
LACKING_MAX = 256  # ids remembered of those that one peer mentioned
PEERS_MAX = 256
DEALT_MAX = 4096
ASKED_SECONDS = 5.0  # after which somebody else is asked for an announcement that did not come
# `issued_at` only fences replays; freshness is the age, which needs no common clock.
REPLAY_FENCE = 3 * 3600.0
QUARANTINE_SECONDS = 600.0
QUARANTINED_MAX = 1024

logger = logging.getLogger(__name__)


class Gossip:
    """The announcement table, and the exchanges that fill it.

    An announcement goes from node to node once: an exchange mentions ids, eight bytes each, and who lacks one asks for
    it. `ask` opens an exchange, `answer` answers, `take` reads the answer and says what to send next, if anything.
    """

    def __init__(
        self,
        table: Table,
        run: Run,
        own: bytes,
        seen: Callable[[bytes, int, int], bool],
        news: Callable[[], None],
        decode: Callable[..., Announcement] = decode_announcement,
    ) -> None:
        """
        Args:
            own: this node's 38-byte peer id.
            seen: whether a group (author, round, slot) was dealt with before, also in an earlier life.
            news: told when there may be more to pull.
            decode: reads an announcement; a simulation of many nodes reads each only once.
        """
        self.table = table
        self.counts: Counter[str] = Counter()
        self._run = run
        self._run_id = run.id
        self._own = own
        self._seen = seen
        self._news = news
        self._decode = decode
        self._quarantine: dict[bytes, tuple[float, str]] = {}
        self._newest: Known | None = None
        self._lacking: dict[bytes, dict[int, None]] = {}  # peer → ids that it mentioned and this node lacks
        self._asked: dict[int, float] = {}  # id → until when nobody else is asked for it
        self._unsure: dict[bytes, None] = {}  # peers whose last exchange failed
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
        entries, mentions = self._tell(peer, limits)
        wanted, again = self._want(peer, limits), peer in self._unsure
        return ftis_pb2.ExchangeRequest(entries=entries, mentions=mentions, wanted=wanted, again=again)

    def answer(self, request: ftis_pb2.ExchangeRequest, peer: bytes, limits: Limits = OWN) -> ftis_pb2.ExchangeResponse:
        """Takes in what a peer sent, and answers."""
        if request.again:
            self.table.untell(peer)
        self._hear(request, peer)
        told, mentions = self._tell(peer, limits)
        given = self._give(request.wanted, peer, limits.entries - len(told))
        return ftis_pb2.ExchangeResponse(entries=[*told, *given], mentions=mentions, wanted=self._want(peer, limits))

    def take(
        self, request: ftis_pb2.ExchangeRequest, answer: ftis_pb2.ExchangeResponse, peer: bytes, limits: Limits = OWN
    ) -> ftis_pb2.ExchangeRequest | None:
        """Takes in an answer; returns what is to be asked next, None if the two are through."""
        self._unsure.pop(peer, None)
        self._hear(answer, peer)
        self._ask_others(request)
        entries, wanted = self._give(answer.wanted, peer, limits.entries), self._want(peer, limits)
        return ftis_pb2.ExchangeRequest(entries=entries, wanted=wanted) if entries or wanted else None

    def failed(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> None:
        """No answer came, so either side may have missed what the other told: the next exchange begins anew."""
        self._ask_others(request)
        self.table.untell(peer)
        _remember(self._unsure, peer, PEERS_MAX, None)

    def forget_peer(self, peer: bytes) -> None:
        """A peer that comes back may have forgotten everything."""
        self.table.forget_peer(peer)
        self._lacking.pop(peer, None)
        self._unsure.pop(peer, None)

    def quarantine(self, author: bytes, reason: str) -> None:
        """Ignores an author for ten minutes."""
        if author not in self._quarantine:
            logger.warning("Author %s is quarantined: %s", peer_id(author), reason)
        self._quarantine.pop(author, None)
        while len(self._quarantine) >= QUARANTINED_MAX:  # identities are free; the one that would end first makes room
            del self._quarantine[next(iter(self._quarantine))]
        self._quarantine[author] = (time.monotonic() + QUARANTINE_SECONDS, reason)
        self.table.forget_author(author)

    def quarantined(self, author: bytes) -> str | None:
        """Why an author is ignored, or None if it is not."""
        entry = self._quarantine.get(author)
        if entry is None:
            return None
        if entry[0] < time.monotonic():
            del self._quarantine[author]
            return None
        return entry[1]

    # --- what is told ---------------------------------------------------------------------------------------------

    def _tell(self, peer: bytes, limits: Limits) -> tuple[list[ftis_pb2.Entry], list[ftis_pb2.Mention]]:
        """One's own newest announcement whole if hardly anybody can know it yet; of others, a sample is mentioned."""
        entries: list[ftis_pb2.Entry] = []
        newest = self._newest if self._newest in self.table else None
        if newest is not None and peer not in newest.told and len(newest.told) < PUSHED:
            entries = [self._entry(newest, peer)]
        mentions = []
        for known in self.table.sample(limits.mentions, peer):
            known.told[peer] = known.have
            mentions.append(ftis_pb2.Mention(id=known.id, held=_held(known)))
        return entries, mentions

    def _give(self, wanted: Iterable[int], peer: bytes, most: int) -> list[ftis_pb2.Entry]:
        found = (self.table.find(id) for id in islice(wanted, most))
        return [self._entry(known, peer) for known in found if known is not None]

    def _entry(self, known: Known, peer: bytes) -> ftis_pb2.Entry:
        known.told[peer] = known.have
        age = self.table.clock() - known.born
        return ftis_pb2.Entry(announcement=known.data, age_ms=max(0, int(age * 1000)), held=_held(known))

    def _want(self, peer: bytes, limits: Limits) -> list[int]:
        """Ids that `peer` mentioned, that are lacking still, and that nobody else is being asked for."""
        now = self.table.clock()
        if len(self._asked) > DEALT_MAX:
            self._asked = {id: until for id, until in self._asked.items() if until > now}
        lacking = self._lacking.get(peer, {})
        wanted: list[int] = []
        for id in list(lacking):
            if id in self._dealt or self.table.find(id) is not None:
                del lacking[id]
            elif len(wanted) < limits.entries and self._asked.get(id, now) <= now:
                del lacking[id]
                self._asked[id] = now + ASKED_SECONDS
                wanted.append(id)
        if not lacking:
            self._lacking.pop(peer, None)
        return wanted

    def _ask_others(self, request: ftis_pb2.ExchangeRequest) -> None:
        """For what was asked for and did not come."""
        for id in request.wanted:
            self._asked.pop(id, None)

    # --- what is heard --------------------------------------------------------------------------------------------

    def _hear(self, message: ftis_pb2.ExchangeRequest | ftis_pb2.ExchangeResponse, peer: bytes) -> None:
        news = False
        for entry in islice(message.entries, OWN.entries):
            outcome = self._merge(entry, peer)
            self.counts[outcome] += 1
            news |= outcome == "new"
        for mention in islice(message.mentions, OWN.mentions):
            news |= self._note(mention, peer)
        if len(message.entries) > OWN.entries or len(message.mentions) > OWN.mentions:
            self.counts["over the limits"] += 1
        if news:
            self._news()

    def _note(self, mention: ftis_pb2.Mention, peer: bytes) -> bool:
        """Whether there is somebody more who holds something."""
        known = self.table.find(mention.id)
        if known is not None:
            return self.table.note_holder(known, peer, _mask(mention.held)) and not known.settled
        if mention.id not in self._dealt:
            _remember(self._lacking, peer, PEERS_MAX, {})
            _remember(self._lacking[peer], mention.id, LACKING_MAX, None)
        return False

    def _merge(self, entry: ftis_pb2.Entry, introducer: bytes) -> str:
        id = announcement_id(entry.announcement)
        self._asked.pop(id, None)
        known = self.table.find(id)
        if known is not None and known.data == entry.announcement:
            self.table.note_holder(known, introducer, _mask(entry.held))
            return "known"
        outcome = self._read(entry, introducer)
        if outcome not in ("new", "old"):  # its age is what the teller says; another may tell the truth
            _remember(self._dealt, id, DEALT_MAX, None)
        return outcome

    def _read(self, entry: ftis_pb2.Entry, introducer: bytes) -> str:
        try:
            announcement = self._decode(entry.announcement, max_packets=self._run.slots)
        except AnnouncementError:
            return "malformed"
        if announcement.run_id != self._run_id:
            return "other run"
        if announcement.author == self._own or self.quarantined(announcement.author):
            return "own or quarantined"
        if abs(time.time() - announcement.issued_at) > REPLAY_FENCE:
            return "replayed"
        if not announcement.verify():
            return "forged"
        outcome = self.table.add(
            announcement,
            entry.announcement,
            age=entry.age_ms / 1000,
            introducer=introducer,
            held=_mask(entry.held),
        )
        if outcome is Heard.EQUIVOCATION:
            self.quarantine(announcement.author, "it signed two different announcements of one round")
        elif outcome is Heard.NEW:
            self._mark_done(announcement)
        return outcome.name.lower()

    def _mark_done(self, announcement: Announcement) -> None:
        known = self.table.get(announcement.author, announcement.round)
        if known is not None:
            for index, ref in enumerate(announcement.packets):
                if self._seen(announcement.author, announcement.round, ref.slot):
                    known.done |= 1 << index


def _held(known: Known) -> bytes:
    """The packets that this node holds, as a bit mask; empty if it holds none."""
    return known.have.to_bytes((known.have.bit_length() + 7) // 8, "little")


def _mask(held: bytes) -> int:
    return int.from_bytes(held[:512], "little")


def _remember(memory: dict[Any, Any], key: bytes | int, most: int, value: object) -> None:
    """Adds what is not there yet; the oldest makes room."""
    if key not in memory:
        while len(memory) >= most:
            del memory[next(iter(memory))]
        memory[key] = value
