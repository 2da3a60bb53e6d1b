"""The swarm as a whole, as far as one node or observer hears of it: who is there, what they claim, who taught whom.

What comes from announcements, handshakes and self-reports are claims, and are named so. There is no network address in
it, so it can be shown to others.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.host.files import replace_bytes
from ftis_node.host.loops import forever
from ftis_node.swarm.addresses import is_relayed
from ftis_node.swarm.chronicle import Seen
from ftis_node.swarm.handshake import plain
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.known import Known
from ftis_node.swarm.self_report import PRESENT_SECONDS, SelfReport
from ftis_node.swarm.swarm import Swarm

LOOK_SECONDS = 10.0
SAVE_SECONDS = 300.0
CLAIMED = (  # fields of a self-report that are shown
    *("name", "model", "tokenizer", "state", "pass_at_1", "pass_at_1_before"),
    *("own_used", "foreign_used", "peers", "bytes_in", "bytes_out"),
)

logger = logging.getLogger(__name__)


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node. id: peer id. heard, reported: seconds ago. present: heard of within ten minutes. The page reads these
    names in swarm.json.

    own: it is the node that shows this. since: when it was first heard of (unix seconds). version, reach: empty if not
    known. step: the highest that it announced or reported. groups: announced since this node began to look. success:
    the part of the completions in these that were right by its own rule; None without any. claims: from its
    self-report, None if it sends none. curve: rows of time (unix seconds) and claimed pass@1 (0 to 1).
    """

    id: str
    own: bool
    present: bool
    heard: float
    since: float
    version: str
    reach: str
    step: int
    groups: int
    success: float | None
    reported: float | None
    claims: dict[str, Any] | None
    curve: list[list[float | None]]


class SwarmFacts(msgspec.Struct, frozen=True):
    """The whole, as swarm.json has it. at, since: unix seconds; since: when this home began to look. peers: the number
    in this node's active view.

    history: rows of time (unix seconds), present nodes, announced groups a minute, and the mean of the claimed pass@1,
    None where nobody claims one.
    """

    run: str
    task: str
    private: bool
    at: float
    since: float
    peers: int
    nodes: list[NodeFacts]
    history: list[list[float | None]]


