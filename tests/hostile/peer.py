"""A hostile peer: p2pd, identity, signatures and calls are real; what it says is an attack's choice."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind.p2p import PeerID

from ftis_node.packet import packet_digest
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.announcement import Announcement, PacketRef, announce, decode_announcement
from ftis_node.swarm.handshake import fetch_run, greeting
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.invitation import Invitation
from ftis_node.swarm.known import announcement_id
from ftis_node.swarm.wire.libp2p import FtisSwarm, Libp2p
from ftis_node.swarm.wire.transport import Unreachable
from tests.hostile.world import World
from tests.support.swarm import Answers, transport

CALL_SECONDS = 10.0
OPEN_SECONDS = 5.0  # until a stream or a connection is open
FETCH = "FtisSwarm.rpc_fetch"
KEPT = 512  # announcements that it heard; of its own 64 times as many
PATIENCE = 20.0

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[ftis_pb2.FetchRequest, bytes], AsyncIterator[ftis_pb2.FetchChunk]]


def always(status: ftis_pb2.FetchChunk.Status) -> Serve:
    """Answers each packet that is asked for with this status."""

    async def serve(request: ftis_pb2.FetchRequest, _: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]:
        for digest in request.digests:
            yield ftis_pb2.FetchChunk(digest=digest, status=status)

    return serve


@dataclass(frozen=True)
class Target:
    """An honest node, by its address."""

    address: str

    @property
    def author(self) -> bytes:
        return parse_address(self.address)

    @property
    def port(self) -> int:
        _, _, after = self.address.partition("/tcp/")
        return int(after.split("/")[0])


class Hostile(Answers):
    """Answers as an honest node would until an attack puts something else in the place of an answer.

    say_hello: the handshake it opens with and answers with. say: what it answers an exchange with. serve: what it sends
    to who fetches.
    """

    def __init__(self, identity: Identity, transport: Libp2p, targets: Sequence[Target], world: World):
        self.identity = identity
        self.transport = transport
        self.targets = list(targets)
        self.world = world
        self.agent = "ftis-node/9.9"
        self.address = ""
        self.invitation: Invitation | None = None
        self.certificates = b""
        self.bodies: dict[bytes, bytes] = {}
        self.heard: dict[int, Announcement] = {}
        self.say_hello: Callable[[ftis_pb2.Handshake], ftis_pb2.Handshake] = self.hello
        self.say: Callable[[ftis_pb2.ExchangeRequest], ftis_pb2.ExchangeResponse] = self.answer
        self.serve: Serve = self.give
        self._entries: dict[int, ftis_pb2.Entry] = {}

    # --- what targets ask ------------------------------------------------------------------------------------------

    async def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake:
        return self.say_hello(request)

    async def on_exchange(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> ftis_pb2.ExchangeResponse:
        self._listen(request.entries)
        return self.say(request)

    def hello(self, _: ftis_pb2.Handshake | None = None) -> ftis_pb2.Handshake:
        hello = greeting(self.world.run, [self.address])
        hello.agent = self.agent
        hello.certificates = self.certificates
        return hello

    def answer(self, request: ftis_pb2.ExchangeRequest) -> ftis_pb2.ExchangeResponse:
        """Gives what it is asked for, and wants all that is mentioned."""
        entries = [self._entries[id] for id in request.wanted if id in self._entries]
        wanted = [mention.id for mention in request.mentions]
        return ftis_pb2.ExchangeResponse(entries=entries, wanted=wanted)

    async def give(self, request: ftis_pb2.FetchRequest, _: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]:
        """The bytes that belong to a digest, if it has them."""
        for digest in request.digests:
            if digest in self.bodies:
                yield ftis_pb2.FetchChunk(digest=digest, packet=self.bodies[digest])
            else:
                yield ftis_pb2.FetchChunk(digest=digest, status=ftis_pb2.FetchChunk.GONE)

    # --- what it asks ----------------------------------------------------------------------------------------------

    def stub(self, target: Target) -> Any:
        return FtisSwarm.get_stub(self.transport.p2p, PeerID(target.author))

    async def open_stream(self, target: Target) -> Stream:
        """A stream of requests for packets. Dials anew where the connection was cut."""
        await self.transport.connect(target.author, [target.address])
        calling = self.transport.p2p._client.stream_open(PeerID(target.author), (FETCH,))
        _, reader, writer = await asyncio.wait_for(calling, OPEN_SECONDS)
        return reader, writer

    async def meet(self, target: Target) -> ftis_pb2.Handshake:
        """Dials a target and shakes hands."""
        await self.transport.connect(target.author, [target.address])
        hello = self.say_hello(ftis_pb2.Handshake())
        if self.invitation is not None and self.invitation.inviter == target.author:
            hello.invitation = self.invitation.encoded
        answer = await self.stub(target).rpc_handshake(hello, timeout=CALL_SECONDS)
        self.certificates = answer.granted or self.certificates
        return answer

    async def exchange(self, target: Target, **message: Any) -> ftis_pb2.ExchangeResponse:
        """One call; shakes hands first where the target has forgotten it."""
        request = ftis_pb2.ExchangeRequest(**message)
        for _ in range(2):
            answer = await self.stub(target).rpc_exchange(request, timeout=CALL_SECONDS)
            if not answer.stranger:
                break
            await self.meet(target)
        self._listen(answer.entries)
        return answer

    async def tell(self, *entries: ftis_pb2.Entry, more: Sequence[ftis_pb2.Mention] = ()):
        """Tells all targets: the first whole, for a node reads one that it did not ask for, and each by mention; then
        gives whom it can what is asked for.

        Args:
            more: mentions of what there is not.
        """
        mentions = [_mention(entry) for entry in entries]
        for target in self.targets:
            answer = await self.exchange(target, entries=entries[:1], mentions=[*mentions, *more])
            given = self.answer(ftis_pb2.ExchangeRequest(wanted=answer.wanted)).entries
            if given:
                await self.exchange(target, entries=given)

    async def overhear(self):
        """Asks the targets for whatever they mention."""
        for target in self.targets:
            answer = await self.exchange(target, again=True)
            wanted = [mention.id for mention in answer.mentions]
            if wanted:
                await self.exchange(target, wanted=wanted[:32])

    def announcement(
        self, author: Identity, round: int, packets: Sequence[tuple[int, bytes]], **changes: Any
    ) -> ftis_pb2.Entry:
        """An announcement of these (slot, packet), which it serves from now on. Anybody's key will do."""
        refs = []
        for slot, body in packets:
            digest = packet_digest(body)
            refs.append(PacketRef(slot, digest, len(body), self.world.run.group // 2))
            self.bodies[digest] = body
        return self.promise(author, round, refs, **changes)

    def promise(self, author: Identity, round: int, refs: Sequence[PacketRef], **changes: Any) -> ftis_pb2.Entry:
        """An announcement of packets that there may be or not.

        Args:
            changes: fields of `announce` that are not as they should be.
        """
        fields = {"run_id": self.world.run.id, "policy_step": 0, "issued_at": int(time.time())}
        signed = announce(author, round=round, packets=refs, **(fields | changes))
        return self.entry(signed.encode(), len(refs))

    def entry(self, data: bytes, packets: int, age: float = 0.0) -> ftis_pb2.Entry:
        """An announcement as an exchange carries it; "I hold all of it"."""
        held = ((1 << packets) - 1).to_bytes((packets + 7) // 8, "little")
        entry = ftis_pb2.Entry(announcement=data, age_ms=int(age * 1000), held=held)
        self._entries[announcement_id(data)] = entry
        _forget(self._entries, 64 * KEPT)
        _forget(self.bodies, 64 * KEPT)
        return entry

    def _listen(self, entries: Sequence[ftis_pb2.Entry]):
        for entry in entries:
            with contextlib.suppress(Exception):
                made = decode_announcement(entry.announcement, max_packets=self.world.run.slots)
                self.heard[announcement_id(entry.announcement)] = made
        _forget(self.heard, KEPT)


def _mention(entry: ftis_pb2.Entry) -> ftis_pb2.Mention:
    age = max(1, math.ceil(entry.age_ms / 1000))
    return ftis_pb2.Mention(id=announcement_id(entry.announcement), held=entry.held, age=age)


def _forget(memory: dict[Any, Any], most: int):
    """The oldest, so that an attacker's own memory does not end the attack."""
    while len(memory) > most:
        del memory[next(iter(memory))]


def autogroup(pid: int | str = "self", nice: int | None = None) -> int | None:
    """The priority of a process's session among all sessions, as `nice` counts; None where there is no such thing.

    Args:
        nice: what it is to be from now on; less than it is, if this is root.
    """
    try:
        file = Path(f"/proc/{pid}/autogroup")
        if nice is not None:
            file.write_text(str(nice))
        return int(file.read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None


@contextlib.asynccontextmanager
async def hostile(
    path: Path,
    targets: Sequence[str],
    identity: Identity,
    world: World | None = None,
    host: str = "127.0.0.1",
    invitation: Invitation | None = None,
) -> AsyncIterator[Hostile]:
    """A hostile peer that the targets have met, until the block ends.

    Args:
        path: an empty folder. world: of the targets' run; by default they are asked for it. host: where it listens.
        invitation: to a private run.
    """
    async with transport(identity, path, host=host) as network:
        group = autogroup()
        if group is not None:
            autogroup(network.pid, nice=group)
        if world is None:
            found = await fetch_run(network, targets, PATIENCE, invitation)
            world = World.of(found.run)
        peer = Hostile(identity, network, [Target(address) for address in targets], world)
        peer.invitation = invitation
        peer.address = (await network.addresses())[0]
        await FtisSwarm(peer).add_p2p_handlers(network.p2p)
        for target in peer.targets:
            with contextlib.suppress(Unreachable, asyncio.TimeoutError):
                await peer.meet(target)
        yield peer
