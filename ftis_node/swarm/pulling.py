"""Pulling packets: the choice of packets and holders, and the blame for faults."""

import asyncio
import functools
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ftis_node.host.clocks import thread_seconds
from ftis_node.packet import Group
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.admission import AdmissionContext, Reason, Rejection, admit
from ftis_node.swarm.announcement import Announcement
from ftis_node.swarm.deadline import Deadline
from ftis_node.swarm.fetch import HolderBackoff, HolderFault, HolderLie, Uploads, fetch
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.known import Arrival, Known, Target
from ftis_node.swarm.limits import OWN, Limits
from ftis_node.swarm.membership import Membership
from ftis_node.swarm.pool import Want
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.table import Table
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.transport import Transport

IDLE_SECONDS = 30.0
TAKEN_TOGETHER = 16
SLOW_SECONDS = 3.0
REST_PER_SCAN = 30.0  # pause after a scan of the table, as a multiple of its CPU seconds
_NO_ROWS: Mapping[int, int] = {}  # one for all announcements
STEP_INTERVALS = 4.0  # exchange intervals in a step, see `node.stepper.exchange_interval`

logger = logging.getLogger(__name__)


class Store(Protocol):
    """The part of the packet store that the swarm uses."""

    def body(self, digest: bytes) -> bytes | None: ...

    def seen(self, author: bytes, round: int, slot: int) -> bool: ...

    def holds(self, digest: bytes) -> bool: ...

    def settle(self, keys: Iterable[tuple[bytes, int, int]], fate: str) -> None: ...

    def announced(self, data: bytes) -> None: ...

    def latest_announced(self, max_age: float) -> list[tuple[bytes, float]]: ...


class NoStore:
    """The store of an observer, which has nothing and makes nothing."""

    def seen(self, author: bytes, round: int, slot: int) -> bool:
        return False

    def holds(self, digest: bytes) -> bool:
        return False

    def announced(self, data: bytes) -> None:
        pass

    def latest_announced(self, max_age: float) -> list[tuple[bytes, float]]:
        return []


@dataclass(frozen=True)
class Trade:
    """A trading node's part in a swarm: what it gives and takes.

    store: reads held packets and looks up keys. want: returns the number of further groups that the node would take
    now. on_groups: takes admitted groups.
    """

    context: AdmissionContext
    store: Store
    want: Callable[[], Want]
    on_groups: Callable[[Sequence[Arrival]], Awaitable[None]]

    def rows_of(self, announcement: Announcement) -> Mapping[int, int]:
        """The rows of an announcement's packets by their index; none where rows are not common."""
        if not self.context.run.common:
            return _NO_ROWS
        author, round, issued_at = announcement.author, announcement.round, announcement.issued_at
        slots = enumerate(ref.slot for ref in announcement.packets)
        return {index: self.context.row_of(author, round, slot, issued_at) for index, slot in slots}


