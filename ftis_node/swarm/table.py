"""What is known of who made what: fresh announcements, their ages, and who holds which packet."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from ftis_node.packet import Group
from ftis_node.swarm.announcement import Announcement, PacketRef
from ftis_node.swarm.bounded import make_room
from ftis_node.swarm.pool import Newcomers
from ftis_node.swarm.shares import Pile, Shares

CAPACITY = 2048
BYTES_MAX = 8 << 20  # of all announcements together, as sent and as packed
# Nobody may fill the table alone: announcements of one author, and those that came through one introducer, take at most
# this part of it, by number and by bytes.
INTRODUCER_PART = 8
# Nor may all strangers together: authors with a record lose nothing to them until they have more than half of it.
RECORDED_PART = 2
VICTIMS = 8  # drawn, of which the introducer with most loses one: floods of a few make room for themselves
# Of the packets of newcomers, one in so many is of an author drawn by chance; the rest of those next to a record.
EXPLORED_PART = 4
MAX_TRIES = 3
PROBED = 4  # times as many as a sample has are looked at before all are
PEERS_MAX = 256  # remembered of one announcement
# By so much of `max_age`, or so many seconds (mentions round to whole ones), two nodes' ages of an announcement may
# differ: each hop's delay makes them a little too small, and as the smallest counts that anybody tells, those add up.
AGE_SLACK, AGE_SLACK_SECONDS = 0.05, 1.5
TOLD_OTHERWISE = -1  # in place of what a peer was told: it knows another age


class Heard(Enum):
    """What an announcement turned out to be."""

    NEW = auto()
    KNOWN = auto()
    OLD = auto()
    EQUIVOCATION = auto()


def announcement_id(data: bytes) -> int:
    """By what an exchange mentions an announcement: a u64 of its bytes."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


