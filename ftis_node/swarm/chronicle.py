"""Sightings of a swarm's nodes, over time and in bounded memory. Their own words are claims."""

from collections import Counter
from pathlib import Path

import msgspec

from ftis_node.config.run import Run
from ftis_node.host.files import kept
from ftis_node.swarm.handshake import plain
from ftis_node.swarm.identity import OfPeer, peer_id
from ftis_node.swarm.self_report import PRESENT_SECONDS, SelfReport

NODES_MAX = 512
LEAVING = 32  # that make room together
HISTORY_ROWS = 400  # of the trends of the swarm and of each node
NODE_ROWS = 96


class Trend(msgspec.Struct):
    """Values over time in at most `most` rows of a time (unix seconds) and numbers; then every second one goes, and
    `spacing`, the least seconds between two rows, doubles. Homes keep it."""

    most: int
    spacing: float = 60.0
    rows: list[list[float | None]] = []

    def add(self, now: float, *values: float | None) -> None:
        """Add a row, unless the last one is newer than `spacing` seconds. Of a number that is not known the value is
        None. If the clock was set back, a row is added."""
        if self.rows and 0 <= now - (self.rows[-1][0] or 0.0) < self.spacing:
            return
        self.rows.append([now, *values])
        if len(self.rows) > self.most:
            self.rows = self.rows[::2]
            self.spacing *= 2


class Seen(msgspec.Struct):
    """Sightings of one node. first, heard, reported: unix seconds; the last is of its report. first_sender: of an
    announcement or report of it.

    step: the last announced one. groups: announced since this node looks. right: completions in these. round: the
    newest that counts.
    """

    first: float
    heard: float
    first_sender: bytes = msgspec.field(name="introducer")  # its name in the files of homes
    version: str = ""
    reach: str = ""
    step: int = 0
    groups: int = 0
    right: int = 0
    report: SelfReport | None = None
    pass_at_1: Trend = msgspec.field(default_factory=lambda: Trend(NODE_ROWS))
    reported: float = 0.0
    round: int = -1


class Chronicle(msgspec.Struct):
    """What a node keeps on disk of its swarm. since: when the node began to look (unix seconds).

    history: present nodes, groups a minute, mean pass@1.
    """

    run_id: bytes
    since: float
    nodes: dict[bytes, Seen] = {}
    history: Trend = msgspec.field(default_factory=lambda: Trend(HISTORY_ROWS))

    def of(self, author: bytes, first_sender: bytes, heard: float, spares: OfPeer) -> Seen:
        """The entry of an author, made if there is none; it was heard of at `heard` (unix seconds). Where there are too
        many, some make room, see `_make_room`. The caller changes the entry.

        Args:
            first_sender: the peer that this node has it from; kept in a new entry only.
            spares: whose entries make room last.
        """
        nodes = self.nodes
        if author not in nodes:
            if len(nodes) >= NODES_MAX:
                self._make_room(heard - PRESENT_SECONDS, spares)
            nodes[author] = Seen(heard, heard, first_sender)
        nodes[author].heard = max(nodes[author].heard, heard)
        return nodes[author]

    def _make_room(self, present: float, spares: OfPeer) -> None:
        """Drop some at once, since a flood brings thousands: those silent for longest that are not present; else the
        newest of the first sender that named most, or of all if each names itself only. So floods evict themselves.

        present: unix seconds; a node that was heard of since then is present.
        """
        nodes = self.nodes
        going = sorted((one for one in nodes if nodes[one].heard <= present), key=lambda one: nodes[one].heard)
        if not going:
            others = [author for author in nodes if not spares(author)] or list(nodes)
            named = Counter(nodes[author].first_sender for author in others)
            others.sort(key=lambda author: (named[nodes[author].first_sender], nodes[author].first))
            going = others[::-1]  # the newest of the most frequent first sender first
        for author in going[:LEAVING]:
            del nodes[author]

    def reported(self, report: SelfReport, referrer: bytes, heard: float, spares: OfPeer) -> None:
        """Keep a report, unless one of its author that is not older is here. Its author counts as heard of in any case,
        at `heard` (unix seconds). The caller has checked the signature."""
        seen = self.of(report.author, referrer, heard, spares)
        if seen.report is None or report.at > seen.report.at:
            seen.report = report
            seen.reported = heard
            seen.step = max(seen.step, report.step)
            seen.version = report.version or seen.version
            seen.reach = report.reach or seen.reach
            if report.pass_at_1 is not None:
                seen.pass_at_1.add(heard, report.pass_at_1)

    def told_since(self, time: float) -> list[SelfReport]:
        """The reports that came to this node after `time` (unix seconds), in no particular order."""
        return [seen.report for seen in self.nodes.values() if seen.report is not None and seen.reported > time]


def read_chronicle(file: Path | None, run: Run) -> Chronicle | None:
    """What earlier starts gathered of this run; None if there is nothing, or it is of another run. A damaged file gets
    a warning in the log, and None too."""
    if file is None:
        return None
    found = kept(file, msgspec.msgpack.Decoder(Chronicle).decode, "the swarm's history begins anew.")
    if found is None or found.run_id != run.id:
        return None
    return found


def names_in(chronicle: Chronicle | None) -> dict[str, str]:
    """What nodes call themselves, by peer id, at most 64 characters; nobody checks it, and two may have one name."""
    if chronicle is None:
        return {}
    reports = [seen.report for seen in chronicle.nodes.values()]
    return {peer_id(one.author): plain(one.name, 64) for one in reports if one is not None and one.name}
