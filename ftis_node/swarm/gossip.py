"""Push–pull gossip of announcements: what to tell, and what to make of what one is told."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from ftis_node.run import Run
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.announcement import Announcement, AnnouncementError, decode_announcement
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.table import Heard, Known, Table

MAX_ENTRIES = 32
# `issued_at` only fences replays; freshness is the age, which needs no common clock.
REPLAY_FENCE = 3 * 3600.0
QUARANTINE_SECONDS = 600.0
QUARANTINED_MAX = 1024

logger = logging.getLogger(__name__)


class Gossip:
    """The announcement table and its two directions."""

    def __init__(
        self,
        table: Table,
        run: Run,
        own: bytes,
        seen: Callable[[bytes, int, int], bool],
        decode: Callable[..., Announcement] = decode_announcement,
    ) -> None:
        """
        Args:
            own: this node's 38-byte peer id.
            seen: whether a group (author, round, slot) was dealt with before, also in an earlier life.
            decode: reads an announcement; a simulation of many nodes reads each only once.
        """
        self.table = table
        self.counts: Counter[str] = Counter()
        self._run = run
        self._run_id = run.id
        self._own = own
        self._seen = seen
        self._decode = decode
        self._quarantine: dict[bytes, tuple[float, str]] = {}
        self._newest: Known | None = None

    def announce(self, announcement: Announcement) -> None:
        """Adds an announcement of one's own, all of whose packets are held."""
        self.table.add(announcement, announcement.encode(), age=0.0, introducer=None)
        known = self.table.get(announcement.author, announcement.round)
        if known is not None:
            known.have = known.done = (1 << len(announcement.packets)) - 1
            self._newest = known

    def offer(self, peer: bytes, now: float) -> tuple[list[Known], list[ftis_pb2.Entry]]:
        """What to tell a peer: a random sample of what is fresh and new to it, one's own newest always among it.

        Each entry carries the announcement's age and which of its packets this node holds. Once it is sure that the
        peer got them, `told` must be called with what this returned first.
        """
        known = self.table.sample(MAX_ENTRIES, peer)
        if self._newest is not None and self._newest not in known and peer not in self._newest.told:
            known = [self._newest, *known[: MAX_ENTRIES - 1]]
        return known, [
            ftis_pb2.Entry(
                announcement=k.data,
                age_ms=max(0, int((now - k.born) * 1000)),
                held=k.have.to_bytes((len(k.announcement.packets) + 7) // 8, "little"),
            )
            for k in known
        ]

    def told(self, peer: bytes, known: Iterable[Known]) -> None:
        """Notes that a peer got these, so that it is not told again."""
        for entry in known:
            entry.told.add(peer)

    def merge(self, entries: Iterable[ftis_pb2.Entry], introducer: bytes) -> int:
        """Takes in what a peer told; returns how many announcements were new."""
        new = 0
        for number, entry in enumerate(entries):
            if number >= MAX_ENTRIES:
                self.counts["entries over the limit"] += 1
                break
            outcome = self._merge_one(entry, introducer)
            self.counts[outcome] += 1
            new += outcome == "new"
        return new

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

    def _merge_one(self, entry: ftis_pb2.Entry, introducer: bytes) -> str:
        held, age = int.from_bytes(entry.held[:512], "little"), entry.age_ms / 1000
        try:
            announcement = self._decode(entry.announcement, max_packets=self._run.slots)
        except AnnouncementError:
            return "malformed"
        if announcement.run_id != self._run_id:
            return "other run"
        if announcement.author == self._own or self.quarantined(announcement.author):
            return "own or quarantined"
        known = self.table.get(announcement.author, announcement.round)
        if known is None or known.data != entry.announcement:  # else the signature was checked before
            if abs(time.time() - announcement.issued_at) > REPLAY_FENCE:
                return "replayed"
            if not announcement.verify():
                return "forged"
        outcome = self.table.add(announcement, entry.announcement, age=age, introducer=introducer, held=held)
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
