"""Self-reports: what a node says of itself once a minute, for whoever looks at the swarm. Nobody checks their content.

A node tells its newest one to the peers with which it exchanges, and they pass it on to observers only. The signature
shows who said it; that it is true, nothing shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.swarm.identity import AUTHOR_BYTES, Identity, OfPeer
from ftis_node.swarm.limits import Budgets
from ftis_node.swarm.signed import Malformed, Signed, decode

if TYPE_CHECKING:
    from ftis_node.swarm.chronicle import Chronicle

REPORT_SECONDS = 60.0
REPORT_BYTES_MAX = 2048
TEACHERS_MAX = 16
REPORTS_TOLD = 64  # to an observer in one message
PRESENT_SECONDS = 600.0  # an older report is passed on to nobody
FENCE = 3 * 3600.0  # between a report's time and this node's clock
CHECKS_A_SECOND = 10.0  # signatures, for each peer
CHECKS_AT_ONCE = 256.0

_Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Part = Annotated[float, Meta(ge=0, le=1)]
_Word = Annotated[str, Meta(max_length=64)]
_Author = Annotated[bytes, Meta(min_length=AUTHOR_BYTES, max_length=AUTHOR_BYTES)]


class SelfReport(Signed, frozen=True, kw_only=True):
    """author: 38-byte peer id. at: unix seconds, when it was made. An empty text: the node does not say.

    tokenizer: the beginning of its fingerprint. reach, state: as in `status`. pass_at_1: 0 to 1, of the latest
    evaluation, pass_at_1_before: of the first one; None: not known yet. own_used, foreign_used: groups in all. peers:
    in its active view. bytes_in, bytes_out: since the start. teachers: of how many groups of each author it has
    learned, the most first.
    """

    author: _Author
    at: _Count
    name: _Word = ""
    model: _Word = ""
    tokenizer: _Word = ""
    version: _Word = ""
    reach: _Word = ""
    state: _Word = ""
    step: _Count = 0
    pass_at_1: _Part | None = None
    pass_at_1_before: _Part | None = None
    own_used: _Count = 0
    foreign_used: _Count = 0
    peers: _Count = 0
    bytes_in: _Count = 0
    bytes_out: _Count = 0
    teachers: Annotated[dict[_Author, _Count], Meta(max_length=TEACHERS_MAX)] = msgspec.field(default_factory=dict)


def read_report(data: bytes) -> SelfReport:
    """A report in these bytes; its signature is not checked. Raises Malformed."""
    return decode(data, SelfReport, REPORT_BYTES_MAX, "a self-report")


@dataclass
class SelfReports:
    """This node's own reports, and what becomes of others'; those of ten minutes are passed on.

    chronicle: keeps them. describe: returns an unsigned report of this node now; None: there is nothing to say yet.
    welcomes: returns whether an author may take part. observing: others' reports are taken from whoever passes them on;
    else only from their authors. spares: returns whether an author's entry in the chronicle is kept where others make
    room.
    """

    identity: Identity
    chronicle: Chronicle
    describe: Callable[[], SelfReport | None]
    welcomes: OfPeer
    _: KW_ONLY
    observing: bool
    spares: OfPeer = lambda _: False

    def __post_init__(self) -> None:
        self.telling = False  # whether this node tells others of itself; a setting decides
        self._checks = Budgets(boot_seconds, CHECKS_A_SECOND, CHECKS_AT_ONCE)
        self._own: SelfReport | None = None
        self._made = -math.inf  # when, by `boot_seconds`

    def news(self, told: dict[bytes, int], *, observer: bool) -> dict[bytes, bytes]:
        """The reports that a peer was not told yet, by author, this node's own first; at most 64.

        Args:
            told: by author the time of the newest report that the peer was told; these are added.
            observer: the peer is one; others get this node's own report only.
        """
        known = self._newest_own()
        if observer:
            others = self.chronicle.told_since(unix_seconds() - PRESENT_SECONDS)
            known += [report for report in others if report.author != self.identity.author]
        new = (report for report in known if told.get(report.author, -1) < report.at)
        found = list(islice(new, REPORTS_TOLD))
        for report in found:
            told[report.author] = report.at
        return {report.author: report.encoded for report in found}

    def hear(self, reports: Iterable[bytes], peer: bytes) -> bool:
        """Take reports from a peer; wrong ones are left out. Return whether some were too many to be checked now; the
        peer has to send these again."""
        left = False
        most = 1
        if self.observing:
            most = REPORTS_TOLD
        for data in islice(reports, most):
            try:
                report = read_report(data)
            except Malformed:
                continue
            seen = self.chronicle.nodes.get(report.author)
            if seen is not None and seen.report is not None and seen.report.at >= report.at:
                continue
            if not self._may_be(report, peer):
                continue
            if not self._checks.take(peer):
                left = True
            elif report.verify(report.author):
                self.chronicle.reported(report, peer, unix_seconds(), self.spares)
        return left

    def _may_be(self, report: SelfReport, peer: bytes) -> bool:
        """Whether a report is of this run and of our time, and its author's to give and the peer's to pass on."""
        if report.run_id != self.chronicle.run_id or abs(report.at - unix_seconds()) >= FENCE:
            return False
        if report.author == self.identity.author or not self.welcomes(report.author):
            return False
        return self.observing or report.author == peer

    def _newest_own(self) -> list[SelfReport]:
        """This node's report, made anew a minute after the latest; nothing if there is none."""
        if not self.telling:
            return []
        if boot_seconds() >= self._made + REPORT_SECONDS:
            made = self.describe()
            if made is None:
                return []
            self._own = made.signed_by(self.identity)
            self._made = boot_seconds()
        if self._own is None:
            return []
        return [self._own]
