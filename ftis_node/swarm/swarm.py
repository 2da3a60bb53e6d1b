"""Being in touch with a swarm: sessions, gossip, reports. What a node gives and takes is `pulling`'s."""

import asyncio
import functools
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftis_node.config.run import RunFile
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.host.loops import end, forever
from ftis_node.swarm.address_book import ADDRESSES_TOLD, LAN
from ftis_node.swarm.announcement import Announcement, PacketRef, announce, decode_announcement
from ftis_node.swarm.chronicle import Chronicle
from ftis_node.swarm.ftis_pb2 import ExchangeRequest, ExchangeResponse, FetchChunk, FetchRequest, Handshake
from ftis_node.swarm.gossip import Gossip, Message
from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.limits import OWN, Budgets
from ftis_node.swarm.membership import Membership
from ftis_node.swarm.open_run import OpenRun
from ftis_node.swarm.pulling import IDLE_SECONDS, Pulling, Trade, nothing_to_trade
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.self_report import SelfReport, SelfReports
from ftis_node.swarm.sessions import Told
from ftis_node.swarm.supervisor import Supervisor
from ftis_node.swarm.table import Table
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.transport import Answer, DirectoryUser, PeerDirectory, Transport

EXCHANGE_SECONDS = 5.0  # of a call
EXCHANGE_PEERS = 6  # whom a node asks for news in a round, besides those that it tells its newest announcement
TURN_SECONDS = 0.1  # for a peer's answer, before the next is asked
TURNS = (0.5, 2.0)  # a peer's wait counts as so much at least, and at most: else one of two would begin each exchange
MAINTAIN_SECONDS = 15.0  # between two rounds of greetings, at most
ALONE_SECONDS = 3.0  # the same without a peer
RECORD_SECONDS = 60.0  # between two records in the DHT
SETTLED_RECORD_SECONDS = 180.0
FIRST_LOOK_UP_SECONDS = 15.0  # in a large swarm the first peers have named enough others by then
PEERS_TOLD = 2  # peers that an answer names
QUESTIONS = 2  # requests of an exchange: the news of both, then what either lacks
WATCHED = 5  # of an observer's at most
ENOUGH_PEERS = 16  # in the active view; from then on a node is settled
CALLS_A_SECOND = 50.0  # of one peer
CALLS_AT_ONCE = 200.0

logger = logging.getLogger(__name__)


