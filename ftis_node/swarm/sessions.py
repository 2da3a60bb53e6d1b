"""A node's memory of each peer that shook hands with it."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.swarm.limits import Bounded, Limits

SESSIONS_MAX = 256
OBSERVERS_MAX = 16  # beside those
LOOKS_ON = "it only looks on"  # why an observer is no peer
LACKING_MAX = 512  # ids remembered from the mentions of one peer
REPORTS_MAX = 512  # authors of whose self-reports a peer was told
LATEST = 253402300800.0  # the end of the year 9999; a later value is not a time


@dataclass(slots=True)
class Lacking:
    """A mentioned announcement that this node lacks.

    held: bit mask of the packets that the peer holds. born: time of the signature by the peer's report, or None. asks:
    requests to that peer so far.
    """

    held: int
    born: float | None
    asks: int = 0


@dataclass(slots=True)
class Session:
    """One peer, as long as it may ask.

    limits: of a message between both; None: they have not shaken hands. started: the peer's time when `boot_seconds`
    was 0, by its latest message: own corrections of the clock change nothing. unsure: a message of it may have been
    lost. dropped: it mentioned more than this node, which had enough, would remember; it is asked again when that is
    used up. owed: announcements that this node requested in its last answer. asked: when either last asked the other
    for news, or they first shook hands (`boot_seconds`). lacking: announcements that the peer mentioned, by id.
    reports, records: what it was told: the time of each author's self-report; members' records.
    """

    limits: Limits | None = None
    observer: bool = False
    started: float | None = None
    unsure: bool = False
    dropped: bool = False
    owed: int = 0
    asked: float = 0.0
    lacking: Bounded[int, Lacking] = field(default_factory=lambda: Bounded(LACKING_MAX))
    reports: Bounded[bytes, int] = field(default_factory=lambda: Bounded(REPORTS_MAX))
    records: set[bytes] = field(default_factory=set)

    def note_time(self, time: float) -> None:
        """Note the time that the peer sent (seconds since 1970); 0: it sent none."""
        if 0 < time < LATEST:
            self.started = time - boot_seconds()

    def lost(self) -> None:
        """Note that a message may have been lost: the peer is asked, and told of members and self-reports, again."""
        self.unsure = True
        self.reports.clear()
        self.records.clear()


@dataclass(frozen=True)
class ClockDifference:
    """The difference between this node's clock and its peers'. behind: seconds that this node is behind their median;
    negative: ahead. peers: the number that sent their time."""

    behind: float
    peers: int


class Sessions(dict[bytes, Session]):
    """The latest 256, and of observers 16. Identities are free, so no peer in the view makes room for another."""

    def __init__(self, view: Container[bytes] = ()) -> None:
        super().__init__()
        self._view = view

    def __missing__(self, peer: bytes) -> Session:
        return self.begin(peer)

    def begin(self, peer: bytes, limits: Limits | None = None, *, observer: bool = False) -> Session:
        """Forget what a peer was told, for it may have restarted; and not what it mentioned, for it may not have."""
        begun = self.pop(peer, None) or Session(asked=boot_seconds())  # who greets anew keeps its turn
        alike = [other for other, one in self.items() if one.observer == observer]
        if len(alike) >= (OBSERVERS_MAX if observer else SESSIONS_MAX):
            del self[next(other for other in alike if other not in self._view)]
        begun.limits, begun.observer = limits, observer
        begun.reports.clear()
        begun.records.clear()
        self[peer] = begun
        return begun

    def met(self, peer: bytes) -> bool:
        """Whether the peer shook hands, not as an observer."""
        session = self.get(peer)
        return session is not None and session.limits is not None and not session.observer

    def clock_difference(self, peers: Iterable[bytes]) -> ClockDifference | None:
        """The difference to these peers; None if none of them sent its time.

        The median is safe against one liar. With an even number, the smaller of the middle two counts.
        """
        zero = unix_seconds() - boot_seconds()
        sessions = filter(None, map(self.get, peers))
        found = sorted(session.started - zero for session in sessions if session.started is not None)
        if not found:
            return None
        middle = (found[(len(found) - 1) // 2], found[len(found) // 2])
        return ClockDifference(min(middle, key=abs), len(found))
