"""libp2p through hivemind's p2pd, in this process's own event loop. Every wait here has a time limit."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind recognises a stream by typing's alias only

import psutil
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.utils.multiaddr import Multiaddr

from ftis_node.errors import UserError
from ftis_node.host.descriptors import ran_out
from ftis_node.step_report import Health
from ftis_node.swarm.addresses import PortTaken, check_port, free_port
from ftis_node.swarm.ftis_pb2 import ExchangeRequest, ExchangeResponse, FetchChunk, FetchRequest, Handshake
from ftis_node.swarm.limits import Bounded
from ftis_node.swarm.wire.directory import Directory
from ftis_node.swarm.wire.inbound import Inbound
from ftis_node.swarm.wire.p2pd import kill, launch
from ftis_node.swarm.wire.transport import Chunks, DirectoryUser, Handlers, Listening, Requests, Unreachable, resolved

DIAL_SECONDS = 5.0
# The node detects a p2pd that hangs after at most 1 + 1.5 + 1 + 1.5 s, and one that died at once. On a crowded machine
# p2pd may just be slow, and starting another makes all slower: with each restart the node waits twice as long, and
# after each answer a little shorter.
PING_EVERY = 1.0
PING_SECONDS = 1.5
MISSED_PINGS = 2
LONGEST_PATIENCE = 16.0  # times as long as at first
CALMED = 0.99  # what an answer leaves of it
HEALTH_SECONDS = 2.0
KNOCK_SECONDS = 2.0
FAILURES_KEPT = 256
_HOST_PORT = re.compile("/ip[46]/([^/]+)/(?:tcp/([0-9]+)|udp/([0-9]+)/quic-v1)")
# A first packet of a version that nobody speaks: who speaks QUIC answers with the versions that it does (RFC 9000, 6).
_WHICH_QUIC = (b"\xc0\x1a\x2a\x3a\x4a\x08" + bytes(9)).ljust(1200, b"\0")


class FtisSwarm(Inbound, ServicerBase):  # type: ignore[misc]
    """The three RPCs in the form that hivemind requires.

    Handlers are named ``FtisSwarm.rpc_…`` in every run, so that a stranger gets an answer instead of silence.
    """

    async def rpc_handshake(self, request: Handshake, context: P2PContext) -> Handshake:
        return await self.handshake(request, context.remote_id.to_bytes())

    async def rpc_exchange(self, request: ExchangeRequest, context: P2PContext) -> ExchangeResponse:
        return await self.exchange(request, context.remote_id.to_bytes())

    def rpc_fetch(self, requests: AsyncIterator[FetchRequest], context: P2PContext) -> AsyncIterator[FetchChunk]:
        """Answer a fetch stream, which stays open until the caller ends its own side.

        If this side closed first, p2pd would reset the stream, and a reset overtakes chunks that are still under way.
        If this task is cancelled, `p2pd.answer_stream` releases everything that the stream holds.
        """
        return self.fetch(requests, context.remote_id.to_bytes())


class Libp2p:
    """A p2pd with our identity. When it has died or hangs, `restart` replaces it."""

    def __init__(self, listening: Listening) -> None:
        self.p2p: Any = None
        self.knock = _knock
        self._service: FtisSwarm | None = None
        self.up = False
        self.listening = listening
        self._down_since: float | None = None
        self._patience = 1.0
        self.port = 0
        self._failures = Bounded[bytes, str](FAILURES_KEPT)  # by peer, why the last dial failed

    @classmethod
    async def start(cls, listening: Listening, before: int = 0) -> Libp2p:
        """Start p2pd and return its transport.

        Args:
            before: the port to prefer if the settings name none, because peers may know it. 0: none.

        Raises:
            UserError: the port is taken, or p2pd does not start.
        """
        transport = cls(listening)
        if before and listening.port == 0:
            with suppress(UserError):  # another process has it now
                check_port(listening.host, before)
                transport.port = before
        await transport._launch()
        return transport

    async def restart(self) -> None:
        """End what is left of p2pd and start another on the same port, so that peers find it there.

        Raises:
            UserError: p2pd does not start.
        """
        self.up = False
        self._patience = min(2 * self._patience, LONGEST_PATIENCE)
        self._down_since = self._down_since or time.monotonic()
        await kill(self.p2p, self.listening.sockets)
        await self._launch()

    async def trouble(self) -> str:
        """Wait until p2pd has died or does not answer; return which."""
        missed = 0
        control = self.p2p._client.control
        ended = asyncio.ensure_future(self.p2p._child.wait())
        try:
            while missed < MISSED_PINGS:
                # One connection carries the calls of peers and the answers to this node; it alone may end.
                parts = {ended, control._read_task, control._write_task}
                done, _ = await asyncio.wait(parts, timeout=PING_EVERY, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    await asyncio.wait({ended}, timeout=PING_EVERY)
                    if ended.done():
                        return f"ended with code {ended.result()}"
                    return "passes on no calls any more"
                missed += 1
                if await self._answers():
                    missed = 0
            return f"has not answered {missed} times"
        finally:
            ended.cancel()

    def down_seconds(self) -> float:
        """Seconds since p2pd ended; 0 while it runs."""
        if self._down_since is None:
            return 0.0
        return time.monotonic() - self._down_since

    @property
    def pid(self) -> int:
        """The process id of p2pd."""
        return int(self.p2p._child.pid)

    async def addresses(self) -> list[str]:
        """The multiaddrs under which peers may dial this node, each ending in its peer id; none if it only dials."""
        found = await asyncio.wait_for(self.p2p._client.identify(), DIAL_SECONDS)
        return [f"{address}/p2p/{self.p2p.peer_id.to_base58()}" for address in found[1]]

    async def health(self) -> Health | None:
        """The health of p2pd with AutoNAT's finding; None if p2pd does not answer."""
        try:
            connected = await asyncio.wait_for(self.p2p.list_peers(), HEALTH_SECONDS)
            process = psutil.Process(self.pid)
            with process.oneshot():
                return Health(
                    self.p2p.reachability,
                    len(connected),
                    process.memory_info().rss,
                    sum(process.cpu_times()[:2]),
                    process.num_fds(),
                )
        except Exception:  # hivemind raises anything from a socket error to what its parser raises
            return None

    async def disconnect(self, peer: bytes) -> None:
        """End the streams that `peer` has opened, and if p2pd answers, all connections to it; it may dial again."""
        service = self._service
        if service is not None:
            service.end_streams(peer)
        with suppress(Exception):  # hivemind raises anything from a socket error to what its parser raises
            await asyncio.wait_for(self.p2p._client.disconnect(PeerID(peer)), DIAL_SECONDS)
        if service is not None:
            service.end_streams(peer)  # those that it has opened meanwhile

    async def connect(self, peer: bytes, addresses: Sequence[str]) -> None:
        """Dial `addresses` of `peer` unless there is a connection.

        Each is dialled by itself: when its own answers, a peer must not learn from the wait what is at the others that
        it named.

        Raises:
            Unreachable: no address answered.
        """
        dials = [asyncio.create_task(self._dial(peer, text)) for text in addresses or ("",)]
        whys = []
        for dial in asyncio.as_completed(dials):
            why = await dial
            if not why:
                return
            whys.append(why)
        why = "; ".join(dict.fromkeys(whys))
        self._failures[peer] = why
        raise Unreachable(f"{PeerID(peer)} cannot be dialled: {why}")

    async def _dial(self, peer: bytes, address: str) -> str:
        """Connect to a peer at an address, of which a name is resolved here; return why that fails, or ""."""
        try:
            found = await asyncio.wait_for(resolved(address), DIAL_SECONDS)
            places = list(filter(None, (one.rpartition("/p2p/")[0] for one in found)))
            # p2pd puts off a dial where one failed before, for up to five minutes: it gets addresses that answer.
            silent = await asyncio.gather(*map(self.knock, places))
            if places and all(silent) and peer not in await self.neighbours():
                return "; ".join(dict.fromkeys(silent))
            maddrs = [Multiaddr(place) for place, why in zip(places, silent, strict=True) if not why]
            # hivemind keeps this call private, and a node needs it to dial after the start.
            await asyncio.wait_for(self.p2p._client.connect(PeerID(peer), maddrs), DIAL_SECONDS)
        except Exception as error:  # an address from a peer may be anything, and so may what hivemind raises
            return _failure_text(error) or self._failures.get(peer, "it failed just before")
        return ""

    async def neighbours(self) -> dict[bytes, list[str]]:
        """The remote multiaddrs of p2pd's connections, without peer ids, by peer."""
        peers = await asyncio.wait_for(self.p2p.list_peers(), DIAL_SECONDS)
        return {info.peer_id.to_bytes(): list(map(str, info.addrs)) for info in peers}

    async def serve(self, handlers: Handlers) -> None:
        """Pass calls of peers to these handlers from now on; call it again after a restart."""
        if self._service is None:
            self._service = FtisSwarm(handlers)
        await asyncio.wait_for(self._service.add_p2p_handlers(self.p2p), DIAL_SECONDS * self._patience)

    async def serve_no_more(self) -> None:
        """End all streams of peers, and refuse further calls."""
        if self._service is None:
            return
        with suppress(Exception):  # p2pd may be gone
            await asyncio.wait_for(self._service.remove_p2p_handlers(self.p2p), DIAL_SECONDS)
        self._service.end_streams()

    async def handshake(self, peer: bytes, hello: Handshake, seconds: float) -> Handshake:
        """Call `peer`. hivemind raises anything from a remote handler's repr to a socket error."""
        answer: Handshake = await self._stub(peer).rpc_handshake(hello, timeout=seconds)
        return answer

    async def exchange(self, peer: bytes, request: ExchangeRequest, seconds: float) -> ExchangeResponse:
        """Call `peer`. Raises as `handshake` does."""
        answer: ExchangeResponse = await self._stub(peer).rpc_exchange(request, timeout=seconds)
        return answer

    async def fetch(self, peer: bytes, requests: Requests) -> Chunks:
        """Open a stream to `peer`; the answers end when the stream ends. Raises as `handshake` does."""
        chunks: Chunks = await self._stub(peer).rpc_fetch(requests)
        return chunks

    def directory(self, user: DirectoryUser) -> Directory:
        """The DHT of the user's run."""
        return Directory(lambda: self.p2p, user)

    def _stub(self, peer: bytes) -> Any:
        """The peer's RPCs, to be called."""
        return FtisSwarm.get_stub(self.p2p, PeerID(peer))

    async def close(self) -> None:
        """End p2pd, by force if it does not shut down in time."""
        self.up = False
        try:
            await asyncio.wait_for(self.p2p.shutdown(), DIAL_SECONDS)
        except TimeoutError:
            await kill(self.p2p, self.listening.sockets)

    async def _launch(self) -> None:
        """Start p2pd on the port that it had, or that the settings name, or on any; if any may do, try a second time.

        Raises:
            UserError: p2pd does not start, or a port that the settings name is taken.
        """
        for last in (False, True):
            self.port = self.port or self.listening.port or free_port(self.listening.host)
            try:
                self.p2p = await launch(self.listening, self.port, self._patience)
                break
            except UserError as error:
                if last or self.listening.port != 0:
                    raise
                if isinstance(error, PortTaken):
                    self.port = 0  # any other will do
        self.up = True
        self._down_since = None

    async def _answers(self) -> bool:
        """Whether p2pd answers in time; True also if this process has no file descriptor left to ask it with.

        From 1.5 s on `up` is False until there is an answer, and each answer shortens the patience a little.
        """
        late = asyncio.get_running_loop().call_later(PING_SECONDS, setattr, self, "up", False)  # no peer is to blame
        try:
            await asyncio.wait_for(self.p2p._client.identify(), PING_SECONDS * self._patience)
        except Exception as error:  # hivemind raises anything from a socket error to what its parser raises
            return ran_out(error)  # this process has no file descriptors left: no evidence against p2pd
        finally:
            late.cancel()
        self.up = True
        self._patience = max(1.0, CALMED * self._patience)
        return True


async def _knock(place: str) -> str:
    """Why nobody answers at an address; "" if somebody does, or only p2pd can tell."""
    found = _HOST_PORT.fullmatch(place)
    if found is None:
        return ""
    host, tcp, quic = found.groups()
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    kind = socket.SOCK_STREAM
    if quic:
        kind = socket.SOCK_DGRAM
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(family, kind) as door:
            door.setblocking(False)
            async with asyncio.timeout(KNOCK_SECONDS):
                await loop.sock_connect(door, (host, int(tcp or quic)))
                if quic:
                    await loop.sock_sendall(door, _WHICH_QUIC)
                    await loop.sock_recv(door, 1)
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            return "nothing listens there (connection refused)"
        return error.strerror or f"no answer in {KNOCK_SECONDS:.0f} s"
    return ""


def _failure_text(error: Exception) -> str:
    """The reason of a failed dial in one line; "" if p2pd tried no address again, so soon after it failed. libp2p
    reports each address on a line of its own."""
    text = " ".join(str(error).split())
    found = re.search(r"remote key matches (\w+)", text)
    if found is not None:
        return f"another node answers there, {found[1]}"
    if text.count("dial backoff") == text.count("* [") > 0:  # each of its addresses
        return ""
    return text or type(error).__name__
