"""Announcements in the table: what peers know of each and hold, and which of its packets are left to pull."""

import hashlib
from collections.abc import Mapping, Set
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from functools import cached_property

from ftis_node.packet import Group
from ftis_node.swarm.announcement import Announcement, PacketRef


class Outcome(StrEnum):
    """What became of an announcement that a peer sent; the last two: of what it sent beyond what it may. The texts are
    keys of `status` and of a metric.

    OLD: too old for the table, or its age contradicts its epoch. EQUIVOCATION: its author signed another of this round.
    REPLAYED: signed hours before or after now, by this node's clock. UNCHECKED: the sender's budget of signature checks
    is used up. TOO_FAR_AHEAD: its round does not follow its author's (`Rounds.follows`).
    """

    NEW = "new"
    KNOWN = "known"
    OLD = "old"
    EQUIVOCATION = "equivocation"
    MALFORMED = "malformed"
    FORGED = "forged"
    OTHER_RUN = "other run"
    UNWANTED = "own or banned"
    NO_MEMBER = "no member"
    REPLAYED = "replayed"
    UNCHECKED = "over the budget"
    TOO_FAR_AHEAD = "too far ahead"
    UNASKED = "not asked for"
    OVER_LIMITS = "over the limits"


def announcement_id(data: bytes) -> int:
    """The id by which an exchange mentions an announcement: the first eight bytes of its bytes' sha256, as a u64. An
    author can make two with one id."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


@dataclass(eq=False, slots=True)
class Known:
    """An announcement in the table.

    born: when the author signed it, by the smallest reported age. heard: when this node first received it. Both on
    this node's clock (`boot_seconds`). data: its encoding. Masks of peers have the bits of `Table.bit`; of packets, the
    bit of a packet's index. `Gossip` and `Table` keep what peers know, `Pulling` keeps `done` and `pulling`.
    """

    announcement: Announcement
    data: InitVar[bytes]
    born: float
    heard: float
    first_sender: bytes | None
    rows: Mapping[int, int] = field(default_factory=dict)  # of the packets, by index, where packets are chosen by row
    holders: dict[bytes, int] = field(default_factory=dict)  # by peer, the author too: bit mask of its packets
    have: int = 0  # bit mask of the packets that this node holds itself
    knows: int = 0  # mask of the peers that know it
    current: int = 0  # and of those that know this node's age of it, and `have`
    sent: int = 0  # and of those that sent or mentioned it
    done: int = 0  # bit mask of the packets that it need not pull (any more)
    pulling: int = 0  # bit mask of the packets under way
    id: int = field(init=False)
    length: int = field(init=False)  # bytes of its encoding
    size: int = field(init=False)  # bytes that it takes
    every: int = field(init=False)  # bit mask of all its packets
    vouched: bool = field(default=False, init=False)  # its author had a record, or is this node, at the last check

    def __post_init__(self, data: bytes) -> None:
        self.id = announcement_id(data)
        self.length = len(data)
        self.size = self.length + len(self.announcement.packets.packed)
        self.every = (1 << len(self.announcement.packets)) - 1
        self.holders[self.author] = self.every  # by its own word

    @property
    def author(self) -> bytes:
        """The peer that signed it, 38 bytes."""
        return self.announcement.author

    @property
    def key(self) -> tuple[bytes, int]:
        """(author, round)."""
        return self.author, self.announcement.round

    @property
    def unsettled(self) -> int:
        """A bit mask of the packets that are left to pull."""
        return self.every & ~(self.done | self.pulling)

    def held_among(self, peers: Set[bytes]) -> int:
        """A bit mask of the packets that at least one of these peers holds."""
        mask = 0
        for peer in self.holders.keys() & peers:
            mask |= self.holders[peer]
        return mask

    def copied_among(self, peers: Set[bytes]) -> int:
        """A bit mask of the packets that at least one of these peers holds besides the author."""
        return self.held_among(peers - {self.author})

    def obtained(self, packets: int) -> None:
        """Note that this node holds these packets (a bit mask). No peer knows that yet, so all are told again."""
        self.have |= packets
        self.current = 0

    def heard_from(self, peer: bytes, bit: int, held: int) -> bool:
        """Note that `peer` knows it and holds these packets (a bit mask). Return whether it holds any that this node
        did not know it to hold. bit: the peer's, of `Table.bit`."""
        if not self.knows & bit and not self.have:
            self.current |= bit  # it has it from others, and there is nothing that this node holds to tell it
        self.knows |= bit
        self.sent |= bit
        new = held & self.every & ~self.holders.get(peer, 0)
        if new:
            self.holders[peer] = self.holders.get(peer, 0) | new
        return new > 0

    def dated(self, bit: int, born: float, slack: float) -> None:
        """Note that the peer of this bit reports a signature at `born`, on this node's clock (`boot_seconds`).

        Ages are not signed. The smallest reported age wins, so that no peer can make the announcement expire with a
        large one. The time of first receipt bounds it, so that no peer can keep the announcement alive for good. A peer
        whose age is larger by more than `slack` seconds gets the announcement's age again.
        """
        newest = min(born, self.heard)
        if newest > self.born + slack:
            self.born = newest
            self.current &= bit
        elif born < self.born - slack:
            self.current &= ~bit

    def held_by(self, peer: bytes, index: int) -> bool:
        """Whether a peer holds the packet of this index, as far as this node knows."""
        return bool(self.holders.get(peer, 0) >> index & 1)

    def held_no_more(self, peer: bytes, index: int) -> None:
        """Note that `peer` said that it does not hold this packet, until it says that it does; the author too."""
        if peer in self.holders:
            self.holders[peer] &= ~(1 << index)

    def forget_peer(self, peer: bytes, bit: int) -> None:
        """Forget what a peer of this bit knew and held, so that another peer may get the bit. What the author holds
        stays, for the announcement shows it."""
        self.knows &= ~bit
        self.current &= ~bit
        self.sent &= ~bit
        if peer != self.author:
            self.holders.pop(peer, None)


@dataclass(frozen=True, eq=False)
class Target:
    """A packet to pull: its announcement and its index there. Two targets of one packet are not equal."""

    known: Known
    index: int

    @cached_property
    def ref(self) -> PacketRef:
        """What the announcement says of the packet."""
        return self.known.announcement.packets[self.index]

    @property
    def key(self) -> tuple[bytes, int, int]:
        """(author, round, slot)."""
        return *self.known.key, self.ref.slot


@dataclass(frozen=True, eq=False)
class Arrival:
    """An admitted group, its birth on this node's clock (`boot_seconds`), and its author's hint."""

    group: Group
    born: float
    right: int
