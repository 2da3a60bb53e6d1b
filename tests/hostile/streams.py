"""Attacks on what carries the calls: rows 33 (with the streams of 17), 41 and 62."""

import asyncio
import contextlib
import random

from hivemind.p2p import P2P

from ftis_node.swarm import ftis_pb2
from tests.hostile.attack import Attack, Crowd
from tests.hostile.peer import OPEN_SECONDS, Hostile, Target

STREAMS = 4  # of one peer that a node keeps


async def ask_ahead(writer: asyncio.StreamWriter, rng: random.Random, size: int):
    """Requests for digests of so many bytes, until the node, or p2pd, has had enough."""
    with contextlib.suppress(OSError):
        while True:
            digests = [rng.randbytes(size) for _ in range(64)]
            await P2P.send_protobuf(ftis_pb2.FetchRequest(digests=digests), writer)


class Row33NeverRead(Crowd):
    """As many streams as a node keeps, by as many callers as it serves at a time: requests sent ahead, small or large
    with answers as large, and no answer read."""

    row = 33
    rate = 1.0
    PEERS = 4
    BYTES = (100, 60_000)  # of a digest, which comes back in its answer

    async def prepare(self):
        await super().prepare()
        self._held: list[asyncio.StreamWriter] = []
        self._asking: set[asyncio.Task[None]] = set()

    async def strike(self):
        self._held = [writer for writer in self._held if not writer.is_closing()]
        for caller in self.peers:
            for target in self.peer.targets:
                for number in range(STREAMS):
                    size = self.BYTES[number % len(self.BYTES)]
                    await self._try(self._hold(caller, target, size))

    async def end(self):
        for task in self._asking:
            task.cancel()
        for writer in self._held:
            writer.transport.abort()
        await super().end()

    async def _hold(self, caller: Hostile, target: Target, size: int):
        _, writer = await caller.open_stream(target)
        self._held.append(writer)
        task = asyncio.create_task(ask_ahead(writer, self.rng, size))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)


class Row33HalfOpen(Attack):
    """Connections that say nothing, and streams on which nothing comes, half a message, or a byte now and then; the
    caller of some vanishes, of others stays."""

    row = 33
    rate = 4.0
    KEPT = 256
    CONNECTIONS = 4  # at a target, a strike

    async def prepare(self):
        self._held: list[asyncio.StreamWriter] = []

    async def strike(self):
        for target in self.peer.targets:
            for _ in range(self.CONNECTIONS):
                await self._try(self._connect(target.port))
            await self._try(self._half_open(target))
        for writer in self._held[::2]:
            writer.write(b"\x00")
        for writer in self._held[: -self.KEPT]:
            writer.transport.abort()
        self._held = self._held[-self.KEPT :]

    async def end(self):
        for writer in self._held:
            writer.transport.abort()

    async def _connect(self, port: int):
        calling = asyncio.open_connection("127.0.0.1", port)
        _, writer = await asyncio.wait_for(calling, OPEN_SECONDS)
        self._held.append(writer)

    async def _half_open(self, target: Target):
        head = P2P.MESSAGE_MARKER + (1000).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)
        for sent in (b"", P2P.MESSAGE_MARKER, head, head + b"x"):
            _, writer = await self.peer.open_stream(target)
            writer.write(sent)
            if self.rng.random() < 0.5:
                writer.transport.abort()
            else:
                self._held.append(writer)


class Row41Requests(Attack):
    """Requests without end in one stream, all answers read. `answered`: digests, of all nodes together."""

    row = 41
    rate = 1.0

    async def prepare(self):
        self.answered = 0
        self._tasks: dict[Target, asyncio.Task[None]] = {}

    async def strike(self):
        for target in self.peer.targets:
            if target not in self._tasks or self._tasks[target].done():
                self._tasks[target] = asyncio.create_task(self._try(self._ask(target)))

    async def end(self):
        for task in self._tasks.values():
            task.cancel()

    async def _ask(self, target: Target):
        reader, writer = await self.peer.open_stream(target)
        asking = asyncio.create_task(ask_ahead(writer, self.rng, 32))
        try:
            while True:
                await P2P.receive_protobuf(ftis_pb2.FetchChunk, reader)
                self.answered += 1
        finally:
            asking.cancel()
            writer.transport.abort()


class Row62Addresses(Attack):
    """Handshakes and answers that name the owner's own machine and network, in every way of writing them."""

    row = 62
    HOSTS = ("ip4/127.0.0.1", "ip4/169.254.169.254", "ip4/192.168.1.1", "ip6/::ffff:7f00:1", "ip6/64:ff9b::a9fe:a9fe")
    NAMES = ("dns4/localhost", "dns4/vault.corp.internal", "dns/router.lan", "dnsaddr/127.0.0.1.nip.io")

    async def prepare(self):
        self.peer.say_hello = self._hello
        self.peer.say = self._answer

    async def strike(self):
        for target in self.peer.targets:
            await self._try(self.peer.meet(target))

    def _addresses(self) -> list[str]:
        ports = (22, 80, 8080, self.rng.randrange(1024, 1 << 16))
        found = [f"/{host}/tcp/{port}" for host in (*self.HOSTS, *self.NAMES) for port in ports]
        return [f"{address}/p2p/{self.stranger().peer_id}" for address in found]

    def _hello(self, request: ftis_pb2.Handshake | None = None) -> ftis_pb2.Handshake:
        hello = self.peer.hello(request)
        hello.peers.extend(self._addresses())
        return hello

    def _answer(self, request: ftis_pb2.ExchangeRequest) -> ftis_pb2.ExchangeResponse:
        answer = self.peer.answer(request)
        answer.peers.extend(self._addresses())
        return answer
