"""hivemind's libp2p daemon as this node needs it: in private, and with closed what hivemind leaves open."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from google.protobuf.message import Message
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils.multiaddr.codecs import cid

from ftis_node.config.settings import Settings
from ftis_node.errors import UserError, raise_all
from ftis_node.packet import MAX_PACKET_BYTES
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.addresses import check_port, is_loopback, listen_addresses, listening_mistakes, port_error
from ftis_node.swarm.wire.streams import answer_stream
from ftis_node.swarm.wire.transport import Health, Listening, Reachable

START_SECONDS = 15.0
KILL_SECONDS = 5.0
HEALTH_SECONDS = 2.0
MAX_MESSAGE_BYTES = MAX_PACKET_BYTES + 1024  # a packet in its chunk
MAX_REQUEST_BYTES = 8 << 10  # the digests of a fetch
MAX_ERROR_BYTES = 4 << 10
MAX_CALL_BYTES = 512 << 10  # of a call that is no stream, and of its answer
CALLS_OF_ONE_PEER = 8  # at once, of those that are no streams
_NO_KADEMLIA, _KADEMLIA_CLIENT = "none", "client"
_HOP = "/libp2p/circuit/relay/0.2.0/hop"  # circuit v2: by this a node asks another to pass on what others send it

# AutoNAT's finding is in p2pd's log and in its metrics. The latter come with Go's profiler, on a port that every local
# user and, by DNS rebinding, any web page can read.
_AUTONAT = "autonat"
_FINDINGS: dict[str, Reachable] = {f"NAT status is {word}": word for word in ("unknown", "public", "private")}

# With --set relay_for_others=true. p2pd has no limit on the rate, and none on all circuits together.
_RELAY_RESERVATIONS, _RELAY_CIRCUITS = 16, 4  # nodes that may be reached through this one; circuits of each
_RELAY_BYTES, _RELAY_TIME, _RELAY_BUFFER = 256 << 20, "30m", 64 << 10  # a circuit, in each direction

logger = logging.getLogger(__name__)


def listening_of(settings: Settings, key: Path, sockets: Path) -> Listening:
    """As the settings say. Raises UsageError for addresses that are none."""
    raise_all(listening_mistakes(settings))
    return Listening(
        key,
        sockets,
        settings.host,
        settings.port,
        quic=settings.quic,
        listen=settings.listen,
        announce=settings.announce,
        relays=settings.relays,
        relay_for_others=settings.relay_for_others,
    )


async def _receive_bounded(reader: asyncio.StreamReader, most: int = MAX_MESSAGE_BYTES) -> bytes:
    """hivemind believes any length that a stream's sender writes, and buffers until memory is full."""
    length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), "big")
    if length > most:
        raise ValueError(f"a message of {length} bytes; at most {most} are allowed")
    return await reader.readexactly(length)


async def _receive_message(kind: type[Message], reader: asyncio.StreamReader) -> tuple[Message | None, RPCError | None]:
    """As hivemind's, with a limit by what is expected: who asks needs little room, only packets need much."""
    marker = await reader.readexactly(1)
    if marker == P2P.ERROR_MARKER:
        error = RPCError()
        error.ParseFromString(await _receive_bounded(reader, MAX_ERROR_BYTES))
        return None, error
    if marker != P2P.MESSAGE_MARKER:
        raise TypeError("neither a message nor an error")
    message = kind()
    most = MAX_REQUEST_BYTES if isinstance(message, ftis_pb2.FetchRequest) else MAX_MESSAGE_BYTES
    message.ParseFromString(await _receive_bounded(reader, most))
    return message, None


P2P.receive_raw_data = staticmethod(_receive_bounded)
P2P.receive_protobuf = staticmethod(_receive_message)

# hivemind writes a peer id within a multiaddr as a CID, which p2pd cannot read: no relayed address could be dialled. A
# multihash, which is what the specification of multiaddr says, is what it writes for protocols that are not in here.
cid.PROTO_NAME_TO_CIDv1_CODEC.clear()


