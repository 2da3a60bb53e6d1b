"""Self-reports: what a node says of itself once a minute, for whoever looks at the swarm. Nobody checks their content.

A node tells its newest one to the peers with which it exchanges, and they pass it on to observers only. The signature
shows who said it; that it is true, nothing shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import msgspec

from ftis_node.errors import FtisError
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.swarm.budgets import Budgets
from ftis_node.swarm.certificates import Signed
from ftis_node.swarm.identity import AUTHOR_BYTES, Identity
from ftis_node.swarm.sessions import REPORTS_MAX

REPORT_SECONDS = 60.0
REPORT_BYTES_MAX = 2048
TEACHERS_MAX = 16
REPORTS_TOLD = 64  # to an observer in one message
PRESENT_SECONDS = 600.0  # an older report is passed on to nobody
FENCE = 3 * 3600.0  # between a report's time and this node's clock
CHECKS_A_SECOND, CHECKS_AT_ONCE = 10.0, 256.0  # signatures, for each peer

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Part = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Word = Annotated[str, msgspec.Meta(max_length=64)]
_Author = Annotated[bytes, msgspec.Meta(min_length=AUTHOR_BYTES, max_length=AUTHOR_BYTES)]


class ReportError(FtisError):
    """Bytes that are no self-report."""


class SelfReport(Signed, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """author: 38-byte peer id. at: unix seconds. tokenizer: the beginning of its fingerprint. reach: as in `status`.

    made, own_used, foreign_used: groups in all. bytes_in, bytes_out: since the start. teachers: of how many groups of
    each author it has learned, the most first.
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
    teachers: Annotated[dict[_Author, _Count], msgspec.Meta(max_length=TEACHERS_MAX)] = msgspec.field(
        default_factory=dict
    )


def read_report(data: bytes) -> SelfReport:
    """A report in these bytes; its signature is not checked. Raises ReportError."""
    if len(data) > REPORT_BYTES_MAX:
        raise ReportError(f"a self-report has more than {REPORT_BYTES_MAX} bytes")
    try:
        return msgspec.msgpack.decode(data, type=SelfReport)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ReportError(f"no self-report: {error}") from None


@dataclass(frozen=True)
class Heard:
    """A report as it came. at: when, by `boot_seconds`. teller: the peer that sent it first."""

    report: SelfReport
    data: bytes
    at: float
    teller: bytes


class SelfReports:
    """This node's own reports and the newest of others."""

    def __init__(
        self,
        identity: Identity,
        run_id: bytes,
        describe: Callable[[], SelfReport | None],
        welcomes: Callable[[bytes], bool],
        *,
        observing: bool = False,
    ) -> None:
        """
        Args:
            describe: an unsigned report of this node now; None: there is nothing to say yet.
            welcomes: whether an author may take part.
            observing: others' reports are taken from whoever passes them on; else only from their authors.
        """
        self.known: dict[bytes, Heard] = {}
        self.telling = False  # whether this node tells others of itself
        self.describe = describe
        self._identity, self._run_id, self._welcomes, self._observing = identity, run_id, welcomes, observing
        self._checks = Budgets(boot_seconds, CHECKS_A_SECOND, CHECKS_AT_ONCE)
        self._own: Heard | None = None

    def news(self, told: dict[bytes, int], *, observer: bool) -> list[bytes]:
        """The reports that a peer was not told yet; they count as `told`: by author, the time of the report."""
        own, since = self._newest_own(), boot_seconds() - PRESENT_SECONDS
        known = (heard for heard in self.known.values() if heard.at > since) if observer else ()
        candidates = (*((own,) if own is not None else ()), *known)
        new = (heard for heard in candidates if told.get(heard.report.author, -1) < heard.report.at)
        found = list(islice(new, REPORTS_TOLD))
        for heard in found:
            told[heard.report.author] = heard.report.at
        return [heard.data for heard in found]

    def hear(self, reports: Iterable[bytes], peer: bytes) -> None:
        """Take reports from a peer; wrong ones are left out."""
        for data in islice(reports, REPORTS_TOLD if self._observing else 1):
            try:
                report = read_report(data)
            except ReportError:
                continue
            known = self.known.get(report.author)
            if known is not None and known.report.at >= report.at:
                continue
            if self._may_be(report, peer) and self._checks.take(peer) and report.verify(report.author):
                self._keep(Heard(report, data, boot_seconds(), peer if known is None else known.teller))

    def _may_be(self, report: SelfReport, peer: bytes) -> bool:
        sound = report.run_id == self._run_id and abs(report.at - unix_seconds()) < FENCE
        told_by_author = self._observing or report.author == peer
        return sound and told_by_author and report.author != self._identity.author and self._welcomes(report.author)

    def _keep(self, heard: Heard) -> None:
        """A silent one makes room, or else the oldest of the peer that told of most: floods evict themselves."""
        author = heard.report.author
        if author not in self.known and len(self.known) >= REPORTS_MAX:
            silent = [gone for gone, one in self.known.items() if one.at < boot_seconds() - PRESENT_SECONDS]
            fullest = Counter(one.teller for one in self.known.values()).most_common(1)[0][0]
            crowd = (gone for gone, one in self.known.items() if one.teller == fullest)
            del self.known[silent[0] if silent else next(crowd)]
        self.known.pop(author, None)
        self.known[author] = heard

    def _newest_own(self) -> Heard | None:
        """This node's report, made anew each minute."""
        now = boot_seconds()
        if not self.telling:
            return None
        if self._own is None or now >= self._own.at + REPORT_SECONDS:
            made = self.describe()
            if made is None:
                return None
            signed = made.signed_by(self._identity)
            self._own = Heard(signed, msgspec.msgpack.encode(signed), now, self._identity.author)
        return self._own