class Overview:
    """Gathers what a swarm's announcements, handshakes and self-reports tell, in bounded memory.

    It reads the swarm's own tables in the event loop, in a node that trains as in an observer, and sends nothing.
    """

    def __init__(self, swarm: Swarm, file: Path | None = None) -> None:
        """
        Args:
            file: keeps what was gathered between starts.
        """
        membership = swarm.membership
        self.book = swarm.chronicle
        self._swarm = swarm
        self._run = membership.run_file.run
        self._own = None if membership.observing else membership.identity.author
        self._file = file
        self._spares = swarm.reputation.established
        self._groups = 0  # announced since the last row of the history
        self._began = unix_seconds()
        self._counted = boot_seconds()
        # By author the newest round that earlier starts have counted.
        self._before = {author: seen.round for author, seen in self.book.nodes.items()}
        self._looked = 0.0  # by `boot_seconds`

    def begin(self, stack: AsyncExitStack) -> None:
        """Begin `run` as a task, which ends when the stack is closed; then save. Call it once, in the event loop."""
        stack.callback(self.save)
        stack.callback(asyncio.create_task(forever(self.run)).cancel)

    async def run(self) -> None:
        """Look every 10 s; save every five minutes. It ends only when it is cancelled."""
        saved = boot_seconds()
        while True:
            self.look()
            if boot_seconds() - saved > SAVE_SECONDS:
                saved = boot_seconds()
                self.save()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Take over what handshakes, announcements and self-reports said since the last look.

        About once a minute, later less often (`Trend`), the history gets a row. An announcement that came and left the
        table between two looks is missed.
        """
        now = unix_seconds()
        boot = boot_seconds()
        zero = now - boot  # added to a time by `boot_seconds`, it makes unix seconds
        for peer in list(self._swarm.membership.active_view.values()):
            seen = self.book.of(peer.id, peer.id, zero + peer.seen, self._spares)
            seen.version = peer.agent.removeprefix("ftis-node/")
            if peer.addresses and all(map(is_relayed, peer.addresses)):
                seen.reach = "relayed"
            elif peer.addresses and peer.found:  # who only dials names none
                seen.reach = "direct"
        for known in self._swarm.gossip.table:
            if self._looked <= known.heard < boot:  # so each counts in one look
                self._announced(known, zero + known.heard)
        if self._own is not None:
            report = self._swarm.reports.describe()
            if report is not None:
                self.book.reported(report, self._own, now, self._spares)
        seconds = boot - self._counted
        if seconds >= self.book.history.spacing:
            if boot - self._looked < PRESENT_SECONDS:  # else the machine slept, and nobody was seen meanwhile
                self._add_row(now, 60 * self._groups / seconds)
            self._groups = 0
            self._counted = boot
        self._looked = boot

    def _add_row(self, now: float, made: float) -> None:
        """Add to the history. now: unix seconds. made: announced groups a minute."""
        present = [seen for seen in self.book.nodes.values() if seen.heard > now - PRESENT_SECONDS]
        claimed = []
        for seen in present:
            if seen.report is not None and seen.report.pass_at_1 is not None:
                claimed.append(seen.report.pass_at_1)
        mean = None
        if claimed:
            mean = sum(claimed) / len(claimed)
        self.book.history.add(now, len(present), made, mean)

    def facts(self) -> SwarmFacts:
        """What to show now; the nodes that are present first, then by their announced groups, the most first."""
        now = unix_seconds()
        book = self.book
        nodes = [self._facts(author, seen, now) for author, seen in book.nodes.items()]
        nodes.sort(key=lambda node: (not node.present, -node.groups, node.id))
        return SwarmFacts(
            run=book.run_id.hex(),
            task=self._run.task,
            private=bool(self._run.founder),
            at=now,
            since=book.since,
            peers=len(self._swarm.membership.active_view),
            nodes=nodes,
            history=book.history.rows,
        )

    def save(self) -> None:
        """Write the book to its file, if there is one; a full disk costs the history, and nothing else."""
        if self._file is None:
            return
        try:
            replace_bytes(self._file, msgspec.msgpack.encode(self.book))
        except OSError as error:
            logger.warning("The swarm's history cannot be written to %s: %s", self._file, error)

    def _announced(self, known: Known, heard: float) -> None:
        """Take over an announcement, which came at `heard` (unix seconds). Its groups are counted unless an earlier
        start has counted them."""
        announcement = known.announcement
        author = announcement.author
        seen = self.book.of(author, known.first_sender or author, heard, self._spares)
        seen.step = max(seen.step, announcement.policy_step)
        if announcement.round <= self._before.get(author, -1):
            return  # before a restart
        seen.round = max(seen.round, announcement.round)
        groups = len(announcement.packets)
        seen.groups += groups
        seen.right += sum(min(ref.right, self._run.group) for ref in announcement.packets)
        age = known.heard - known.born  # when it came
        if heard - age >= self._began:  # older ones come all at once, and would raise the first rate
            self._groups += groups

    def _facts(self, author: bytes, seen: Seen, now: float) -> NodeFacts:
        """What to show of a node now (unix seconds)."""
        report = seen.report
        reported = None
        claims = None
        if report is not None:
            reported = max(0.0, now - report.at)
            claims = _claims(report)
        return NodeFacts(
            id=peer_id(author),
            own=author == self._own,
            present=seen.heard > now - PRESENT_SECONDS,
            heard=max(0.0, now - seen.heard),
            since=seen.first,
            version=plain(seen.version, 64),
            reach=plain(seen.reach, 64),
            step=seen.step,
            groups=seen.groups,
            success=seen.right / (seen.groups * self._run.group) if seen.groups else None,
            reported=reported,
            claims=claims,
            curve=seen.pass_at_1.rows,
        )


def _claims(report: SelfReport) -> dict[str, Any]:
    """What a node says of itself, without what a terminal obeys; teachers: groups by peer id."""
    told = dict[str, Any]()
    for name in CLAIMED:
        said = getattr(report, name)
        if isinstance(said, str):
            said = plain(said, 64)
        told[name] = said
    told["teachers"] = {peer_id(author): groups for author, groups in report.teachers.items()}
    return told
