"""A network in memory: latency, uplinks, who can dial whom, and a `Transport` for each node.

A node that left is noticed by timeouts only, as if its machine had been switched off.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message

from ftis_node.lab.simulation.directory import MemoryDirectory, Records
from ftis_node.lab.simulation.scenario import Machine
from ftis_node.step_report import Health
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.wire.inbound import Inbound
from ftis_node.swarm.wire.transport import DirectoryUser, Handlers, Listening, Unreachable

GOSSIP = "gossip"
MEMBERSHIP = "membership"
PACKETS = "packets"
KINDS = (GOSSIP, MEMBERSHIP, PACKETS)
# TCP, then Noise and the multiplexer with their negotiation: three round trips to open a connection.
DIAL_LATENCIES = 6
DIAL_SECONDS = 5.0  # as `wire.libp2p` waits

Reply = TypeVar("Reply", bound=Message)
_Handler = Callable[[Inbound], Awaitable[Message]]
_Requests = AsyncIterator[ftis_pb2.FetchRequest]
_Chunks = AsyncGenerator[ftis_pb2.FetchChunk, None]


@dataclass
class Meter:
    """Bytes of RPC messages that one node sent and received since second `since`, by kind (`KINDS`), and in `counts`
    what it did, by name: messages, connections, handshakes, exchanges, look_ups, busy, packets asked."""

    since: float
    out: Counter[str] = field(default_factory=Counter)
    inwards: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class Network:
    """All nodes that are there. Totals are of the whole simulation: sent = received + lost + flying, in bytes."""

    def __init__(self, latency: float, rng: random.Random, packet_scale: float = 1.0) -> None:
        """
        Args:
            latency: of every message, one way, in seconds.
            packet_scale: bytes that the network counts for each byte of a packet.
        """
        self.loop = asyncio.get_running_loop()
        self.nodes: dict[bytes, MemoryTransport] = {}
        self.doors: dict[bytes, str] = {}  # an address each of those that serve and can be dialled
        self.totals: Counter[str] = Counter()
        self.records = Records(rng)
        self.latency = latency
        self.packet_scale = packet_scale

    def some_dialable(self, count: int, rng: random.Random) -> list[str]:
        """One address each of up to so many random nodes that serve and can be dialled."""
        doors = list(self.doors.values())
        return rng.sample(doors, min(count, len(doors)))

    def arrive(self, receiver: bytes, kind: str, size: int, deliver: Callable[[], None]) -> None:
        """A message is where its receiver was: `deliver` is called if that is still there, else the message is lost."""
        self.totals["flying"] -= size
        node = self.nodes.get(receiver)
        if node is None:
            self.totals["lost"] += size
            return
        self.totals["received"] += size
        node.meter.inwards[kind] += size
        deliver()


class MemoryTransport:
    """One node's end of the network: a `Transport` whose bytes are counted and not copied. What a `Transport` has is
    explained there (`swarm.wire.transport`).

    Small messages take their time on the uplink but never queue; packets stand in one queue for it.
    """

    up = True

    def __init__(self, network: Network, author: bytes, machine: Machine, addresses: Sequence[str]) -> None:
        """
        Args:
            author: the 38-byte peer id.
            addresses: where it may be dialled; none if it only dials.
        """
        self.author = author
        self.machine = machine
        self.machine_addresses = list(addresses)
        self.listening = Listening(Path(), Path(), listen=bool(addresses))
        self.alive = True
        self.meter = Meter(network.loop.time())
        self.links: set[bytes] = set()  # open connections
        self._network = network
        self._inbound: Inbound | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # calls of peers that are being answered
        self._free_at = 0.0  # when the uplink has sent the packets that wait for it
        self._answered: dict[bytes, float] = {}  # when a peer last answered an exchange
        network.nodes[author] = self

    def leave(self) -> None:
        """Is gone from one moment to the next; nobody is told."""
        self.alive = False
        del self._network.nodes[self.author]
        self._network.doors.pop(self.author, None)
        for peer in self.links:
            if peer in self._network.nodes:
                self._network.nodes[peer].links.discard(self.author)
        self._end_tasks()

    # --- the transport ----------------------------------------------------------------------------------------------

    async def restart(self) -> None:
        """Nothing here ever breaks."""

    async def trouble(self) -> str:
        """Never returns."""
        await asyncio.Event().wait()  # until it is cancelled
        return ""

    async def addresses(self) -> list[str]:
        return list(self.machine_addresses)

    async def health(self) -> Health | None:
        return Health("public" if self.machine_addresses else "private", len(self.links), 0, 0.0, 0)

    async def connect(self, peer: bytes, addresses: Sequence[str]) -> None:
        """Takes three round trips, or five seconds if nobody answers there. Raises Unreachable."""
        if peer in self.links:
            return
        other = self._network.nodes.get(peer)
        if other is not None and other._answers_at(addresses):
            await asyncio.sleep(DIAL_LATENCIES * self._network.latency)
            if other.alive and self.alive:
                self._link(other)
                other._link(self)
                return
        elif addresses:
            await asyncio.sleep(DIAL_SECONDS)
        self.meter.counts["handshakes"] += 1
        raise Unreachable("none of its addresses answers")

    def _answers_at(self, addresses: Sequence[str]) -> bool:
        """Whether it serves, and has one of these addresses."""
        return self._inbound is not None and not set(addresses).isdisjoint(self.machine_addresses)

    def _link(self, other: MemoryTransport) -> None:
        """Notes an open connection at this end; the other end does the same."""
        self.links.add(other.author)
        self.meter.counts["connections"] += 1

    async def disconnect(self, peer: bytes) -> None:
        """Closes a connection at both ends at once, and ends the peer's streams here; nothing happens without one."""
        if self._inbound is not None:
            self._inbound.end_streams(peer)
        self.links.discard(peer)
        other = self._network.nodes.get(peer)
        if other is not None:
            other.links.discard(self.author)

    async def neighbours(self) -> dict[bytes, list[str]]:
        """The peers with an open connection that are still there, with their addresses but for the peer id."""
        found = {}
        for peer in self.links:
            node = self._network.nodes.get(peer)
            if node is not None:
                found[peer] = [text.rpartition("/p2p/")[0] for text in node.machine_addresses]
        return found

    async def serve(self, handlers: Handlers) -> None:
        """From now on it answers, and can be dialled if it has addresses."""
        self._inbound = Inbound(handlers)
        if self.machine_addresses:
            self._network.doors[self.author] = self.machine_addresses[0]

    async def serve_no_more(self) -> None:
        """Calls under way are given up; those that come later get no answer."""
        self._inbound = None
        self._network.doors.pop(self.author, None)
        self._end_tasks()

    async def handshake(self, peer: bytes, hello: ftis_pb2.Handshake, seconds: float) -> ftis_pb2.Handshake:
        self.meter.counts["handshakes"] += 1
        return await self._call(
            peer,
            MEMBERSHIP,
            hello,
            seconds,
            lambda inbound: inbound.handshake(hello, self.author),
        )

    async def exchange(
        self,
        peer: bytes,
        request: ftis_pb2.ExchangeRequest,
        seconds: float,
    ) -> ftis_pb2.ExchangeResponse:
        """As `_call`. Two calls of one exchange count as one in the meter."""
        now = self._network.loop.time
        is_second_call = self._answered.pop(peer, None) == now()  # an exchange that goes on at once is one
        if not is_second_call:
            self.meter.counts["exchanges"] += 1
        answer = await self._call(
            peer,
            GOSSIP,
            request,
            seconds,
            lambda inbound: inbound.exchange(request, self.author),
        )
        self._answered[peer] = now()
        return answer

    async def fetch(self, peer: bytes, requests: _Requests) -> _Chunks:
        """A stream of packets, see `_chunks`."""
        other = self._linked(peer)
        if other is None:
            await asyncio.Event().wait()  # as silence: the caller's patience ends it
            raise Unreachable("there is no connection")
        return self._chunks(other, requests)

    def directory(self, user: DirectoryUser) -> MemoryDirectory:
        network = self._network
        return MemoryDirectory(network.records, self.author, lambda: self.meter.counts, network.latency)

    def _linked(self, peer: bytes) -> MemoryTransport | None:
        """The other end of an open connection; None if there is none, or if that node has left."""
        if peer not in self.links:
            return None
        return self._network.nodes.get(peer)

    # --- calls ------------------------------------------------------------------------------------------------------

    async def _call(
        self,
        peer: bytes,
        kind: str,
        request: Message,
        seconds: float,
        handler: Callable[[Inbound], Awaitable[Reply]],
    ) -> Reply:
        """The other side's answer. Raises TimeoutError, also where there is no connection, or RuntimeError with what
        the other side raised.

        Args:
            kind: of `KINDS`, by which the bytes are counted.
            handler: what the other side answers with.
        """
        answer: asyncio.Future[Reply] = self._network.loop.create_future()
        other = self._linked(peer)
        if other is not None:
            arrive = partial(other.asked, self.author, kind, handler, answer)
            self._send(peer, kind, request.ByteSize(), arrive)
        async with asyncio.timeout(seconds):
            return await answer

    def asked(self, caller: bytes, kind: str, handler: _Handler, answer: asyncio.Future[Any]) -> None:
        """A call has arrived, whose `answer` is awaited at the caller's; a node that does not serve says nothing."""
        if self._inbound is not None:
            work = self._handle(self._inbound, caller, kind, handler, answer)
            self.answer(work)

    async def _handle(
        self,
        inbound: Inbound,
        caller: bytes,
        kind: str,
        handler: _Handler,
        answer: asyncio.Future[Any],
    ) -> None:
        """Answers a call, and sends the reply back, or what was raised."""
        settle: Callable[[], None]
        try:
            reply = await handler(inbound)
            size = reply.ByteSize()
            settle = partial(answer.set_result, reply)
        except Exception as error:  # the caller hears of it, as over libp2p
            size = len(repr(error))
            settle = partial(answer.set_exception, RuntimeError(repr(error)))

        def arrive() -> None:
            if not answer.done():
                settle()

        self._send(caller, kind, size, arrive)

    def _send(self, receiver: bytes, kind: str, size: int, deliver: Callable[[], None]) -> None:
        """A small message, which does not queue."""
        self.carry(receiver, kind, size, size / self.machine.uplink, deliver)

    def carry(
        self,
        receiver: bytes,
        kind: str,
        size: int,
        seconds: float,
        deliver: Callable[[], None],
    ) -> None:
        """Moves a message that has left here in `seconds`, and takes the latency besides; `deliver` is called if the
        receiver is still there then."""
        network = self._network
        self.meter.out[kind] += size
        self.meter.counts["messages"] += 1
        network.totals["sent"] += size
        network.totals["flying"] += size
        arrive = partial(network.arrive, receiver, kind, size, deliver)
        network.loop.call_later(seconds + network.latency, arrive)

    def answer(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a handler until it ends, or this node does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _chunks(self, holder: MemoryTransport, requests: _Requests) -> _Chunks:
        """The answers of a stream as they arrive. As over libp2p, a holder that ends the stream says nothing."""
        arrived: asyncio.Queue[ftis_pb2.FetchChunk] = asyncio.Queue()

        async def on_their_way() -> _Requests:
            async for request in requests:
                self.meter.counts["packets asked"] += len(request.digests)
                await self._reach(holder, request.ByteSize())
                yield request

        work = holder.serve_stream(self, on_their_way(), arrived)
        serving = holder.answer(work)
        try:
            while True:
                chunk = await arrived.get()
                if chunk.status == ftis_pb2.FetchChunk.BUSY:
                    self.meter.counts["busy"] += 1
                yield chunk
        finally:
            serving.cancel()

    async def _reach(self, holder: MemoryTransport, size: int) -> None:
        """Waits until a request for packets has reached its holder."""
        arrived = asyncio.Event()
        self._send(holder.author, PACKETS, size, arrived.set)
        await arrived.wait()

    async def serve_stream(
        self,
        caller: MemoryTransport,
        requests: _Requests,
        arrived: asyncio.Queue[ftis_pb2.FetchChunk],
    ) -> None:
        """Sends the node's answers over the uplink, one after the other; `arrived` has them when they are there. Runs
        at the holder, until the caller cancels it."""
        if self._inbound is None:
            return
        async with aclosing(self._inbound.fetch(requests, caller.author)) as chunks:
            async for chunk in chunks:
                deliver = partial(arrived.put_nowait, chunk)
                if not chunk.packet:
                    self._send(caller.author, PACKETS, chunk.ByteSize(), deliver)
                    continue
                unsent = len(chunk.packet) * (self._network.packet_scale - 1)  # bytes that a real packet has besides
                size = chunk.ByteSize() + round(unsent)
                seconds = self._departs(size)
                self.carry(caller.author, PACKETS, size, seconds, deliver)
                await asyncio.sleep(seconds)

    def _departs(self, size: int) -> float:
        """Seconds until a packet of `size` bytes has left, which enters the queue by this call: packets stand in one
        queue for the uplink."""
        now = self._network.loop.time()
        self._free_at = max(self._free_at, now) + size / self.machine.uplink
        return self._free_at - now

    def _end_tasks(self) -> None:
        """Gives up all calls of peers that are being answered."""
        for task in self._tasks:
            task.cancel()