class Swarm:
    """One node in touch with one run, in one event loop; with a model it also pulls and serves packets."""

    def __init__(
        self,
        *,
        transport: Transport,
        identity: Identity,
        run_file: RunFile,
        reputation: Reputation,
        max_age: float,
        trade: Trade | None = None,
        peer_cache: Path | None = None,
        decode: Callable[..., Announcement] = decode_announcement,
        rng: random.Random | None = None,
        roster: OpenRun | None = None,
        describe: Callable[[], SelfReport | None] = lambda: None,
        chronicle: Chronicle | None = None,
    ) -> None:
        """
        Args:
            reputation: that of authors and holders, with bans. max_age: see `Table`. peer_cache: see `Membership`.
            trade: what the node gives and takes; None: it has no model, looks on, and takes nobody's place.
            decode: see `Gossip`.
            rng: the source of all of this node's random choices; a simulation seeds it.
            roster: the members of the run; None: it is open.
            describe: returns what the node says of itself now; None: nothing.
            chronicle: what was heard of the swarm in earlier starts.
        """
        rng = rng or random.Random()
        observing = trade is None
        trade = trade or nothing_to_trade(run_file.run)
        self.traffic = Traffic(reputation.established)  # without a limit, until its owner sets one
        self.reputation = reputation
        self.interval = 1.0  # seconds between exchanges while hungry; the node sets it to a fraction of its step
        self.idle = IDLE_SECONDS  # the same at other times
        self.roster = roster or OpenRun()
        self.roster.lied = reputation.lied
        self.membership = Membership(
            transport,
            identity,
            run_file,
            self.traffic,
            peer_cache,
            rng,
            self.roster,
            observing,
        )
        self._view = self.membership.active_view
        self.chronicle = chronicle or Chronicle(run_file.run.id, unix_seconds())
        self.reports = SelfReports(
            identity,
            self.chronicle,
            describe,
            self.roster.admits,
            observing=observing,
            spares=reputation.established,
        )
        table = Table(
            max_age,
            boot_seconds,
            rng,
            recorded=reputation.established,
            rows_of=trade.rows_of,
            view=self._view,
        )
        self.pulling = Pulling(trade, self.membership, table, reputation, lambda: self.interval)
        self.gossip = Gossip(
            table,
            run_file.run,
            identity.author,
            reputation,
            trade.store.seen,
            self.pulling.news.set,
            decode,
            self.roster.admits,
            self.membership.sessions,
            trade.store.holds,
        )
        self._directory = PeerDirectory()
        if not self.roster.private:
            doubted = self.membership.addresses.referrers.doubted
            user = DirectoryUser(identity, run_file.run.id, self.knows, doubted, self.traffic)
            self._directory = transport.directory(user)
        self.supervisor = Supervisor(transport, self._revive)
        self._rng = rng
        self._transport = transport
        self._identity = identity
        self._store = trade.store
        self._questions = WATCHED if observing else QUESTIONS
        self._to_exchange = asyncio.Event()  # there is something to send or to request
        self._to_greet = asyncio.Event()  # there is a peer to greet
        self._record = asyncio.Event()  # there is something to do in the DHT
        self._calls = Budgets(boot_seconds, CALLS_A_SECOND, CALLS_AT_ONCE)
        self._bootstraps: Sequence[str] = ()
        self._hints: Sequence[str] = ()
        self._tasks = list[asyncio.Task[None]]()
        self._asking = dict[bytes, asyncio.Task[None]]()
        self._cutting = dict[bytes, asyncio.Task[None]]()

    async def start(self, bootstraps: Sequence[str], hints: Sequence[str] = (), given: Sequence[str] = ()) -> None:
        """Register the handlers, greet the bootstraps, join the DHT and start the loops. Call it once; `close` ends it.

        Args:
            bootstraps: peers' addresses that this node's owner named. The node dials them in whatever network they are,
                and others in these networks.
            given: the same of addresses that the owner was given, in an invitation; but no others in their networks.
            hints: addresses in a peer's run file, which are dialled as any that a peer names.

        Raises:
            Exception: p2pd does not answer, nor does it after another start.
        """
        try:
            await self._transport.serve(self)
        except Exception as error:  # p2pd may have died while the model was being loaded
            logger.error("p2pd does not answer (%r); it is started again.", error)
            await self._transport.restart()
            await self._transport.serve(self)
        await self.membership.refresh_addresses()
        self.roster.obey()  # before anybody is dialled
        for data, age in self._store.latest_announced(self.gossip.table.max_age):
            self.gossip.recall(data, age)
        known = self.membership.addresses
        self._bootstraps = known.trust(bootstraps, given)
        self._hints = hints
        known.recall()
        known.hear([*self._bootstraps, *hints])
        await asyncio.gather(*(self.membership.greet(peer) for peer in self._strangers()))
        await self._directory.join(self._view, self.membership.outside())
        self._greet_if(bool(self._strangers()))
        self._to_exchange.set()
        for loop in (
            self._exchange_loop,
            self.pulling.loop,
            self._maintain_loop,
            self._record_loop,
            self.supervisor.watch,
        ):
            self._tasks.append(asyncio.create_task(forever(loop), name=loop.__qualname__))

    async def close(self) -> None:
        """Stop the loops, answer no more calls, and leave the DHT. The caller may then close transport and store."""
        while running := self._running():  # a loop may begin another task before it ends
            await end(running)
        with suppress(OSError):  # a full disk must not keep the rest from closing
            self.membership.save_cache()
        await self._transport.serve_no_more()  # a late request would find the store closed
        await self._directory.leave()

    def _running(self) -> list[asyncio.Task[Any]]:
        """The tasks of this node that have not ended: loops, pulls, exchanges and disconnections."""
        tasks = (*self._tasks, *self.pulling.pulls, *self._asking.values(), *self._cutting.values())
        return [task for task in tasks if not task.done()]

    def announce(
        self, round: int, policy_step: int, packets: Sequence[PacketRef], issued_at: int | None = None
    ) -> None:
        """Sign and spread a round of this node's own packets, which the store has; its number is taken (`take_round`).

        issued_at: unix seconds when the round's rows were drawn; None: now."""
        announcement = announce(
            self._identity,
            run_id=self.gossip.run_id,
            round=round,
            policy_step=policy_step,
            issued_at=int(unix_seconds()) if issued_at is None else issued_at,
            packets=packets,
        )
        self._store.announced(announcement.encode())
        self.gossip.announce(announcement)
        self._to_exchange.set()

    def hear_on_lan(self, addresses: Sequence[str]) -> None:
        """Take addresses of this run's nodes that mDNS named."""
        self._greet_if(self.membership.addresses.hear_on_lan(addresses))

    def hear_member_on_lan(self, addresses: Sequence[str]) -> None:
        """Take addresses of a member of this private run, from mDNS. Whoever knows the run may have made them up."""
        self._greet_if(self.membership.addresses.hear(addresses, LAN))

    def wake(self) -> None:
        """Wake the loops that pull and exchange, because the node may want other groups than before."""
        self.pulling.news.set()
        self._to_exchange.set()

    def recent_authors(self, seconds: float) -> set[bytes]:
        """Other authors that announced something within `seconds`."""
        return self.gossip.table.recent_authors(seconds) - {self._identity.author}

    def has_peers(self) -> bool:
        return bool(self._view)

    # --- calls of peers -------------------------------------------------------------------------------------------

    def admits(self, peer: bytes) -> bool:
        """Whether the node answers a call of this peer. A peer that calls too often or is banned is disconnected:
        refusing each of its calls would still cost p2pd and this process too much."""
        if not self.reputation.shunned(peer) and self._calls.take(peer):
            return True
        self._cut(peer)
        return False

    def knows(self, peer: bytes) -> bool:
        """Whether the peer is in the view."""
        return peer in self._view

    def _cut(self, peer: bytes) -> None:
        """End the peer's streams and its connection."""
        if peer not in self._cutting:
            task = asyncio.create_task(self._transport.disconnect(peer))
            self._cutting[peer] = task
            task.add_done_callback(lambda _: self._cutting.pop(peer, None))

    async def on_handshake(self, request: Handshake, peer: bytes) -> Handshake:
        """As `Membership.on_handshake`; what the table knows of the peer is forgotten, for it may have restarted."""
        known = peer in self._view
        answer = self.membership.on_handshake(request, peer)
        self.gossip.table.forget_peer(peer)
        if not known and peer in self._view and not self._settled():
            self.wake()
            self._to_greet.set()  # this also saves it in the cache for the next start
        return answer

    async def on_exchange(self, request: ExchangeRequest, peer: bytes) -> ExchangeResponse:
        """Answer a peer's news with this node's; tell one that has not shaken hands to do so first."""
        self.traffic.received[peer] += request.ByteSize()
        limits = self.membership.limits(peer)
        if limits is None:
            return ExchangeResponse(stranger=True)
        self._greet_if(not self._settled() and self.membership.addresses.called(peer))
        left = self._hear(request, peer)
        limits = limits.within(self.traffic.room(peer))
        answer = self.gossip.answer(request, peer, limits)
        answer.again |= left
        if limits.room > 0:
            self._tell(answer, peer, self.membership.sessions[peer].answer)
            self.membership.introduce(answer, PEERS_TOLD, peer)
        self.traffic.answer(peer, answer.ByteSize())
        return answer

    async def on_fetch(self, request: FetchRequest, peer: bytes) -> AsyncIterator[FetchChunk]:
        """Send a peer the packets that it asks for; tell one that may not ask that this node is busy."""
        # To a stranger the answer to its next exchange says that it has to shake hands.
        may = self.membership.limits(peer) is not None and not self.membership.sessions[peer].observer
        async for chunk in self.pulling.uploads.serve(request, peer, may=may):
            # It was banned or removed since the request; whoever might not ask then gets its "busy".
            if may and (self.reputation.shunned(peer) or not self.roster.admits(peer)):
                self._cut(peer)
                return
            yield chunk

    # --- calls to peers -------------------------------------------------------------------------------------------

    async def _exchange_loop(self) -> None:
        """Exchange with some peers while the node is hungry or has news, at least every half minute. One goes after the
        other, for an exchange serves both sides: a peer that has just asked needs not be asked."""
        while True:
            await self._wait(self._to_exchange, self.interval if self.pulling.hungry else self.idle)
            for peer in list(self._view):
                if self.reputation.shunned(peer) or not self.roster.admits(peer):
                    self._view.pop(peer)
                    self._cut(peer)
            self.gossip.tells_all = not self._settled()
            began = boot_seconds()
            places = EXCHANGE_PEERS
            for peer in self._by_turns():
                if peer not in self._view:
                    continue
                has_asked = self.membership.sessions[peer].asked > began
                if (has_asked or places <= 0) and not self.gossip.pushes_to(peer):
                    continue
                places -= 1
                task = asyncio.create_task(self._exchange(peer))
                self._asking[peer] = task
                task.add_done_callback(functools.partial(self._asked, peer))
                await asyncio.wait({task}, timeout=TURN_SECONDS)
            await asyncio.sleep(self.interval / 2)  # news that arrive meanwhile go out together

    def _by_turns(self) -> list[bytes]:
        """The peers to ask in a round: first, more or less, those that waited longest for an exchange, whoever asked
        last. Those that waited for less than about an interval are asked only to be told of the newest announcement."""
        now = boot_seconds()
        waited = {}
        for peer in self._view:
            if peer in self._asking:
                continue
            seconds = (now - self.membership.sessions[peer].asked) * self._rng.uniform(*TURNS)
            if seconds >= self.interval or self.gossip.pushes_to(peer):
                waited[peer] = seconds
        return sorted(waited, key=waited.__getitem__, reverse=True)

    def _asked(self, peer: bytes, task: asyncio.Task[None]) -> None:
        """Note that an exchange has ended; an error in it goes into the log."""
        del self._asking[peer]
        if not task.cancelled() and task.exception() is not None:
            logger.error("An exchange failed; the next may not", exc_info=task.exception())

    async def _exchange(self, peer: bytes) -> None:
        """Swap news with a peer; then once more for the announcements that either mentioned and the other lacks."""
        limits = self.membership.limits(peer) or OWN
        request = self.gossip.ask(peer, limits)
        session = self.membership.sessions[peer]
        self._tell(request, peer, session.request)
        for _ in range(self._questions):
            answer = await self._call(peer, request)
            if answer is None:
                return
            session.missed |= self._hear(answer, peer)
            further = self.gossip.take(request, answer, peer, limits.within(self.traffic.own_room(peer)))
            self._greet_if(self.membership.hear_of_peers(answer, PEERS_TOLD, peer))
            if further is None:
                return
            request = further
        self.gossip.unsent(request, peer)  # there is no question left for it

    async def _call(self, peer: bytes, request: ExchangeRequest) -> ExchangeResponse | None:
        """Return a peer's answer; None if there was none or the peer does not know this node."""
        self.traffic.ask(peer, request.ByteSize())
        try:
            answer = await self._transport.exchange(peer, request, EXCHANGE_SECONDS)
        except Exception as error:  # see `Transport.handshake`
            logger.debug("Exchange with %s failed: %r", peer_id(peer), error)
            self.gossip.failed(request, peer)
            self.membership.failed(peer)
            if peer not in self._view:
                self._to_greet.set()
            return None
        self.traffic.received[peer] += answer.ByteSize()
        self.membership.answered(peer)
        if not answer.stranger:
            return answer
        self.gossip.failed(request, peer)
        if self._settled():  # it restarted, or has forgotten this node among many others
            self._view.pop(peer, None)
        else:
            await self._greet(peer)
        return None

    # --- membership and the DHT -----------------------------------------------------------------------------------

    async def _maintain_loop(self) -> None:
        """Greet named peers; without any peer, go back to the bootstraps and the DHT. A node that is shut out waits."""
        known = self.membership.addresses
        while True:
            await self._wait(self._to_greet, self._leisure())
            await self.membership.refresh_addresses()
            self.roster.obey()
            if self.roster.shut_out:
                self._view.clear()
                await asyncio.sleep(1.0)
                continue
            if not self._settled():
                known.hear(self._bootstraps)
            if not self._view:
                known.hear(self._hints)
                known.recall()
                await self._look_up()
            strangers = self._strangers()[: 1 if self._settled() else EXCHANGE_PEERS]
            strangers += self.membership.outdated()[:EXCHANGE_PEERS]
            met = await asyncio.gather(*(self._greet(peer) for peer in strangers))
            if any(met) and not self._settled():
                self.wake()
                self._greet_if(bool(self._strangers()))
            self.membership.save_cache()
            self.traffic.forget_all_but(self._view)
            await asyncio.sleep(1.0)

    def _strangers(self) -> list[bytes]:
        """`AddressBook.strangers`, in its order, but none that is banned, or was a member and is none any more."""
        return [
            peer
            for peer in self.membership.addresses.strangers()
            if not self.reputation.shunned(peer) and not self.roster.has_left(peer)
        ]

    def _leisure(self) -> float:
        """Seconds until this node searches for peers again, if nothing happens meanwhile."""
        if not self._view:
            return ALONE_SECONDS
        return MAINTAIN_SECONDS if self._settled() else min(MAINTAIN_SECONDS, self.membership.addresses.patience())

    def _settled(self) -> bool:
        """Whether there are enough peers: then the node greets one stranger at a time, now and then. In a large swarm
        each exchange names a new peer, and a node that greeted them all would do little else."""
        return len(self._view) >= ENOUGH_PEERS

    def _greet_if(self, news: bool) -> None:
        """While the node has few peers, greet at once whom others named."""
        if news and not self._settled():
            self._to_greet.set()

    async def _greet(self, peer: bytes) -> bool:
        """Greet a peer; if it is in the view then, forget what it knew, for it may have restarted, and return True."""
        met = await self.membership.greet(peer)
        if met:
            self.gossip.table.forget_peer(peer)
        return met

    def _tell(self, message: Message, peer: bytes, told: Told) -> None:
        """Add what the peer was not told yet of members and self-reports; `told` names it, so it can be taken back."""
        session = self.membership.sessions[peer]
        reports = self.reports.news(session.reports, observer=session.observer)
        records = self.roster.news(session.records)
        message.reports.extend(reports.values())
        message.roster.extend(records.values())
        told.reports = reports
        told.records = records

    def _hear(self, message: Message, peer: bytes) -> bool:
        """Take what a peer tells of members and self-reports. Return whether some is to be told again."""
        left = self.roster.hear(message.roster, peer, self.membership.sessions[peer].records)
        return self.reports.hear(message.reports, peer) or left

    async def _record_loop(self) -> None:
        """Publish this node's addresses in the DHT; look up others while the node has few peers."""
        first = self.has_peers()
        while True:
            await self._directory.join(self._view, self.membership.outside())
            if addresses := await self.membership.refresh_addresses():
                await self._directory.publish(addresses, settled=self._settled())
            if not first and not self._settled():
                await self._look_up()
            pause = SETTLED_RECORD_SECONDS if self._settled() else RECORD_SECONDS
            await self._wait(self._record, FIRST_LOOK_UP_SECONDS if first else pause)
            first = False

    async def _look_up(self) -> None:
        """Hear the addresses in peers' records from the DHT; each answer names the peer that gave it."""
        await self._directory.find(self._take, alone=not self.has_peers())

    def _take(self, answer: Answer) -> None:
        """Hear the addresses in an answer of the DHT, a few of each owner."""
        addresses = [text for some in answer.addresses.values() for text in some[:ADDRESSES_TOLD]]
        self._greet_if(self.membership.addresses.hear(addresses, answer.referrer))

    async def _revive(self) -> None:
        """Restore the handlers, connections and DHT after a new p2pd replaced the old one, see `Supervisor`."""
        await self._transport.serve(self)
        await self.membership.refresh_addresses()
        await asyncio.gather(*map(self._greet, self._view))
        await self._directory.leave()
        self._record.set()
        self.wake()

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        """Wait for an event, for so many seconds at most, and clear it."""
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
        event.clear()