@dataclass(eq=False)
class Known:
    """An announcement in the table.

    born: when the author signed it, as far as is known. heard: when this node first heard of it. Both on this node's
    clock (`boot_seconds`).
    """

    announcement: Announcement
    data: bytes
    born: float
    heard: float
    introducer: bytes | None
    holders: dict[bytes, int] = field(default_factory=dict)  # peer → bit mask over the packets
    have: int = 0  # bit mask of the packets that this node holds itself
    told: dict[bytes, int] = field(default_factory=dict)  # peers that know it → what this node told them that it holds
    done: int = 0  # bit mask of the packets that it needs not pull (any more)
    pulling: int = 0  # bit mask of the packets that are on their way
    tries: Counter[int] = field(default_factory=Counter)  # failed fetches, by packet
    id: int = field(init=False)
    size: int = field(init=False)  # bytes
    vouched: bool = field(default=False, init=False)  # its author had a record, or is this node, when last looked at
    place: int = field(default=-1, init=False)  # in its pile

    def __post_init__(self) -> None:
        self.id = announcement_id(self.data)
        self.size = len(self.data) + len(self.announcement.packets.packed)

    @property
    def key(self) -> tuple[bytes, int]:
        return (self.announcement.author, self.announcement.round)

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to pull of it."""
        return (self.done | self.pulling).bit_count() == len(self.announcement.packets)

    @property
    def unsettled(self) -> int:
        """Which packets are left to pull (a bit mask)."""
        return ((1 << len(self.announcement.packets)) - 1) & ~(self.done | self.pulling)

    def held_among(self, peers: Collection[bytes]) -> int:
        """Which packets at least one of these peers holds (a bit mask, -1 for all)."""
        if self.announcement.author in peers:
            return -1
        mask = 0
        for peer, held in self.holders.items():
            if peer in peers:
                mask |= held
        return mask

    def tell(self, peer: bytes) -> None:
        """`peer` is being told of it, and what this node holds of it."""
        make_room(self.told, peer, PEERS_MAX)
        self.told[peer] = self.have

    def heard_from(self, peer: bytes, held: int) -> bool:
        """`peer` knows it, and holds these of its packets too (a bit mask); returns whether that is news."""
        for memory in (self.told, self.holders):
            make_room(memory, peer, PEERS_MAX)
        self.told.setdefault(peer, 0)
        before = self.holders.get(peer, 0)
        self.holders[peer] = before | held & ((1 << len(self.announcement.packets)) - 1)
        return self.holders[peer] != before

    def dated(self, peer: bytes, born: float, slack: float) -> None:
        """`peer`, which was heard from, says that it was signed at `born`, on this node's clock (`boot_seconds`).

        Ages are not signed. The smallest that anybody tells counts, or whoever tells a great one could make it expire;
        but it was not signed later than this node heard of it, so nobody can keep it alive for good either. Who knows a
        greater one, by more than `slack` seconds, is told again.
        """
        newest = min(born, self.heard)
        if newest > self.born + slack:
            self.born = newest
            self.told = dict.fromkeys(self.told, TOLD_OTHERWISE) | {peer: self.told[peer]}
        elif born < self.born - slack:
            self.told[peer] = TOLD_OTHERWISE

    def held_by(self, peer: bytes, index: int) -> bool:
        return peer == self.announcement.author or bool(self.holders.get(peer, 0) >> index & 1)

    def held_no_more(self, peer: bytes, index: int) -> None:
        """`peer` did not deliver this packet, so others are asked from now on (and the author, who made it)."""
        self.holders[peer] = self.holders.get(peer, 0) & ~(1 << index)


@dataclass(frozen=True, eq=False)
class Target:
    """A packet worth pulling: the announcement that promised it, and which of its packets."""

    known: Known
    index: int

    @property
    def ref(self) -> PacketRef:
        return self.known.announcement.packets[self.index]

    @property
    def key(self) -> tuple[bytes, int, int]:
        return (self.known.announcement.author, self.known.announcement.round, self.ref.slot)

    def tried(self, holder: bytes) -> None:
        """`holder` did not deliver it; after three tries nobody is asked any more."""
        self.known.held_no_more(holder, self.index)
        self.known.tries[self.index] += 1
        if self.known.tries[self.index] >= MAX_TRIES:
            self.known.done |= 1 << self.index


@dataclass(frozen=True, eq=False)
class Arrival:
    """An admitted group, its packet's bytes, and its birth on this node's clock (`boot_seconds`)."""

    group: Group
    body: bytes
    born: float


class Table:
    """A bounded set of announcements, one for each (author, round).

    Of twice as many that have left it remembers when this node first heard of them.
    """

    def __init__(
        self,
        max_age: float,
        clock: Callable[[], float],
        rng: random.Random | None = None,
        capacity: int = CAPACITY,
        recorded: Callable[[bytes], bool] = lambda author: False,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """
        Args:
            recorded: whether an author has a record.
        """
        self.max_age = max_age
        self.capacity = capacity
        self.clock = clock
        self._recorded = recorded
        self._bytes_max = bytes_max
        self._bytes = 0
        self._rng = rng or random.Random()
        self._known: dict[tuple[bytes, int], Known] = {}
        self._by_id: dict[int, Known] = {}
        self._strange, self._vouched = Pile(), Pile()  # the latter: one's own, and of authors with a record
        part = max(1, capacity // INTRODUCER_PART), bytes_max // INTRODUCER_PART
        self._introduced, self._authors = Shares(*part), Shares(*part)
        self._eldest = math.inf  # nothing here was born before
        self._left: dict[tuple[bytes, int], float] = {}  # when this node first heard of those that are here no more

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, known: object) -> bool:
        return isinstance(known, Known) and self._by_id.get(known.id) is known

    def __iter__(self) -> Iterator[Known]:
        return iter(list(self._known.values()))

    def get(self, author: bytes, round: int) -> Known | None:
        return self._known.get((author, round))

    def find(self, id: int) -> Known | None:
        """By `announcement_id`."""
        return self._by_id.get(id)

    def add(
        self, announcement: Announcement, data: bytes, *, age: float, introducer: bytes | None, held: int = 0
    ) -> Heard:
        """Takes in an announcement whose signature is sound.

        Args:
            age: seconds since it was signed, as the introducer says; of several copies, see `Known.dated`.
            introducer: the peer it came from; None if it is one's own.
            held: bit mask of the packets that the introducer says it holds.
        """
        now = self.clock()
        key = (announcement.author, announcement.round)
        heard = self._left.get(key, now)
        born = min(heard, now - age)
        if now - born > self.max_age:
            return Heard.OLD
        known = self._known.get(key)
        if known is not None:
            if known.announcement.packets != announcement.packets:
                return Heard.EQUIVOCATION
            if introducer is not None:
                self.note_holder(known, introducer, held, born)
            return Heard.KNOWN
        known = Known(announcement, data, born, heard, introducer)
        self._make_room(known)
        self._left.pop(key, None)
        self._put(known)
        if introducer is not None:
            self.note_holder(known, introducer, held, born)
        return Heard.NEW

    def sample(self, count: int, peer: bytes) -> list[Known]:
        """A random sample of what is fresh and, as far as is known, new to `peer`; then of what this node has more of
        than it told `peer`."""
        self.expire()
        if len(self._known) > PROBED * count:  # in a flood almost anything is new to anybody
            probed = self._draw(PROBED * count)
            if len(new := [known for known in probed if peer not in known.told]) >= count:
                return new[:count]
        new = [known for known in self._known.values() if peer not in known.told]
        if len(new) >= count:
            return self._rng.sample(new, count)
        more = [known for known in self._known.values() if known.told.get(peer, known.have) != known.have]
        return new + self._rng.sample(more, min(count - len(new), len(more)))

    def recent_authors(self, seconds: float) -> set[bytes]:
        """Authors of announcements no older than `seconds`."""
        limit = self.clock() - seconds
        return {k.announcement.author for k in self._known.values() if k.born >= limit}

    def forget_author(self, author: bytes) -> None:
        for known in self._authors.of(author):
            self._remove(known)

    def forget_peer(self, peer: bytes) -> None:
        """A peer that comes back may have forgotten everything."""
        for known in self._known.values():
            known.holders.pop(peer, None)
            known.told.pop(peer, None)

    def untell(self, peer: bytes) -> None:
        """A peer may have missed what this node told it."""
        for known in self._known.values():
            known.told.pop(peer, None)

    def expire(self) -> None:
        """Drops what is too old; all is looked through only when something may be."""
        limit = self.clock() - self.max_age
        if self._eldest >= limit:
            return
        for known in [known for known in self._known.values() if known.born < limit]:
            self._remove(known)
        self._eldest = min((known.born for known in self._known.values()), default=math.inf)

    def choose(self, count: int, wanted: Callable[[Known], int], newcomers: Newcomers | None = None) -> list[Target]:
        """Up to `count` packets to pull: of two random authors the fresher one's, one an author, again until enough.

        In simulation this spreads load and influence where "freshest first" takes everything from one author. Where the
        draw falls on a newcomer, three times in four the one nearest to a record has its turn: if all newcomers of a
        large swarm took turns, none would ever get one.

        Args:
            wanted: which packets of an announcement may be chosen (a bit mask, -1 for all). It is asked of everything
                in the table that is not settled, so it should be quick.
        """
        newcomers = newcomers or Newcomers()
        self.expire()
        by_author: dict[bytes, list[tuple[Known, int]]] = {}
        open_ones = [known for known in self._known.values() if not known.settled]
        found = [(known, wanted(known) & known.unsettled) for known in open_ones]
        for known, mask in sorted((pair for pair in found if pair[1]), key=lambda pair: pair[0].born):
            by_author.setdefault(known.announcement.author, []).append((known, mask))
        strangers = {author for author in by_author if newcomers.is_one(author)}
        chosen: list[Target] = []
        turn: list[bytes] = []
        begun: list[bytes] = []
        while len(chosen) < count:
            shut = strangers if newcomers.full else set()
            turn = [author for author in turn if author not in shut]
            if not turn:
                turn = [author for author in by_author if author not in shut]
                begun = sorted((a for a in turn if a in strangers and newcomers.record(a)), key=newcomers.record)
            if not turn:
                break
            pair = self._rng.sample(turn, min(2, len(turn)))
            author = max(pair, key=lambda a: by_author[a][-1][0].born)
            if author in strangers and self._rng.randrange(EXPLORED_PART):
                author = next((a for a in _popped(begun) if a in turn), author)
            turn.remove(author)
            newcomers.took(author)
            known, mask = by_author[author].pop()  # sorted by birth: the last is the freshest
            index = mask.bit_length() - 1
            chosen.append(Target(known, index))
            if mask := mask & ~(1 << index):
                by_author[author].append((known, mask))
            if not by_author[author]:
                del by_author[author]
        return chosen

    def note_holder(self, known: Known, peer: bytes, held: int, born: float | None) -> bool:
        """`peer` knows this one, holds these of its packets too, and says that it was signed at `born` (None: it says
        nothing); returns whether it holds more than was known."""
        news = known.heard_from(peer, held)
        if born is not None:
            known.dated(peer, born, max(AGE_SLACK_SECONDS, AGE_SLACK * self.max_age))
        return news

    # --- room -----------------------------------------------------------------------------------------------------

    def _make_room(self, new: Known) -> None:
        """In its author's share, in its introducer's, and in the table."""
        author = new.announcement.author
        while self._authors.full(author, new.size):
            self._remove(min(self._authors.of(author), key=lambda known: known.born))
        while new.introducer is not None and self._introduced.full(new.introducer, new.size):
            self._displace(new.introducer)
        while self._known and (len(self._known) >= self.capacity or self._bytes + new.size > self._bytes_max):
            self._remove(self._victim())

    def _victim(self) -> Known:
        """One of the strangers', unless those with a record have more than half; and of a few drawn by chance, of the
        introducer that has most here."""
        while len(self._strange) and len(self._vouched) <= len(self._known) // RECORDED_PART:
            drawn = self._rng.choices(self._strange.all, k=VICTIMS)
            known = max(drawn, key=lambda one: self._introduced.count(one.introducer))
            if not self._vouch(known):
                return known
            self._strange.take(known)  # its author has got a record since
            self._vouched.put(known)
            known.vouched = True
        return self._rng.choice(self._vouched.all)

    def _vouch(self, known: Known) -> bool:
        return known.introducer is None or self._recorded(known.announcement.author)

    def _displace(self, introducer: bytes) -> None:
        """Its own oldest makes room for its newest, that of an author with a record last. What another peer has told
        too and has room for is that one's from now on: or who tells first of what others made, and then of much, would
        make it vanish."""
        oldest = min(self._introduced.of(introducer), key=lambda known: (known.vouched, known.born))
        full = self._introduced.full
        others = (peer for peer in oldest.holders if peer != introducer and not full(peer, oldest.size))
        if (heir := next(others, None)) is None:
            self._remove(oldest)
            return
        self._introduced.take(introducer, oldest)
        self._introduced.put(heir, oldest)
        oldest.introducer = heir

    def _draw(self, count: int) -> list[Known]:
        """So many different ones, by chance."""
        strange, vouched = self._strange.all, self._vouched.all
        drawn = self._rng.sample(range(len(strange) + len(vouched)), count)
        return [strange[at] if at < len(strange) else vouched[at - len(strange)] for at in drawn]

    def _put(self, known: Known) -> None:
        self._known[known.key] = self._by_id[known.id] = known
        known.vouched = self._vouch(known)
        (self._vouched if known.vouched else self._strange).put(known)
        self._authors.put(known.announcement.author, known)
        if known.introducer is not None:
            self._introduced.put(known.introducer, known)
        self._eldest = min(self._eldest, known.born)
        self._bytes += known.size

    def _remove(self, known: Known) -> None:
        del self._known[known.key]
        (self._vouched if known.vouched else self._strange).take(known)
        make_room(self._left, known.key, 2 * self.capacity)
        self._left[known.key] = known.heard
        if self._by_id.get(known.id) is known:  # whoever signs for long finds two of one id
            del self._by_id[known.id]
        self._authors.take(known.announcement.author, known)
        if known.introducer is not None:
            self._introduced.take(known.introducer, known)
        self._bytes -= known.size


def _popped(authors: list[bytes]) -> Iterator[bytes]:
    """Takes them from the end, one by one."""
    while authors:
        yield authors.pop()
