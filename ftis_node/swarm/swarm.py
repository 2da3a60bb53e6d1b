"""The swarm as the node sees it: announce what one made, say how much one wants, get admitted groups."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hivemind.p2p import PeerID

from ftis_node.packet import Group
from ftis_node.run import RunFile
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.admission import AdmissionContext, Blame, Rejection, admit
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.directory import Directory
from ftis_node.swarm.fetch import HolderFault, Limit, Uploads, fetch
from ftis_node.swarm.gossip import Gossip
from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.limits import OWN
from ftis_node.swarm.membership import ADDRESSES_TOLD, Membership
from ftis_node.swarm.service import FtisSwarm
from ftis_node.swarm.supervision import Supervisor
from ftis_node.swarm.table import Arrival, Table, Target
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.transport import DIAL_SECONDS, Transport

EXCHANGE_SECONDS = 5.0
IDLE_SECONDS = 30.0
MAINTAIN_SECONDS = 15.0
ALONE_SECONDS = 3.0
RECORD_SECONDS = 60.0
SETTLED_RECORD_SECONDS = 180.0  # all records lie under one key, so reading it costs more the more nodes there are
BAD_PACKETS = 3
PEERS_TOLD = 2
QUESTIONS = 2  # of one exchange: what is new on either side, and what either lacks of it
ENOUGH_PEERS = 16
ENOUGH_RECORDS = 64
TAKEN_TOGETHER = 16

logger = logging.getLogger(__name__)


class Store(Protocol):
    """What the swarm needs of the packet store."""

    def body(self, digest: bytes) -> bytes | None: ...

    def seen(self, author: bytes, round: int, slot: int) -> bool: ...

    def settle(self, keys: Iterable[tuple[bytes, int, int]], fate: str) -> None: ...


class Swarm:
    """Gossip, membership and transfers of one node in one run."""

    def __init__(
        self,
        *,
        transport: Transport,
        identity: Identity,
        run_file: RunFile,
        context: AdmissionContext,
        store: Store,
        exchange_peers: int,
        max_age: float,
        want: Callable[[], int],
        on_groups: Callable[[Sequence[Arrival]], Awaitable[None]],
        peer_cache: Path | None = None,
        upload_bytes: float = 0.0,
    ) -> None:
        """
        Args:
            upload_bytes: most payload a second that it sends; 0: no limit.
            store: where held packets are read and keys looked up.
            want: how many more groups the node would take now.
            on_groups: takes admitted groups.
        """
        self.traffic = Traffic()
        self.rejections: Counter[str] = Counter()
        self.rejected_by_author: Counter[bytes] = Counter()
        self.accepted_by_author: Counter[bytes] = Counter()
        self.interval = 1.0  # seconds between exchanges while hungry; the node sets it to a fraction of its step
        self._transport = transport
        self._identity = identity
        self._run_file = run_file
        self._run = run_file.run
        self._context = context
        self._store = store
        self._exchange_peers = exchange_peers
        self._want = want
        self._on_groups = on_groups
        self.membership = Membership(transport, identity, run_file, self.traffic, peer_cache)
        self._told = asyncio.Event()  # something to tell or to ask
        self._news = asyncio.Event()  # something to pull
        self._heard = asyncio.Event()  # somebody to greet
        self._record = asyncio.Event()  # something to do in the DHT
        table = Table(max_age, time.monotonic)
        self.gossip = Gossip(table, self._run, identity.author, store.seen, self._news.set)
        self._uploads = Uploads(store.body, self.traffic, Limit(upload_bytes))
        self._service = FtisSwarm(self)
        self._directory = Directory(transport, identity, run_file.run.id)
        self.supervisor = Supervisor(transport, self._revive)
        self._busy_holders: set[bytes] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: dict[bytes, asyncio.Task[None]] = {}
        self._pulls: set[asyncio.Task[bool]] = set()
        self._under_way = 0  # packets that are being pulled

    async def start(self, bootstraps: Sequence[str]) -> None:
        """Registers the handlers, greets the bootstraps, joins the DHT and starts the loops."""
        try:
            await self._serve()
        except Exception as error:  # p2pd may have died while the model was being loaded
            logger.error("p2pd does not answer (%r); it is started again.", error)
            await self._transport.restart()
            await self._serve()
        await self.membership.refresh_addresses()
        self.membership.load_cache()
        self._bootstraps = list(bootstraps)
        self.membership.hear(self._bootstraps)
        await asyncio.gather(*(self.membership.greet(peer) for peer in self.membership.strangers()))
        await self._directory.join(self.membership.view)
        self._meet_more()
        self._told.set()
        loops = (self._exchange_loop, self._pull_loop, self._maintain_loop, self._record_loop, self.supervisor.watch)
        for loop in loops:
            self._tasks.append(asyncio.create_task(self._forever(loop), name=loop.__name__))

    async def close(self) -> None:
        """Stops the loops and the DHT; the transport is its owner's to close."""
        # Again, because wait_for before Python 3.12 loses a cancellation that meets its result, and a loop begins anew.
        while pending := self._running():
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.5)
        with suppress(OSError):  # a full disk must not keep the rest from ending
            self.membership.save_cache()
        with suppress(Exception):  # p2pd may be gone; else a late request would meet a store that is closed
            await asyncio.wait_for(self._service.remove_p2p_handlers(self._transport.p2p), EXCHANGE_SECONDS)
        await self._directory.leave()

    def _running(self) -> list[asyncio.Task[Any]]:
        return [task for task in (*self._tasks, *self._pulls, *self._asking.values()) if not task.done()]

    def announce(self, round: int, policy_step: int, packets: Sequence[PacketRef]) -> None:
        """Signs and spreads a round of this node's own packets, which are in the store already."""
        announcement = announce(
            self._identity,
            run_id=self._run.id,
            round=round,
            policy_step=policy_step,
            issued_at=int(time.time()),
            packets=tuple(packets),
        )
        self.gossip.announce(announcement)
        self._told.set()

    def poke(self) -> None:
        """Tells the swarm that the node wants more."""
        self._news.set()
        self._told.set()

    def recent_authors(self, seconds: float) -> set[bytes]:
        """Other authors who announced something within `seconds`."""
        return self.gossip.table.recent_authors(seconds) - {self._identity.author}

    def has_peers(self) -> bool:
        return bool(self.membership.view)

    # --- what peers ask -------------------------------------------------------------------------------------------

    async def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake:
        known = peer in self.membership.view
        answer = self.membership.on_handshake(request, peer)
        self.gossip.forget_peer(peer)
        if not known and peer in self.membership.view and not self._settled():
            self.poke()  # it may have what nobody else has
            self._heard.set()  # and belongs into the cache, for the next start
        return answer

    async def on_exchange(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> ftis_pb2.ExchangeResponse:
        self.traffic.received[peer] += request.ByteSize()
        limits = self.membership.limits(peer)
        if limits is None:
            return ftis_pb2.ExchangeResponse(stranger=True)
        answer = self.gossip.answer(request, peer, limits)
        answer.peers.extend(self.membership.some_addresses(PEERS_TOLD, peer))
        self.traffic.sent[peer] += answer.ByteSize()
        return answer

    async def on_fetch(self, request: ftis_pb2.FetchRequest, peer: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]:
        if self.membership.limits(peer) is None:
            for digest in request.digests[: OWN.digests]:  # a stranger; its next exchange will tell it so
                yield ftis_pb2.FetchChunk(digest=digest, status=ftis_pb2.FetchChunk.BUSY)
            return
        async for chunk in self._uploads.serve(request, peer):
            yield chunk

    # --- what this node asks --------------------------------------------------------------------------------------

    async def _exchange_loop(self) -> None:
        """Exchanges with a few random peers while hungry or with news to tell; at least every half minute. Whoever does
        not answer holds nobody else up."""
        while True:
            await self._wait(self._told, self.interval if self._want() > 0 else IDLE_SECONDS)
            view = [peer for peer in self.membership.view if peer not in self._asking]
            for peer in random.sample(view, min(self._exchange_peers, len(view))):
                self._asking[peer] = task = asyncio.create_task(self._exchange(peer))
                task.add_done_callback(functools.partial(self._asked, peer))
            if self._asking:
                await asyncio.wait(self._asking.values(), timeout=self.interval)
            await asyncio.sleep(self.interval / 2)  # news that arrive meanwhile go out together

    def _asked(self, peer: bytes, task: asyncio.Task[None]) -> None:
        del self._asking[peer]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("An exchange failed; the next may not", exc_info=error)

    async def _exchange(self, peer: bytes) -> None:
        """Asks and tells, and once more for what either lacks of what the other mentioned."""
        limits = self.membership.limits(peer) or OWN
        request: ftis_pb2.ExchangeRequest | None = self.gossip.ask(peer, limits)
        for _ in range(QUESTIONS):
            if request is None:
                return
            answer = await self._call(peer, request)
            if answer is None:
                return
            request = self.gossip.take(request, answer, peer, limits)
            if self.membership.hear(answer.peers[: PEERS_TOLD * ADDRESSES_TOLD]) and not self._settled():
                self._heard.set()
        if request is not None:
            self.gossip.unsent(request, peer)

    async def _call(self, peer: bytes, request: ftis_pb2.ExchangeRequest) -> ftis_pb2.ExchangeResponse | None:
        """A peer's answer; None if there was none or it does not know this node."""
        try:
            answer: ftis_pb2.ExchangeResponse = await FtisSwarm.get_stub(
                self._transport.p2p, PeerID(peer)
            ).rpc_exchange(request, timeout=EXCHANGE_SECONDS)
        except Exception as error:  # hivemind raises anything from a remote handler's repr to a socket error
            logger.debug("Exchange with %s failed: %r", peer_id(peer), error)
            self.gossip.failed(request, peer)
            self.membership.failed(peer)
            if not self.membership.view:
                self._heard.set()
            return None
        self.traffic.sent[peer] += request.ByteSize()
        self.traffic.received[peer] += answer.ByteSize()
        self.membership.answered(peer)
        if not answer.stranger:
            return answer
        self.gossip.failed(request, peer)
        if self._settled():  # it was started anew, or has met so many since
            self.membership.drop(peer)
        else:
            await self._greet(peer)
        return None

    async def _pull_loop(self) -> None:
        """Pulls what the node wants and is not under way, as soon as somebody has it. From each holder in a stream of
        its own, so that a slow one holds nothing up."""
        while True:
            await self._wait(self._news, IDLE_SECONDS)
            need = self._want() - self._under_way if self._transport.up else 0
            by_holder: dict[bytes, list[Target]] = {}
            for target in self.gossip.table.choose(need, self._wanted) if need > 0 else []:
                by_holder.setdefault(random.choice(self._holders(target)), []).append(target)
                target.known.pulling |= 1 << target.index
            for holder, targets in by_holder.items():
                self._under_way += len(targets)
                self._busy_holders.add(holder)
                task = asyncio.create_task(self._pull(holder, targets))
                self._pulls.add(task)
                task.add_done_callback(functools.partial(self._pulled, holder, targets))

    def _pulled(self, holder: bytes, left: list[Target], task: asyncio.Task[bool]) -> None:
        """A holder that had nothing, or not all, is left alone for a moment."""
        self._pulls.discard(task)
        for target in list(left):
            self._landed(target, left)
        well = False
        if not task.cancelled():
            error = task.exception()
            well = error is None and task.result()
            if error is not None:
                logger.error("A pull failed; what it brought will be pulled again", exc_info=error)
        asyncio.get_running_loop().call_later(0.0 if well else self.interval, self._free, holder)

    def _free(self, holder: bytes) -> None:
        """It may be asked again."""
        self._busy_holders.discard(holder)
        self._news.set()

    def _landed(self, target: Target, left: list[Target]) -> None:
        """It is under way no longer, whatever became of it."""
        left.remove(target)
        target.known.pulling &= ~(1 << target.index)
        self._under_way -= 1

    async def _pull(self, holder: bytes, left: list[Target]) -> bool:
        """Fetches from one holder, taking from `left` what landed; returns whether it had everything."""
        arrived: dict[Target, Arrival] = {}
        missing = False
        limits = self.membership.limits(holder) or OWN
        try:
            async for target, data in fetch(self._transport, holder, left.copy(), self.traffic, limits):
                group = self._admit(target, data) if data is not None else None
                if data is None:
                    target.tried(holder)
                    missing = True
                if data is None or group is None:
                    self._landed(target, left)
                else:
                    arrived[target] = Arrival(group, data, target.known.born)
                if len(arrived) >= TAKEN_TOGETHER:
                    await self._hand_over(arrived, left)
            self.membership.answered(holder)
        except HolderFault as fault:
            missing = True
            if self._transport.up:  # else it was this node's own p2pd
                logger.info("Holder %s: %s", peer_id(holder), fault)
                self.rejections["holder"] += 1
                self.membership.failed(holder)
                for target in left:
                    if target not in arrived:
                        target.tried(holder)
        finally:
            await self._hand_over(arrived, left)
        return not missing

    async def _hand_over(self, arrived: dict[Target, Arrival], left: list[Target]) -> None:
        """To the node; empties `arrived`. What it could not take, as for want of room, will be pulled again."""
        if not arrived:
            return
        groups = arrived.copy()
        arrived.clear()
        try:
            await self._on_groups(list(groups.values()))
        except BaseException:
            for target in groups:
                target.known.done &= ~(1 << target.index)
            raise
        for target, arrival in groups.items():
            self._landed(target, left)
            target.known.have |= 1 << target.index
            self.accepted_by_author[arrival.group.author] += 1

    def _admit(self, target: Target, data: bytes) -> Group | None:
        """Admits one packet whose hash is right: from here on, what is wrong is the author's doing."""
        author, round, slot = target.key
        target.known.done |= 1 << target.index
        if self._store.seen(author, round, slot):
            return None
        verdict = admit(self._context, author, data, announced=(round, slot), digest=target.ref.digest)
        if isinstance(verdict, Rejection):
            self._blame(author, target, verdict)
            return None
        return verdict

    def _blame(self, author: bytes, target: Target, rejection: Rejection) -> None:
        self.rejections[str(rejection.reason)] += 1
        logger.warning("Refused a packet of %s: %s (%s)", peer_id(author), rejection.reason, rejection.detail)
        self._store.settle([target.key], "refused")
        if rejection.blame is Blame.AUTHOR:
            self.rejected_by_author[author] += 1
            if self.rejected_by_author[author] % BAD_PACKETS == 0:
                self.gossip.quarantine(author, f"{BAD_PACKETS} of its packets were refused, last: {rejection.reason}")

    def _holders(self, target: Target) -> list[bytes]:
        return [
            peer
            for peer in {target.known.announcement.author, *target.known.holders}
            if peer in self.membership.view
            and peer not in self._busy_holders
            and target.known.held_by(peer, target.index)
        ]

    def _wanted(self, target: Target) -> bool:
        return bool(self._holders(target))

    # --- staying in touch -----------------------------------------------------------------------------------------

    async def _maintain_loop(self) -> None:
        """Greets who was heard of; goes back to the bootstraps and the DHT when alone."""
        while True:
            await self._wait(self._heard, ALONE_SECONDS if not self.membership.view else MAINTAIN_SECONDS)
            await self.membership.refresh_addresses()
            if not self.membership.view:
                self.membership.hear(self._bootstraps)
                self.membership.load_cache()
                await self._look_up()
            strangers = self.membership.strangers()[: 1 if self._settled() else self._exchange_peers]
            met = await asyncio.gather(*(self._greet(peer) for peer in strangers))
            if any(met) and not self._settled():
                self.poke()
                self._meet_more()
            self.membership.save_cache()
            self.traffic.forget_all_but(self.membership.view)
            await asyncio.sleep(1.0)

    def _settled(self) -> bool:
        """Whether there are peers enough: then one stranger at a time is greeted, now and then. In a large swarm each
        exchange tells of somebody new, and whoever greeted them all would do little else."""
        return len(self.membership.view) >= ENOUGH_PEERS

    def _meet_more(self) -> None:
        """Who has few peers does not wait to greet those whom the first ones told of."""
        if not self._settled() and self.membership.strangers():
            self._heard.set()

    async def _greet(self, peer: bytes) -> bool:
        """A peer that has to be greeted may have been started anew: it is told everything again."""
        met = await self.membership.greet(peer)
        if met:
            self.gossip.forget_peer(peer)
        return met

    async def _record_loop(self) -> None:
        """Leaves this node's addresses in the DHT and reads the others'."""
        while True:
            await self._directory.join(self.membership.view)
            others = await self._look_up()
            addresses = await self.membership.refresh_addresses()
            if addresses and others < ENOUGH_RECORDS:  # what lies under the key must not grow with the swarm
                await self._directory.publish(addresses)
            await self._wait(self._record, SETTLED_RECORD_SECONDS if self._settled() else RECORD_SECONDS)

    async def _look_up(self) -> int:
        """Hears of the peers whose records the DHT has; returns how many there are."""
        found = await self._directory.find()
        for addresses in found:
            if self.membership.hear(addresses) and not self._settled():
                self._heard.set()
        return len(found)

    async def _revive(self) -> None:
        """After another p2pd took the old one's place: it knows no handler, no peer, no DHT."""
        await self._serve()
        await self.membership.refresh_addresses()
        await asyncio.gather(*(self.membership.dial(peer) for peer in self.membership.view))
        await self._directory.leave()
        self._record.set()
        self.poke()

    async def _serve(self) -> None:
        """From now on p2pd passes calls on to this node."""
        await asyncio.wait_for(self._service.add_p2p_handlers(self._transport.p2p), DIAL_SECONDS)

    async def _forever(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Keeps a loop alive through an unforeseen error, which is logged; at most one a second."""
        while True:
            try:
                await loop()
            except Exception:
                logger.exception("The swarm's %s failed; it goes on", getattr(loop, "__name__", loop))
                await asyncio.sleep(1.0)

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
        event.clear()
