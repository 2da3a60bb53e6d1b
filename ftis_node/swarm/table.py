"""The announcement table: fresh announcements, their ages, and the holders of each packet."""

import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import KW_ONLY, dataclass, field

from ftis_node.host.clocks import Clock
from ftis_node.swarm.announcement import Announcement
from ftis_node.swarm.choosing import Offer, choose, choose_by_row
from ftis_node.swarm.identity import OfPeer
from ftis_node.swarm.known import Known, Outcome, Target
from ftis_node.swarm.limits import Bounded
from ftis_node.swarm.pool import Newcomers
from ftis_node.swarm.shares import Shares

CAPACITY = 2048
BYTES_MAX = 8 << 20  # bytes of all announcements together, as sent and as packed
# No single peer may fill the table. The announcements of one author, and those through one first sender, take at most
# one part in so many, by number and by bytes.
FIRST_SENDER_PART = 8
# Nor may all strangers together: they displace no author with a record until such authors have over half of the table.
RECORDED_PART = 2
VICTIMS = 16  # drawn for an eviction, which hits the first sender with the largest share: floods evict themselves
PEERS_MAX = 256  # peers of which it is remembered what they know and hold
# Two nodes' ages of an announcement may differ by this part of `max_age`, or by so many seconds (mentions round to
# whole ones). Each hop's delay makes an age a little too small. The smallest reported age wins, so the errors add up.
AGE_SLACK = 0.05
AGE_SLACK_SECONDS = 1.5


