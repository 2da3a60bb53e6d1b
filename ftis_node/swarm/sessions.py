"""A node's memory of each peer that shook hands with it."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.step_report import ClockDifference
from ftis_node.swarm.ftis_pb2 import ExchangeRequest
from ftis_node.swarm.limits import Bounded, Limits

SESSIONS_MAX = 256
OBSERVERS_MAX = 16  # beside those
LOOKS_ON = "it only looks on"  # why an observer is no peer
NEW_SECONDS = 30.0  # that a peer counts as having waited when it first shakes hands: it is asked soon, not first
LACKING_MAX = 512  # ids remembered from the mentions of one peer
REPORTS_MAX = 512  # authors of whose self-reports a peer was told
LATEST = 253402300800.0  # the end of the year 9999; a later value is not a time


@dataclass(slots=True)
class Lacking:
    """A mentioned announcement that this node lacks.

    held: bit mask of the packets that the peer holds. born: when its author signed it, by the peer's report and on this
    node's clock (`boot_seconds`); None: the peer did not say.
    """

    held: int
    born: float | None


@dataclass(slots=True)
class Told:
    """What one message told a peer: announcements by id, self-reports by author, members' records by signature."""

    announcements: list[int] = field(default_factory=list)
    reports: Iterable[bytes] = ()
    records: Iterable[bytes] = ()


@dataclass(slots=True)
class Session:
    """One peer, as long as it may ask.

    limits: of a message between both; None: they have not shaken hands. started: the peer's time when `boot_seconds`
    was 0, by its latest message: own corrections of the clock change nothing. missed: its latest answer was lost, or
    this node left some of it. forgot: it mentioned more than this node would remember; it is asked again when that is
    used up. owed: announcements that this node requested in its last answer.
    asked: when either last asked the other for news, or they first shook hands (`boot_seconds`); not when the peer
    asked too often in a row. answers: to the peer, since this node last asked it. lacking: announcements that the peer
    mentioned, by id. reports, records: what it was told: the time of each author's self-report; members' records.
    request, answer: what the latest of each told it; it is taken back if it did not arrive.
    """

    limits: Limits | None = None
    observer: bool = False
    started: float | None = None
    missed: bool = False
    forgot: bool = False
    owed: list[int] = field(default_factory=list)
    asked: float = 0.0
    answers: int = 0
    lacking: dict[int, Lacking] = field(default_factory=dict)
    reports: Bounded[bytes, int] = field(default_factory=lambda: Bounded(REPORTS_MAX))
    records: set[bytes] = field(default_factory=set)  # twice as many as the roster has, at most
    request: Told = field(default_factory=Told)
    answer: Told = field(default_factory=Told)

    def note_time(self, time: float) -> None:
        """Note the time that the peer sent, as it is now by its clock (seconds since 1970); 0: it sent none."""
        if 0 < time < LATEST:
            self.started = time - boot_seconds()

    def ask_again(self, request: ExchangeRequest) -> None:
        """Ask in a request for what is to be told again: all announcements, or what the latest answer held.

        The session then counts as asked: if the request does not arrive, `Gossip.unsent` takes that back.
        """
        everything = self.forgot and not self.lacking
        request.again = self.missed or everything
        request.latest = self.missed and not everything
        self.missed = False
        self.forgot &= not everything

    def take_back(self, told: Told) -> None:
        """Count these self-reports and records as not told; of announcements the table has to be told the same."""
        for author in told.reports:
            self.reports.pop(author, None)
        self.records.difference_update(told.records)


class Sessions(dict[bytes, Session]):
    """By 38-byte peer id the latest 256, and of observers 16. Identities are free, so no peer in the view makes room.

    `sessions[peer]` begins a session without limits if there is none; `get` does not.
    """

    def __init__(self, view: Container[bytes] = ()) -> None:
        """`view` is the active view; it is read whenever a session has to make room."""
        super().__init__()
        self._view = view

    def __missing__(self, peer: bytes) -> Session:
        return self.begin(peer)

    def begin(self, peer: bytes, limits: Limits | None = None, *, observer: bool = False) -> Session:
        """Begin a session, or begin it anew at a further handshake: as the latest, with these limits.

        What the peer was told is forgotten, for it may have restarted. What it mentioned is kept, for it may not have.
        If there are too many of its kind, the oldest outside the view ends.
        """
        begun = self.pop(peer, None) or Session(asked=boot_seconds() - NEW_SECONDS)  # who greets anew keeps its turn
        alike = [other for other, one in self.items() if one.observer == observer]
        most = SESSIONS_MAX
        if observer:
            most = OBSERVERS_MAX
        if len(alike) >= most:
            del self[next(other for other in alike if other not in self._view)]
        begun.limits = limits
        begun.observer = observer
        begun.reports.clear()
        begun.records.clear()
        self[peer] = begun
        return begun

    def met(self, peer: bytes) -> bool:
        """Whether the peer shook hands, not as an observer, and its session has not ended since."""
        session = self.get(peer)
        return session is not None and session.limits is not None and not session.observer

    def clock_difference(self, peers: Iterable[bytes]) -> ClockDifference | None:
        """The difference to the clocks of these peers; None if none of them sent its time.

        Of three peers or more, one liar cannot move the median far; `ClockDifference` says of how many it is. With an
        even number, the smaller of the middle two counts.
        """
        zero = unix_seconds() - boot_seconds()
        sessions = filter(None, map(self.get, peers))
        found = sorted(session.started - zero for session in sessions if session.started is not None)
        if not found:
            return None
        count = len(found)
        middle = (found[(count - 1) // 2], found[count // 2])
        return ClockDifference(min(middle, key=abs), count)
