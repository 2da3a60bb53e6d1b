"""The swarm in memory: everybody hears of everything at once, and pulls what it wants through the same admission."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from ftis_node.errors import FtisError
from ftis_node.node.stepper import Stepper
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext, Rejection
from ftis_node.swarm.announcement import Announcement, PacketRef, PacketRefs
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.known import Arrival, Known, Target
from ftis_node.swarm.pulling import Trade, admit_target
from ftis_node.swarm.table import Table


class Network:
    """The members of one trial."""

    def __init__(self) -> None:
        self.members: dict[bytes, MemorySwarm] = {}

    def body(self, target: Target) -> bytes:
        """The packet, always from its author's store. Raises FtisError if it is there no more."""
        author = target.known.announcement.author
        body = self.members[author].trade.store.body(target.ref.digest)
        if body is None:
            raise FtisError(f"{peer_id(author)} no longer holds a packet that it announced.")
        return body


class MemorySwarm:
    """One member's end of the network; `Stepper` uses it as it uses the daemon's swarm. It enters the network when it
    is made, and never leaves it.

    next_round: the number that its next round will have; a trial keeps it in its checkpoint.
    """

    def __init__(
        self,
        network: Network,
        author: bytes,
        trade: Trade,
        clock: Callable[[], float],
        *,
        max_age: float,
        rng: random.Random,
        on_demand: bool,
    ) -> None:
        """
        Args:
            author: the 38-byte peer id. clock: simulated seconds. max_age: seconds for which announcements are kept.
            rng: the order in which groups are taken.
            on_demand: pulls by itself what the node wants; else only `collect` takes groups.
        """
        self.interval = 1.0  # exchanges take no time here
        self.author = author
        self.trade = trade
        self.next_round = 0
        self._network = network
        self._clock = clock
        self._max_age = max_age
        self.reseed(rng)
        self._on_demand = on_demand
        self._pulling: asyncio.Task[None] | None = None
        network.members[author] = self

    def announce(self, round: int, policy_step: int, packets: Sequence[PacketRef], issued_at: int) -> None:
        """Tells all others, at once; nobody forges anything in here, so nothing is signed."""
        self.next_round = round + 1
        announcement = Announcement(
            self.trade.context.run_id,
            self.author,
            round,
            policy_step,
            issued_at,
            PacketRefs.of(packets),
            signature=b"",
        )
        for member in self._network.members.values():
            if member is not self:
                member._table.add(announcement, b"", age=0.0, first_sender=None)
                member.wake()

    def wake(self) -> None:
        """Begins to pull what is wanted, if it does so by itself and is not at it."""
        idle = self._pulling is None or self._pulling.done()
        if self._on_demand and idle:
            self._pulling = asyncio.create_task(self._pull())

    def recent_authors(self, seconds: float) -> set[bytes]:
        """See `means.Exchange`."""
        return self._table.recent_authors(seconds) - {self.author}

    def has_peers(self) -> bool:
        """Whether the trial has other members, whether or not they generate."""
        return len(self._network.members) > 1

    async def collect(self) -> None:
        """Takes everything that was announced and not taken yet, whether it is wanted or not. Scoring may go on after
        it (`Inbox.scored`)."""
        announced = self._table.choose(1 << 30, everything)
        await self._take(announced)

    def reseed(self, rng: random.Random) -> None:
        """From now on the order of what is taken follows from `rng`; what was announced before is forgotten."""
        self._table = Table(self._max_age, self._clock, rng, rows_of=self.trade.rows_of)

    async def close(self) -> None:
        """Ends a pull under way."""
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.gather(self._pulling, return_exceptions=True)

    async def _pull(self) -> None:
        """As `Pulling`, which also knows by the hint what teaches nothing."""
        while True:
            want = self.trade.want()
            if want.groups <= 0:
                return
            targets = self._table.choose(want.groups, everything, want.newcomers, want.rows)
            if not targets:
                return
            await self._take(targets)

    async def _take(self, targets: Sequence[Target]) -> None:
        """Admits these packets and hands them over. Raises FtisError if one is refused, for nobody cheats here."""
        arrived = []
        for target in targets:
            target.known.done |= 1 << target.index
            body = self._network.body(target)
            verdict = admit_target(self.trade.context, target, body)
            if isinstance(verdict, Rejection):
                author = target.known.announcement.author
                raise FtisError(f"A packet of {peer_id(author)} was refused: {verdict.reason} ({verdict.detail}).")
            arrived.append(Arrival(verdict, target.known.born, target.ref.right))
        await self.trade.on_groups(arrived)


def trade_of(context: AdmissionContext, store: PacketStore, stepper: Callable[[], Stepper]) -> Trade:
    """What a node trades: what its stepper wants, and to whom groups go that arrived. The stepper is made later."""
    return Trade(
        context,
        store,
        want=lambda: stepper().want(),
        on_groups=lambda arrived: stepper().source.inbox.on_groups(arrived),
    )


def everything(known: Known) -> int:
    """Every packet of an announcement is wanted."""
    return -1
