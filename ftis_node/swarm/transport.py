"""libp2p through hivemind's p2pd, in this process's own event loop. Every wait here has a limit."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from ftis_node.errors import FtisError, UsageError, UserError
from ftis_node.packet import MAX_PACKET_BYTES
from ftis_node.swarm.identity import author_of

START_SECONDS = 15.0
DIAL_SECONDS = 5.0
# A p2pd that hangs is noticed after 1 + 1.5 + 1 + 1.5 s at the latest; one that died at once.
PING_EVERY = 1.0
PING_SECONDS = 1.5
MISSED_PINGS = 2
MAX_MESSAGE_BYTES = MAX_PACKET_BYTES + 1024  # a packet in its chunk

logger = logging.getLogger(__name__)


class Unreachable(FtisError):
    """A peer could not be dialled, or did not answer in time."""


@dataclass(frozen=True)
class Listening:
    """How p2pd is to be started: whose key, where to listen, where its control sockets lie (a directory of 0700)."""

    key: Path
    host: str
    port: int
    sockets: Path


def parse_address(text: str) -> tuple[str, bytes]:
    """A multiaddr such as ``/ip4/192.0.2.7/tcp/4001/p2p/12D3Koo…`` → (itself, the 38-byte peer id in it).

    Raises:
        UsageError: it is no multiaddr, or does not end in ``/p2p/`` and an Ed25519 peer id.
    """
    fix = "Copy it from the other node's `ftis-node id`; it looks like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"
    try:
        Multiaddr(text)
        peer = text.rsplit("/p2p/", 1)[1]  # the last: in a relayed address the first is the relay
    except Exception:  # the parser raises whatever its codecs raise
        raise UsageError(f"The peer address {text!r} is not a multiaddr that ends in /p2p/ID.", fix) from None
    try:
        return text, author_of(peer)
    except ValueError as error:
        raise UsageError(f"The peer address {text!r} has a bad peer id: {error}", fix) from None


async def _receive_bounded(reader: asyncio.StreamReader) -> bytes:
    """hivemind believes any length that a stream's sender writes, and buffers until memory is full."""
    length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), "big")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return await reader.readexactly(length)


P2P.receive_raw_data = staticmethod(_receive_bounded)


class _PendingCalls(dict[Any, "asyncio.Future[Any]"]):
    """Calls that still wait for their answer.

    hivemind asks whether a call is `in` here and then gives it its answer. If the call was given up in the same turn of
    the loop, that raises, and ends the one task that reads all answers: the node would be deaf from then on.
    """

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()

    over = False

    def __setitem__(self, call: Any, future: asyncio.Future[Any]) -> None:
        super().__setitem__(call, future)
        if self.over:
            future.set_exception(P2PDaemonError("p2pd has ended"))

    def fail(self) -> None:
        """p2pd is gone: without this each call, now and later, would wait for its own time to run out."""
        self.over = True
        for future in list(self.values()):
            if not future.done():
                future.set_exception(P2PDaemonError("p2pd has ended"))


class _OwnSession(P2P):  # type: ignore[misc]
    """Starts p2pd in a session of its own: Ctrl-C in a terminal reaches the whole group, and p2pd must outlive it."""

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        line: list[str] = P2P._make_process_args(*args, **kwargs)
        leave_group = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
        return [sys.executable, "-S", "-c", leave_group, *line]


