"""Pulling packets: the choice of packets and holders, and the blame for faults."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ftis_node.config.run import Run
from ftis_node.host.clocks import thread_seconds
from ftis_node.packet import SHORT_DIGEST_BYTES, Group
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext, Reason, Rejection, admit
from ftis_node.swarm.announcement import Announcement
from ftis_node.swarm.deadline import Deadline
from ftis_node.swarm.fetch import HolderFault, HolderLie, Uploads, fetch
from ftis_node.swarm.ftis_pb2 import FetchChunk
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.known import Arrival, Known, Target
from ftis_node.swarm.limits import OWN
from ftis_node.swarm.membership import Membership
from ftis_node.swarm.pool import Want
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.table import Table

IDLE_SECONDS = 30.0  # without news, until the node looks again for something to pull
TAKEN_TOGETHER = 16  # groups of one pull that are handed on at a time
SLOW_SECONDS = 3.0  # of silence, after which a holder counts as slow
REST_PER_SCAN = 30.0  # pause after a scan of the table, as a multiple of its CPU seconds
_NO_ROWS: Mapping[int, int] = {}  # one for all announcements
STEP_INTERVALS = 4.0  # exchange intervals in a step, see `node.stepper.exchange_interval`

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trade:
    """A trading node's part in a swarm: what it gives and takes.

    store: reads held packets and looks up keys. want: returns what the node would take now; it is called often, and
    has to be quick. on_groups: takes admitted groups; those of a call that raises will be pulled again.
    """

    context: AdmissionContext
    store: PacketStore
    want: Callable[[], Want]
    on_groups: Callable[[Sequence[Arrival]], Awaitable[None]]

    def rows_of(self, announcement: Announcement) -> Mapping[int, int]:
        """The rows of an announcement's packets by their index there; none where rows are not common."""
        if not self.context.run.common:
            return _NO_ROWS
        return {
            index: self.context.row_of(announcement.author, announcement.round, ref.slot, announcement.issued_at)
            for index, ref in enumerate(announcement.packets)
        }


def nothing_to_trade(run: Run) -> Trade:
    """The part of an observer: it wants nothing, so nothing is ever admitted, and it has nothing to give."""

    async def take(arrived: Sequence[Arrival]) -> None:
        raise AssertionError("an observer pulls nothing")

    context = AdmissionContext(run, bytes(SHORT_DIGEST_BYTES))
    store = PacketStore(Path(":memory:"), run.id, 0)
    return Trade(context, store, Want, take)