@dataclass(eq=False)
class Table:
    """A bounded set of announcements, one for each (author, round).

    It also keeps the time of first receipt for twice as many removed ones. It lives in the event loop, and in memory
    only: after a restart peers send others' announcements again, and the store has this node's own.

    max_age: seconds after which an announcement leaves the table. clock: monotonic, in seconds (`boot_seconds`).
    recorded: returns whether an author has a record. rows_of: returns the rows of the packets, by their index; empty if
    none is chosen by its row. view: fewer than 256 peers that no others displace, though identities are free; of others
    it is not kept what they hold; None: every peer is in it, until there are 256.
    """

    max_age: float
    clock: Clock
    rng: random.Random = field(default_factory=random.Random)
    _: KW_ONLY
    capacity: int = CAPACITY
    recorded: OfPeer = lambda author: False
    bytes_max: int = BYTES_MAX
    rows_of: Callable[[Announcement], Mapping[int, int]] = lambda announcement: {}
    view: Container[bytes] | None = None

    def __post_init__(self) -> None:
        self._bytes = 0
        self._vouched = 0  # announcements whose author had a record at the last check
        self._bits = dict[bytes, int]()  # by peer, the latest asked last
        self._free = [1 << number for number in range(PEERS_MAX)]
        self._known = dict[tuple[bytes, int], Known]()
        self._by_id = dict[int, Known]()
        share = max(1, self.capacity // FIRST_SENDER_PART)
        share_bytes = self.bytes_max // FIRST_SENDER_PART
        self._first_sent = Shares(share, share_bytes)
        self._authors = Shares(share, share_bytes)
        self._latest = Bounded[bytes, float](self.capacity)  # by author: the newest `born`
        self._left = Bounded[tuple[bytes, int], float](2 * self.capacity)  # time of first receipt of removed ones

    def __len__(self) -> int:
        """The number of announcements; some may be beyond `max_age` until `expire`."""
        return len(self._known)

    def __iter__(self) -> Iterator[Known]:
        """What is here now, in order of arrival; announcements may be added and removed meanwhile."""
        return iter(list(self._known.values()))

    def get(self, author: bytes, round: int) -> Known | None:
        """The announcement of an author's round; None if it is not here."""
        return self._known.get((author, round))

    def bit(self, peer: bytes) -> int:
        """A peer's bit in masks of peers. Of more than 256 one outside of the view is forgotten: that which was sent
        nothing for longest. Its bit goes to another peer, so ask anew before each use."""
        if peer not in self._bits:
            if not self._free:
                self.forget_peer(next(other for other in self._bits if self.view is None or other not in self.view))
            self._bits[peer] = self._free.pop()
        return self._bits[peer]

    def find(self, id: int) -> Known | None:
        """Find an announcement by its `announcement_id`; None if it is not here."""
        return self._by_id.get(id)

    def add(
        self,
        announcement: Announcement,
        data: bytes,
        *,
        age: float,
        first_sender: bytes | None,
        held: int = 0,
    ) -> Outcome:
        """Add an announcement with a verified signature, or note another holder of one that is here. Others make room.

        Returns NEW, KNOWN, OLD (beyond `max_age`) or EQUIVOCATION (the author's round is here with other packets). The
        last two change nothing.

        Args:
            data: its encoding.
            age: seconds since the signature, as the first sender reports; with several copies, see `Known.dated`.
            first_sender: the peer that sent it; None if it is this node's own.
            held: bit mask of the packets that the first sender reports to hold.
        """
        now = self.clock()
        key = announcement.author, announcement.round
        heard = self._left.get(key, now)  # it may have been here before
        born = min(heard, now - age)
        if now - born > self.max_age:
            return Outcome.OLD
        known = self._known.get(key)
        outcome = Outcome.KNOWN
        if known is None:
            outcome = Outcome.NEW
            known = Known(
                announcement,
                data,
                born,
                heard,
                first_sender,
                self.rows_of(announcement),
            )
            self._make_room(known)
            self._left.pop(key, None)
            self._put(known)
        elif known.announcement.packets != announcement.packets:
            return Outcome.EQUIVOCATION
        if first_sender is not None:
            self.note_holder(known, first_sender, held, born)
        return outcome

    def sample(self, count: int, peer: bytes, age: float = 0.0) -> list[Known]:
        """A random sample of announcements, at least `age` seconds old, that `peer` does not know, as far as this node
        knows. Then of those of which this node holds more packets than it announced to `peer`. They do not count as
        sent yet, see `tell`."""
        self.expire()
        bit = self.bit(peer)
        self._bits[peer] = self._bits.pop(peer)
        latest = self.clock() - age
        new = [known for known in self if not known.knows & bit and known.born <= latest]
        if len(new) >= count:
            return self.rng.sample(new, count)
        more = [known for known in self if known.knows & ~known.current & bit]
        return new + self.rng.sample(more, min(count - len(new), len(more)))

    def recent_authors(self, seconds: float) -> set[bytes]:
        """Authors of announcements no older than `seconds`, this node too, and also of those that were removed."""
        earliest = self.clock() - seconds
        return {author for author, born in self._latest.items() if born >= earliest}

    def open_ones(self) -> list[Known]:
        """The announcements within `max_age` with packets left to pull. It reads the whole table."""
        limit = self.clock() - self.max_age
        return [known for known in self if known.born >= limit and known.unsettled]

    def forget_peer(self, peer: bytes) -> None:
        """Forget what a peer knew and held: after a restart it may know nothing."""
        if peer not in self._bits:
            return
        bit = self._bits.pop(peer)
        self._free.append(bit)
        for known in self:
            known.forget_peer(peer, bit)

    def tell(self, peer: bytes, known: Known) -> None:
        """Note that a peer is sent this announcement."""
        bit = self.bit(peer)
        known.knows |= bit
        known.current |= bit

    def untell(self, peer: bytes, which: Iterable[Known] | None = None) -> None:
        """Forget that a peer was sent these announcements, or any: it may have missed them."""
        bit = self.bit(peer)
        if which is None:
            which = self
        for known in which:
            known.knows &= ~bit
            known.current &= ~bit

    def expire(self) -> None:
        """Drop announcements beyond `max_age`. It reads the whole table."""
        limit = self.clock() - self.max_age
        for known in self:
            if known.born < limit:
                self._remove(known)

    def choose(
        self,
        count: int,
        wanted: Callable[[Known], int],
        newcomers: Newcomers | None = None,
        rows: Iterable[int] | None = None,
        peers: Set[bytes] = frozenset(),
    ) -> list[Target]:
        """Choose up to `count` packets to pull, see `choosing.choose`; the caller marks them as under way.

        Args:
            newcomers: what is chosen takes up their room; None: they have no limit.
            wanted: returns a bit mask of an announcement's packets that may be chosen, -1 for all. It runs for every
                unsettled announcement in the table, so it must be quick.
            rows: choose only packets of these, one a row, those of the first rows that have any; None: of any.
            peers: see `choosing.choose`; they have no effect with `rows`.
        """
        newcomers = newcomers or Newcomers()
        self.expire()
        if count <= 0:
            return []
        offers = (Offer(known, wanted(known) & known.unsettled) for known in self.open_ones())
        if rows is not None:
            by_row: dict[int, list[Offer]] = {row: [] for row in rows}
            for offer in offers:
                for index, row in offer.known.rows.items():
                    if offer.packets >> index & 1 and row in by_row:
                        by_row[row].append(offer)
            return choose_by_row(by_row, count, newcomers, self.rng)
        return choose(filter(lambda offer: offer.packets, offers), count, newcomers, peers, self.rng)

    def note_holder(self, known: Known, peer: bytes, held: int, born: float | None) -> bool:
        """Note that `peer` knows this announcement, holds these packets, and reports a signature at `born` (None: no
        report). Return whether it holds more than this node knew: of a peer outside of the view nothing is kept."""
        bit = self.bit(peer)
        if self.view is not None and peer not in self.view:
            held = 0
        news = known.heard_from(peer, bit, held)
        if born is not None:
            known.dated(bit, born, max(AGE_SLACK_SECONDS, AGE_SLACK * self.max_age))
            self._date_author(known)
        return news

    # --- room -----------------------------------------------------------------------------------------------------

    def _make_room(self, new: Known) -> None:
        """Make room in the author's share, in the first sender's share and in the table."""
        while self._authors.full(new.author, new.size):
            oldest = min(self._authors.of(new.author), key=lambda known: known.born)
            self._remove(oldest)
        while new.first_sender is not None and self._first_sent.full(new.first_sender, new.size):
            self._displace(new.first_sender)
        while self._known and (len(self._known) >= self.capacity or self._bytes + new.size > self.bytes_max):
            self._remove(self._victim())

    def _victim(self) -> Known:
        """Draw the announcement to evict: one of strangers, unless authors with a record have more than half. Among a
        few random ones it is that of the first sender with the largest share. The table must not be empty."""
        everything = list(self)
        while True:
            of_strangers = self._vouched <= len(everything) // RECORDED_PART
            drawn = [one for one in self.rng.choices(everything, k=VICTIMS) if one.vouched != of_strangers]
            if not drawn:
                continue
            if not of_strangers:
                return drawn[0]
            known = max(drawn, key=lambda one: len(self._first_sent.by.get(one.first_sender, ())))
            if not self._vouch(known):
                return known
            known.vouched = True  # its author has gained a record since
            self._vouched += 1

    def _vouch(self, known: Known) -> bool:
        """Whether it is this node's own, or its author has a record now."""
        return known.first_sender is None or self.recorded(known.author)

    def _displace(self, first_sender: bytes) -> None:
        """Evict the first sender's oldest announcement for its newest; those of authors with a record go last. If
        another peer sent it too and has room, it moves to that peer's share. Otherwise an early first sender could
        evict others' entries."""
        oldest = min(self._first_sent.of(first_sender), key=lambda known: (known.vouched, known.born))
        sent = (peer for peer, bit in self._bits.items() if oldest.sent & bit and peer != first_sender)
        with_room = (peer for peer in sent if not self._first_sent.full(peer, oldest.size))
        heir = next(with_room, None)
        if heir is None:
            self._remove(oldest)
            return
        self._first_sent.take(first_sender, oldest)
        self._first_sent.put(heir, oldest)
        oldest.first_sender = heir

    def _date_author(self, known: Known) -> None:
        """Note that the author signed an announcement when this one was born."""
        latest = self._latest.get(known.author, known.born)
        self._latest[known.author] = max(known.born, latest)

    def _put(self, known: Known) -> None:
        """Add an announcement to the table and to the shares, once `_make_room` has made room for it."""
        self._known[known.key] = self._by_id[known.id] = known
        known.vouched = self._vouch(known)
        self._vouched += known.vouched
        self._authors.put(known.author, known)
        self._date_author(known)
        if known.first_sender is not None:
            self._first_sent.put(known.first_sender, known)
        self._bytes += known.size

    def _remove(self, known: Known) -> None:
        """Undo `_put`; the time of first receipt is kept, so that one that comes again is no younger for it."""
        del self._known[known.key]
        self._vouched -= known.vouched
        self._left[known.key] = known.heard
        if self._by_id.get(known.id) is known:  # an author can construct two announcements with one id
            del self._by_id[known.id]
        self._authors.take(known.author, known)
        if known.first_sender is not None:
            self._first_sent.take(known.first_sender, known)
        self._bytes -= known.size