class PendingCalls(dict[Any, "asyncio.Future[Any]"]):
    """Calls that still wait for their answer.

    hivemind asks whether a call is `in` here and then gives it its answer. If the call was given up in the same turn of
    the loop, that raises, and ends the one task that reads all answers: the node would be deaf from then on.
    """

    over = False

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()

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


class CallHandlers(dict[str, Callable[[bytes, PeerID], Awaitable[bytes]]]):
    """Who answers calls that are no streams, the DHT's included, by name.

    One peer has so many at once that wait for something; what is beyond that is refused before its body is parsed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._under_way: Counter[PeerID] = Counter()

    def __setitem__(self, name: str, handler: Callable[[bytes, PeerID], Awaitable[bytes]]) -> None:
        async def answer(data: bytes, peer: PeerID) -> bytes:
            if self._under_way[peer] >= CALLS_OF_ONE_PEER:
                raise PermissionError("too many calls at once")
            self._under_way[peer] += 1
            try:
                return await handler(data, peer)
            finally:
                self._under_way[peer] -= 1
                if not self._under_way[peer]:
                    del self._under_way[peer]

        super().__setitem__(name, answer)


class CallTasks(dict[Any, "asyncio.Task[None]"]):
    """Calls that are being answered; hivemind keeps for good those that the caller gave up."""

    def __setitem__(self, call: Any, task: asyncio.Task[None]) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))


# What runs before p2pd in its process: a session of its own, for Ctrl-C in a terminal reaches the whole group and p2pd
# must outlive it; and death together with this process, whatever kills it (PR_SET_PDEATHSIG, SIGKILL). hivemind has set
# the level of its log.
_PRELUDE = (
    "import ctypes, os, sys; os.setsid(); ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    f"os.environ['GOLOG_LOG_LEVEL'] += ',{_AUTONAT}=debug'; os.execv(sys.argv[2], sys.argv[2:])"
)


class _Child(P2P):  # type: ignore[misc]
    """A p2pd that ends with this process, whose streams leave nothing behind, and whose log is read."""

    _MORE: Sequence[str] = ()

    def __init__(self) -> None:
        super().__init__()
        self.reachability: Reachable = "unknown"

    @classmethod
    def _make_process_args(cls, *args: Any, **kwargs: Any) -> list[str]:
        line: list[str] = [*P2P._make_process_args(*args, **kwargs), *cls._MORE]
        return [sys.executable, "-S", "-c", _PRELUDE, str(os.getpid()), *line]

    async def _add_protobuf_stream_handler(self, name: str, handler: Any, kind: type[Message], **more: Any) -> None:
        await self.add_binary_stream_handler(name, functools.partial(answer_stream, self, name, handler, kind), **more)

    async def _read_outputs(self, ready: asyncio.Future[None]) -> None:
        """p2pd's log, to its end: a full pipe would stop p2pd. `ready` is set once it has started."""
        last = "it said nothing"
        while True:
            try:
                line = (await self._child.stdout.readline()).decode(errors="ignore")
            except ValueError:  # a line longer than the reader takes, which has dropped it
                continue
            if not line:
                break
            last = line.rstrip()
            self._take(last)
            if last.startswith("Peer ID:") and not ready.done():
                ready.set_result(None)
        if not ready.done():
            ready.set_exception(P2PDaemonError(f"Daemon failed to start: {last}"))

    def _take(self, line: str) -> None:
        """One line of p2pd's log."""
        with suppress(ValueError, AttributeError, TypeError):
            said = json.loads(line)
            if said.get("logger") == _AUTONAT:
                self.reachability = _FINDINGS.get(said.get("msg"), self.reachability)
                return
        self._log_p2pd_message(line)