class Pulling:
    """Pulls the packets that the node wants from their holders, and serves those that it has."""

    def __init__(
        self,
        trade: Trade,
        transport: Transport,
        traffic: Traffic,
        membership: Membership,
        table: Table,
        reputation: Reputation,
        *,
        interval: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """
        Args:
            interval: seconds between a hungry node's exchanges, see `HolderBackoff`.
        """
        self.rejections: Counter[Reason] = Counter()
        self.news = asyncio.Event()  # there may be more to pull
        self.uploads = Uploads(trade.store.body, traffic)
        self._transport = transport
        self._traffic = traffic
        self._membership = membership
        self._table = table
        self._trade, self._store = trade, trade.store
        self._reputation = reputation
        self._interval = interval
        self._rng = rng
        self._occupied_holders: set[bytes] = set()
        self._rests = HolderBackoff()
        self.pulls: set[asyncio.Task[bool]] = set()  # the unfinished ones
        self._under_way: set[Target] = set()  # but those of slow holders

    @property
    def hungry(self) -> bool:
        """Whether the node would take a group that is not under way."""
        return self._trade.want().groups > len(self._under_way)

    async def loop(self) -> None:
        """Pull wanted packets that are not under way as soon as a holder is known. Each holder gets a stream of its
        own, so that a slow one delays no other."""
        up = True
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), IDLE_SECONDS if up else 1.0)
            self.news.clear()
            began = thread_seconds()
            by_holder: dict[bytes, list[Target]] = {}
            up = self._transport.up  # p2pd may just be late with an answer
            want = self._trade.want()
            for target in self._choose(want) if up else []:
                author = target.known.announcement.author
                holder = self._reputation.pick(self._holders(target), self._rng)
                full = len(by_holder.get(holder, ())) >= self._limits(holder).digests
                if full or not self._reputation.may_be_pulled(author, want.of_one):
                    self.news.set()  # it is left to another holder, or its place to another author: look again
                    continue
                by_holder.setdefault(holder, []).append(target)
                self._under_way.add(target)
                target.known.pulling |= 1 << target.index
                self._reputation.note_pull(author, STEP_INTERVALS * self._interval())
            for holder, targets in by_holder.items():
                self._occupied_holders.add(holder)
                task = asyncio.create_task(self._pull(holder, targets))
                self.pulls.add(task)
                task.add_done_callback(functools.partial(self._pulled, holder, targets))
            # Strangers' news must not make a node scan the table all the time.
            await asyncio.sleep(REST_PER_SCAN * (thread_seconds() - began))

    def _choose(self, want: Want) -> list[Target]:
        """Choose what to pull now, by turns of authors."""
        free, rows = self._free_holders(), want.rows
        wanted = functools.partial(self._wanted, most=want.of_one, free=free)
        if rows is not None:
            coming = {target.known.rows[target.index] for target in self._under_way}
            rows = [row for row in rows if row not in coming]
        return self._table.choose(want.groups - len(self._under_way), wanted, want.newcomers, rows, free)

    def _pulled(self, holder: bytes, left: list[Target], task: asyncio.Task[bool]) -> None:
        """End a pull. A holder that lacked something rests for a moment."""
        self.pulls.discard(task)
        for target in list(left):
            self._landed(target, left)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("A pull failed; what it brought will be pulled again", exc_info=error)
        well = not task.cancelled() and error is None and task.result()
        pause = 0.0 if well else self._rests.seconds(holder, self._interval())
        asyncio.get_running_loop().call_later(pause, self._free, holder)

    def _free(self, holder: bytes) -> None:
        """End a holder's rest."""
        self._occupied_holders.discard(holder)
        self.news.set()

    def _landed(self, target: Target, left: list[Target]) -> None:
        """Note that the target is no longer under way, whatever the outcome."""
        left.remove(target)
        target.known.pulling &= ~(1 << target.index)
        self._under_way.discard(target)

    async def _pull(self, holder: bytes, left: list[Target]) -> bool:
        """Fetch from one holder and remove finished targets from `left`. Return whether it had everything."""
        arrived: dict[Target, Arrival] = {}
        missing, brought = False, False
        patience = Deadline(lambda: self._slow(left))
        patience.put_off(SLOW_SECONDS)
        limits = self._limits(holder)
        try:
            async for target, chunk in fetch(self._transport, holder, left.copy(), self._traffic, limits):
                group = None
                patience.put_off(SLOW_SECONDS)
                if chunk.status == ftis_pb2.FetchChunk.HERE:
                    brought = True
                    self._reputation.delivered(holder)
                    group = self._admit(target, chunk.packet)
                else:
                    missing = True
                    if chunk.status == ftis_pb2.FetchChunk.GONE:
                        target.known.held_no_more(holder, target.index)
                        self._reputation.faked(holder)
                    else:
                        self._reputation.answered(holder)
                if group is None:
                    self._landed(target, left)
                else:
                    arrived[target] = Arrival(group, target.known.born, target.ref.right)
                if len(arrived) >= TAKEN_TOGETHER:
                    await self._hand_over(arrived, left)
            self._membership.answered(holder)
        except HolderFault as fault:
            missing = True
            if self._transport.up:  # else this node's own p2pd failed
                logger.info("Holder %s %s", peer_id(holder), fault)
                if isinstance(fault, HolderLie):
                    self.rejections[Reason.WRONG_BYTES] += 1
                    self._reputation.lied(holder, str(fault))
                else:
                    self.rejections[Reason.HOLDER] += 1
                    self._reputation.failed(holder)
                self._membership.failed(holder)
        finally:
            patience.cancel()
            if brought or self._transport.up:
                self._rests.note(holder, brought)
            await self._hand_over(arrived, left)
        return not missing

    def _slow(self, left: list[Target]) -> None:
        """Count a slow holder's targets as under way no longer, so that the node pulls as many others meanwhile."""
        self._under_way.difference_update(left)
        self.news.set()

    async def _hand_over(self, arrived: dict[Target, Arrival], left: list[Target]) -> None:
        """Hand groups to the node and empty `arrived`. Groups that it cannot take now will be pulled again.

        If an announcement left the table and came back, another pull may have brought the same group: skip those.
        """
        groups = {target: arrival for target, arrival in arrived.items() if not self._store.seen(*target.key)}
        for target in arrived.keys() - groups.keys():
            self._landed(target, left)
        arrived.clear()
        if not groups:
            return
        try:
            await self._trade.on_groups(list(groups.values()))
        except BaseException:
            for target in groups:
                target.known.done &= ~(1 << target.index)
            raise
        for target, arrival in groups.items():
            self._landed(target, left)
            target.known.obtained(1 << target.index)
            lengths = arrival.group.packet.lengths
            self._reputation.admitted(arrival.group.author, completions=len(lengths), tokens=sum(lengths))

    def _admit(self, target: Target, data: bytes) -> Group | None:
        """Admit one packet with the right hash; the author is to blame for any further fault."""
        author, round, slot = target.key
        target.known.done |= 1 << target.index
        if self._store.seen(author, round, slot):
            return None
        issued_at, digest = target.known.announcement.issued_at, target.ref.digest
        verdict = admit(self._trade.context, author, data, announced=(round, slot), issued_at=issued_at, digest=digest)
        if isinstance(verdict, Rejection):
            self._blame(author, target, verdict)
            return None
        return verdict

    def _blame(self, author: bytes, target: Target, rejection: Rejection) -> None:
        self.rejections[rejection.reason] += 1
        logger.warning("Refused a packet of %s: %s (%s)", peer_id(author), rejection.reason, rejection.detail)
        self._store.settle([target.key], "refused")
        self._reputation.refused(author, str(rejection.reason))

    def _holders(self, target: Target) -> list[bytes]:
        free = self._free_holders()
        holders = dict.fromkeys((target.known.announcement.author, *target.known.holders))  # a dict keeps the order
        return [peer for peer in holders if peer in free and target.known.held_by(peer, target.index)]

    def _limits(self, holder: bytes) -> Limits:
        return self._membership.limits(holder) or OWN

    def _free_holders(self) -> set[bytes]:
        """The peers in the view from which no pull runs."""
        return self._membership.active_view.keys() - self._occupied_holders

    def _wanted(self, known: Known, most: int, free: set[bytes]) -> int:
        """A bit mask of the packets that a free holder has; 0 if the author is banned, no member any more, or has used
        its share of this step's pulls."""
        author, held = known.announcement.author, known.held_among(free)
        welcome = held and self._reputation.may_be_pulled(author, most) and self._membership.welcomes(author)
        return held if welcome else 0