@dataclass(eq=False)
class Pulling:
    """Pulls the packets that the node wants from their holders, and serves those that it has.

    One task runs `loop`, and each pull is a task: of one holder, and of as many packets as it may be asked for. A
    packet is under way from its choice until it has landed, whatever came of it, or its holder counts as slow. A holder
    is occupied until its pull and the rest after it have ended. All of it runs in one event loop.

    rejections: refused packets and broken pulls since the start, by reason, as `status` shows them.

    interval: returns the seconds between a hungry node's exchanges.
    """

    trade: Trade
    membership: Membership
    table: Table
    reputation: Reputation
    interval: Callable[[], float]

    def __post_init__(self) -> None:
        self.rejections = Counter[Reason]()
        self.news = asyncio.Event()  # there may be more to pull
        self.uploads = Uploads(self.trade.store.body, self.membership.traffic)
        self.pulls = set[asyncio.Task[bool]]()  # the unfinished ones
        self._occupied_holders = set[bytes]()
        self._under_way = set[Target]()  # but those of slow holders

    @property
    def hungry(self) -> bool:
        """Whether the node would take more groups than are under way; it then exchanges more often."""
        return self.trade.want().groups > len(self._under_way)

    async def loop(self) -> None:
        """Pull wanted packets that are not under way as soon as a holder is known. Each holder gets a stream of its
        own, so that a slow one delays no other."""
        transport = self.membership.transport
        up = True
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), IDLE_SECONDS if up else 1.0)  # p2pd may be back by then
            self.news.clear()
            began = thread_seconds()
            by_holder = dict[bytes, list[Target]]()
            up = transport.up  # p2pd may just be late with an answer
            want = self.trade.want()
            for target in self._choose(want):
                author = target.known.author
                holder = self.reputation.pick(self._holders(target), self.table.rng)
                full = len(by_holder.get(holder, ())) >= (self.membership.limits(holder) or OWN).digests
                if full or not self.reputation.may_be_pulled(author, want.of_one):
                    self.news.set()  # it is left to another holder, or its place to another author: look again
                    continue
                by_holder.setdefault(holder, []).append(target)
                self._under_way.add(target)
                target.known.pulling |= 1 << target.index
                self.reputation.note_pull(author, STEP_INTERVALS * self.interval())
            for holder, targets in by_holder.items():
                self._occupied_holders.add(holder)
                task = asyncio.create_task(self._pull(holder, targets))
                self.pulls.add(task)
                task.add_done_callback(partial(self._pulled, holder, targets))
            # Strangers' news must not make a node scan the table all the time.
            await asyncio.sleep(REST_PER_SCAN * (thread_seconds() - began))

    def _choose(self, want: Want) -> list[Target]:
        """Choose what to pull now, by turns of authors; nothing while p2pd is down. What is chosen does not count as
        under way yet."""
        if not self.membership.transport.up:
            return []
        free = self._free_holders()
        wanted = partial(self._wanted, most=want.of_one, free=free)
        rows = want.rows
        if rows is not None:
            coming = {target.known.rows[target.index] for target in self._under_way}
            rows = [row for row in rows if row not in coming]
        return self.table.choose(
            want.groups - len(self._under_way),
            wanted,
            want.newcomers,
            rows,
            free,
        )

    def _pulled(self, holder: bytes, left: list[Target], task: asyncio.Task[bool]) -> None:
        """End a pull, however its task ended; `left` did not land. A holder that had everything is free at once; any
        other rests (`Holder.rest`)."""
        self.pulls.discard(task)
        for target in list(left):
            self._landed(target, left)
        pause = self.reputation.holders.open(holder).rest(self.interval())
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                logger.error("A pull failed; what it brought will be pulled again", exc_info=error)
            elif task.result():
                pause = 0.0
        asyncio.get_running_loop().call_later(pause, self._free, holder)

    def _free(self, holder: bytes) -> None:
        """End a holder's rest."""
        self._occupied_holders.discard(holder)
        self.news.set()

    def _landed(self, target: Target, left: list[Target]) -> None:
        """Note that the target is no longer under way, whatever the outcome; it must be in `left`."""
        left.remove(target)
        target.known.pulling &= ~(1 << target.index)
        self._under_way.discard(target)

    async def _pull(self, holder: bytes, left: list[Target]) -> bool:
        """Fetch from one holder and remove finished targets from `left`. Return whether it had everything.

        Admitted groups are handed on, sixteen at a time, and each answer goes into the books on the holder. A fault of
        the holder is noted and not raised; what `on_groups` raises is raised.
        """
        transport = self.membership.transport
        arrived = dict[Target, Arrival]()
        complete = True
        brought = False
        patience = Deadline(lambda: self._slow(left))
        patience.put_off(SLOW_SECONDS)
        try:
            async for target, chunk in fetch(transport, holder, left.copy(), self.membership.traffic):
                patience.put_off(SLOW_SECONDS)
                group = None
                if chunk.status == FetchChunk.HERE:
                    brought = True
                    self.reputation.delivered(holder)
                    group = self._admit(target, chunk.packet)
                elif chunk.status == FetchChunk.GONE:
                    complete = False
                    target.known.held_no_more(holder, target.index)
                    self.reputation.faked(holder)
                else:
                    complete = False
                    self.reputation.answered(holder)
                if group is None:
                    self._landed(target, left)
                else:
                    arrived[target] = Arrival(group, target.known.born, target.ref.right)
                if len(arrived) >= TAKEN_TOGETHER:
                    await self._hand_over(arrived, left)
            self.membership.answered(holder)
        except HolderFault as fault:
            complete = False
            if transport.up:  # else this node's own p2pd failed
                self._at_fault(holder, fault)
        finally:
            patience.cancel()
            book = self.reputation.holders.open(holder)
            if brought:
                book.in_vain = 0
            elif transport.up:
                book.in_vain += 1
            await self._hand_over(arrived, left)
        return complete

    def _at_fault(self, holder: bytes, fault: HolderFault) -> None:
        """Hold a broken pull against the holder, as a holder and as a peer of the view."""
        logger.info("Holder %s %s", peer_id(holder), fault)
        if isinstance(fault, HolderLie):
            self.rejections[Reason.WRONG_BYTES] += 1
            self.reputation.lied(holder, str(fault))
        else:
            self.rejections[Reason.HOLDER] += 1
            self.reputation.failed(holder)
        self.membership.failed(holder)

    def _slow(self, left: list[Target]) -> None:
        """Count a slow holder's targets as under way no longer: the node pulls as many others meanwhile, and these from
        other holders. The slow pull goes on, and may still bring them."""
        self._under_way.difference_update(left)
        for target in left:
            target.known.pulling &= ~(1 << target.index)
        self.news.set()

    async def _hand_over(self, arrived: dict[Target, Arrival], left: list[Target]) -> None:
        """Hand groups to the node and empty `arrived`. Groups that it cannot take now will be pulled again.

        If an announcement left the table and came back, another pull may have brought the same group: skip those. What
        the node raises is raised.
        """
        groups = {target: arrival for target, arrival in arrived.items() if not self.trade.store.seen(*target.key)}
        for target in arrived.keys() - groups.keys():
            self._landed(target, left)
        arrived.clear()
        if not groups:
            return
        try:
            await self.trade.on_groups(list(groups.values()))
        except BaseException:
            for target in groups:
                target.known.done &= ~(1 << target.index)
            raise
        for target, arrival in groups.items():
            self._landed(target, left)
            target.known.obtained(1 << target.index)
            lengths = arrival.group.packet.lengths
            self.reputation.admitted(arrival.group.author, completions=len(lengths), tokens=sum(lengths))

    def _admit(self, target: Target, data: bytes) -> Group | None:
        """Admit one packet with the right hash, unless another holder has brought it; the author is to blame for any
        further fault. None: there is nothing to hand on."""
        if target.known.done >> target.index & 1:
            return None
        author = target.key[0]
        target.known.done |= 1 << target.index  # until `_hand_over` fails
        verdict = admit_target(self.trade.context, target, data)
        if isinstance(verdict, Group):
            return verdict
        self.rejections[verdict.reason] += 1
        logger.warning("Refused a packet of %s: %s (%s)", peer_id(author), verdict.reason, verdict.detail)
        self.trade.store.settle([target.key], "refused")
        self.reputation.refused(author, str(verdict.reason))
        return None

    def _holders(self, target: Target) -> list[bytes]:
        """The free peers that hold a packet, as far as this node knows; of a chosen target there is at least one."""
        free = self._free_holders()
        known = target.known
        return [peer for peer in known.holders if peer in free and known.held_by(peer, target.index)]

    def _free_holders(self) -> set[bytes]:
        """The peers in the view from which no pull runs, and which do not rest after one."""
        return self.membership.active_view.keys() - self._occupied_holders

    def _wanted(self, known: Known, most: int, free: set[bytes]) -> int:
        """A bit mask of the packets that a free holder has; 0 if the author is banned, no member any more, or has used
        its share of this step's pulls (`most`). It runs for each announcement in the table, see `Table.choose`."""
        held = known.held_among(free)
        if not held or not self.reputation.may_be_pulled(known.author, most):
            return 0
        if not self.membership.roster.admits(known.author):
            return 0
        return held


def admit_target(context: AdmissionContext, target: Target, data: bytes) -> Group | Rejection:
    """Judge a packet whose bytes have the announced sha256 against the rest of its announcement, see `admit`."""
    author, round, slot = target.key
    announcement = target.known.announcement
    return admit(
        context,
        author,
        data,
        announced=(round, slot),
        issued_at=announcement.issued_at,
        digest=target.ref.digest,
    )