def _private(sockets: Path, *more: str) -> Any:
    """A P2P whose control sockets are private: hivemind puts them into /tmp, open to every local user.

    It takes no part in libp2p's own DHT, which would dial whatever address a connected peer's answer names. Who is
    where is told by handshakes, exchanges and hivemind's DHT. With relays it is that DHT's client, for without p2pd
    does not look for relays.
    """
    modes = {_NO_KADEMLIA: {}, _KADEMLIA_CLIENT: {"dhtClient": 1}}
    return type(
        "_P2P",
        (_Child,),
        {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/", "_MORE": more, "DHT_MODE_MAPPING": modes},
    )


def _relaying(how: Listening) -> list[str]:
    """Whether p2pd passes on what others send one another, and within which limits, once AutoNAT calls it public."""
    if not how.relay_for_others:
        return ["-relayService=0"]
    return [
        f"-relayMaxReservations={_RELAY_RESERVATIONS}",
        f"-relayMaxCircuits={_RELAY_CIRCUITS}",
        f"-relayDataLimit={_RELAY_BYTES}",
        f"-relayTimeLimit={_RELAY_TIME}",
        f"-relayBufferSize={_RELAY_BUFFER}",
    ]


async def _relay_for_nobody(p2p: Any) -> None:
    """Takes the protocol away by which others ask for it.

    p2pd speaks it whatever -relayService says, as long as -relay is on, without which no relayed node can be reached. A
    handler of one's own replaces p2pd's, and none is left when that is removed.
    """

    async def refuse(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    await p2p.add_binary_stream_handler(_HOP, refuse)
    await p2p.remove_binary_stream_handler(_HOP)


async def launch(how: Listening, port: int) -> Any:
    """A running p2pd. Raises UserError if the port is taken, or p2pd does not start."""
    if how.listen:
        check_port(how.host, port)
    p2p = None
    try:
        p2p = await _private(how.sockets, *_relaying(how)).create(
            host_maddrs=listen_addresses(how.host, port, quic=how.quic),
            no_listen=not how.listen,
            announce_maddrs=how.announce or None,
            nat_port_map=how.listen and not is_loopback(how.host),
            use_auto_relay=bool(how.relays),
            trusted_relays=how.relays or None,
            identity_path=str(how.key),
            dht_mode=_KADEMLIA_CLIENT if how.relays else _NO_KADEMLIA,
            check_if_identity_free=False,  # hivemind's check only parses RSA keys; ours is `twin.somebody_else`
            startup_timeout=START_SECONDS,
            persistent_conn_max_msg_size=MAX_CALL_BYTES,
        )
        if not how.relay_for_others:
            await asyncio.wait_for(_relay_for_nobody(p2p), START_SECONDS)
    except (P2PDaemonError, TimeoutError) as error:
        if p2p is not None:
            await kill(p2p, how.sockets)
        message = str(error)
        if "address already in use" in message or "failed to listen" in message:
            raise port_error(how.host, port) from error
        fix = "Look into the log; then start again."
        raise UserError(f"The network daemon p2pd did not start: {message}", fix) from error
    control = p2p._client.control
    control._pending_calls, control._handler_tasks = PendingCalls(), CallTasks()
    control.unary_handlers = CallHandlers()
    for task in (control._read_task, control._write_task):  # how they end is seen by `Transport.trouble`
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return p2p


async def kill(p2p: Any, sockets: Path) -> None:
    """Whatever state p2pd is in, it is gone afterwards, and so are its sockets and whoever waits for an answer."""
    with suppress(ProcessLookupError):
        p2p._child.kill()
    await p2p._child.wait()
    p2p._client.control._pending_calls.fail()
    with suppress(Exception):  # hivemind's own clean-up, of a daemon that it need not end any more
        await asyncio.wait_for(p2p.shutdown(), KILL_SECONDS)
    _remove_sockets(sockets)


def _remove_sockets(directory: Path) -> None:
    for file in directory.glob("p2p*.sock"):
        file.unlink(missing_ok=True)


async def health(p2p: Any) -> Health | None:
    """How p2pd is; None if it does not answer."""
    try:
        connected = await asyncio.wait_for(p2p.list_peers(), HEALTH_SECONDS)
        process = psutil.Process(p2p._child.pid)
        with process.oneshot():
            return Health(
                reachability=p2p.reachability,
                connections=len(connected),
                memory_bytes=process.memory_info().rss,
                cpu_seconds=sum(process.cpu_times()[:2]),
                open_files=process.num_fds(),
            )
    except Exception:  # hivemind raises anything from a socket error to what its parser raises
        return None