class Transport:
    """A p2pd with our identity. When it has died or hangs, `restart` puts another in its place."""

    def __init__(self, listening: Listening, started: Callable[[int], None] | None = None) -> None:
        """
        Args:
            started: told the process id of each p2pd.
        """
        self.p2p: Any = None
        self.up = False
        self._listening = listening
        self._any_port = listening.port == 0
        self._started = started

    @classmethod
    async def start(cls, listening: Listening, started: Callable[[int], None] | None = None) -> Transport:
        """A transport whose p2pd runs.

        Raises:
            UserError: the port is taken, or p2pd does not start.
        """
        transport = cls(listening, started)
        await transport._launch()
        return transport

    async def restart(self) -> None:
        """Ends what is left of p2pd and starts another, on the same port, so that it is found where it was.

        Raises:
            UserError: p2pd does not start.
        """
        await self._kill()
        try:
            await self._launch()
        except UserError:
            if not self._any_port:
                raise
            self._listening = replace(self._listening, port=0)  # somebody took the port that the last one had
            await self._launch()

    async def trouble(self) -> str:
        """Returns when p2pd has died or does not answer, saying which."""
        missed = 0
        ended = asyncio.ensure_future(self.p2p._child.wait())
        try:
            while missed < MISSED_PINGS:
                done, _ = await asyncio.wait({ended}, timeout=PING_EVERY)
                if done:
                    return f"ended with code {ended.result()}"
                missed = 0 if await self._answers() else missed + 1
            return f"has not answered {missed} times"
        finally:
            ended.cancel()

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        return int(self.p2p._child.pid)

    async def addresses(self) -> list[str]:
        """Multiaddrs under which this node may be dialled, each ending in its peer id."""
        found = await asyncio.wait_for(self.p2p.get_visible_maddrs(latest=True), DIAL_SECONDS)
        return [str(address) for address in found]

    async def connect(self, peer: bytes, addresses: Sequence[str]) -> None:
        """Makes sure that there is a connection to `peer`, dialling `addresses` if there is none.

        Raises:
            Unreachable: no address answered.
        """
        maddrs = []
        for text in addresses:
            with suppress(Exception):  # an address from a peer may be anything; a bad one is skipped
                maddrs.append(Multiaddr(text.rpartition("/p2p/")[0]))
        try:
            # The one call that hivemind keeps private and a node cannot do without: dialling after the start.
            await asyncio.wait_for(self.p2p._client.connect(PeerID(peer), maddrs), DIAL_SECONDS)
        except (ControlFailure, P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            why = " ".join(str(error).split()) or type(error).__name__  # p2pd's errors have several lines
            raise Unreachable(f"{PeerID(peer)} cannot be dialled: {why}") from error

    async def connected(self) -> set[bytes]:
        """Peer ids that p2pd has a connection to."""
        peers = await asyncio.wait_for(self.p2p.list_peers(), DIAL_SECONDS)
        return {info.peer_id.to_bytes() for info in peers}

    async def close(self) -> None:
        """Ends p2pd, by force if it does not end when asked."""
        self.up = False
        try:
            await asyncio.wait_for(self.p2p.shutdown(), DIAL_SECONDS)
        except TimeoutError:
            await self._kill()

    async def _launch(self) -> None:
        how = self._listening
        _check_port(how.host, how.port)
        # hivemind puts p2pd's control sockets into /tmp, open to every local user; a private directory is not.
        private_p2p: Any = type("_P2P", (_OwnSession,), {"_UNIX_SOCKET_PREFIX": f"/unix{how.sockets}/"})
        family = "ip6" if ":" in how.host else "ip4"
        try:
            self.p2p = await private_p2p.create(
                host_maddrs=[f"/{family}/{how.host}/tcp/{how.port}"],
                identity_path=str(how.key),
                check_if_identity_free=False,  # hivemind's check only parses RSA keys
                startup_timeout=START_SECONDS,
            )
        except P2PDaemonError as error:
            raise _start_error(str(error), how.host, how.port) from error
        self.p2p._client.control._pending_calls = _PendingCalls()
        self.up = True
        if self._started is not None:
            self._started(self.pid)
        if self._any_port:
            self._listening = replace(how, port=_tcp_port(await self.addresses()))

    async def _kill(self) -> None:
        """Whatever state p2pd is in, it is gone afterwards, and so are its sockets and whoever waits for it."""
        self.up = False
        with suppress(ProcessLookupError):
            self.p2p._child.kill()
        await self.p2p._child.wait()
        self.p2p._client.control._pending_calls.fail()
        with suppress(Exception):  # hivemind's own clean-up, of a daemon that it need not end any more
            await asyncio.wait_for(self.p2p.shutdown(), DIAL_SECONDS)
        for socket_file in self._listening.sockets.glob("p2p*.sock"):
            socket_file.unlink(missing_ok=True)

    async def _answers(self) -> bool:
        try:
            await asyncio.wait_for(self.p2p._client.identify(), PING_SECONDS)
        except Exception:  # hivemind raises anything from a socket error to what its parser raises
            return False
        return True


def _check_port(host: str, port: int) -> None:
    """libp2p listens with SO_REUSEPORT: it would share a taken port with another node, each getting half the calls."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _port_error(host, port) from error


def _tcp_port(addresses: Sequence[str]) -> int:
    """The port in a multiaddr; 0 if none has one."""
    return next((int(found[1]) for text in addresses if (found := re.search(r"/tcp/(\d+)", text))), 0)


def _port_error(host: str, port: int) -> UserError:
    return UserError(
        f"The port {port} on {host} is taken or cannot be listened on.", "Choose another --port (0 means any)."
    )


def _start_error(message: str, host: str, port: int) -> UserError:
    if "address already in use" in message or "failed to listen" in message:
        return _port_error(host, port)
    return UserError(f"The network daemon p2pd did not start: {message}", "Look into the log; then start again.")
