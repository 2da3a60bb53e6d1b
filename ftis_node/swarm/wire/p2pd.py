"""hivemind's libp2p daemon p2pd with private sockets, and without the gaps that hivemind leaves open.

One of them: hivemind's own handler of a stream waits without limit to hand over a request that has no reader any more.
Its socket and task then stay for good, and so do p2pd's. Here a stream releases everything when it ends.
"""

import asyncio
import functools
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import base58
from google.protobuf.message import Message
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils.multiaddr.codecs import cid

from ftis_node.config.settings import Settings
from ftis_node.errors import UserError, brief, raise_all
from ftis_node.host.loops import end
from ftis_node.packet import MAX_PACKET_BYTES
from ftis_node.swarm.addresses import check_port, listen_addresses, listening_mistakes, port_error, scope_of_host
from ftis_node.swarm.ftis_pb2 import FetchRequest
from ftis_node.swarm.wire.transport import LISTENING, Listening, Reachable

START_SECONDS = 30.0
KILL_SECONDS = 5.0
MAX_MESSAGE_BYTES = MAX_PACKET_BYTES + 1024  # a packet in its chunk
MAX_REQUEST_BYTES = 8 << 10  # the digests of a fetch
MAX_ERROR_BYTES = 4 << 10
MAX_CALL_BYTES = 512 << 10  # a unary call or its answer
CALLS_OF_ONE_PEER = 8  # unary calls at once
_HOP = "/libp2p/circuit/relay/0.2.0/hop"  # circuit v2: the protocol by which a node asks for a relay

# p2pd reports AutoNAT's finding in its log and in its metrics. The metrics come with Go's profiler, on a port that
# every local user and, by DNS rebinding, any web page can read.
_AUTONAT = "autonat"
_FINDINGS: dict[str, Reachable] = {f"NAT status is {word}": word for word in ("unknown", "public", "private")}

# Limits with --set relay_for_others=true. p2pd has no limit on the rate, and none on all circuits together.
_RELAY = (
    "-relayMaxReservations=16",  # relayed nodes
    "-relayMaxCircuits=4",  # of each
    f"-relayDataLimit={256 << 20}",  # bytes, per circuit and direction
    "-relayTimeLimit=30m",
    f"-relayBufferSize={64 << 10}",
)

# Requests that a caller may send ahead; a node sends one a stream. Behind more, its hanging up would go unseen.
SENT_AHEAD = 5
LINGER_SECONDS = 2.0
DISCONNECT_SECONDS = 5.0

Handler = Callable[[AsyncIterator[Any], P2PContext], AsyncIterator[Message]]

logger = logging.getLogger(__name__)


async def answer_stream(
    p2p: Any,
    name: str,
    handler: Handler,
    kind: type[Message],
    info: StreamInfo,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Answer one stream until the caller or the handler ends it.

    The handler runs in a task of its own, and may cancel that task to end the stream.

    Args:
        kind: the message type of the requests.
    """
    context = P2PContext(handle_name=name, local_id=p2p.peer_id, remote_id=info.peer_id)
    waiting: asyncio.Queue[Any] = asyncio.Queue(SENT_AHEAD)
    reading = asyncio.create_task(_read(kind, reader, waiting))
    answering = asyncio.create_task(_answer(handler(_requests(waiting), context), writer))
    try:
        await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
        hung_up = reading.done() and reading.result()
        await end({reading, answering})
        if not hung_up and not await _p2pd_lets_go(reader, writer):
            logger.debug("%s does not read what it asked for; its connection is closed.", info.peer_id)
            with suppress(Exception):  # hivemind raises anything from a socket error to what its parser raises
                await asyncio.wait_for(p2p._client.disconnect(info.peer_id), DISCONNECT_SECONDS)
    finally:
        writer.transport.abort()
        await end({reading, answering})


async def _read(kind: type[Message], reader: asyncio.StreamReader, waiting: asyncio.Queue[Any]) -> bool:
    """Queue the requests of a stream.

    Returns True when the caller has hung up, False when it has sent too many, or something other than a request.
    """
    try:
        while True:
            request, _ = await P2P.receive_protobuf(kind, reader)
            waiting.put_nowait(request)
    except (asyncio.IncompleteReadError, ConnectionError):
        return True
    except Exception as error:  # a parser may raise anything; QueueFull: too many
        logger.debug("A stream ends because of an invalid request: %s", brief(error))
        return False


async def _requests(waiting: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    """Yield a stream's requests until the caller sends an error."""
    while True:
        request = await waiting.get()
        if request is None:  # the caller sent an error
            return
        yield request


async def _answer(answers: AsyncIterator[Message], writer: asyncio.StreamWriter) -> None:
    """Send the handler's answers, and its error if it raises."""
    try:
        async for answer in answers:
            await P2P.send_protobuf(answer, writer)
    except ConnectionError:
        pass  # the caller is gone
    except Exception as error:
        logger.debug("A stream's handler failed: %s", brief(error))
        with suppress(Exception):
            await P2P.send_protobuf(RPCError(message=str(error)), writer)
    finally:
        with suppress(Exception):
            await answers.aclose()  # type: ignore[attr-defined]


async def _p2pd_lets_go(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether p2pd closes its end once this side has ended. It does not while it waits for the caller to read."""
    if writer.transport.get_write_buffer_size():
        return False
    try:
        writer.write_eof()
        async with asyncio.timeout(LINGER_SECONDS):
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        return False
    except (OSError, RuntimeError):
        pass  # it is closed already
    return True


def listening_of(settings: Settings, key: Path, sockets: Path) -> Listening:
    """The options of p2pd by the settings. Raises UsageError if an address is invalid."""
    raise_all(listening_mistakes(settings))
    options = {name: getattr(settings, name) for name in LISTENING}
    return Listening(key, sockets, **options)


async def _receive_bounded(reader: asyncio.StreamReader, most: int = MAX_MESSAGE_BYTES) -> bytes:
    """Read a message with a bounded length. hivemind trusts the sender's length and buffers until memory is full."""
    length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), "big")
    if length > most:
        raise ValueError(f"a message of {length} bytes; at most {most} are allowed")
    return await reader.readexactly(length)


async def _receive_message(kind: type[Message], reader: asyncio.StreamReader) -> tuple[Message | None, RPCError | None]:
    """Replace hivemind's reader by one with a limit per message type: requests are small, only packets are large."""
    marker = await reader.readexactly(1)
    if marker == P2P.ERROR_MARKER:
        error = RPCError()
        error.ParseFromString(await _receive_bounded(reader, MAX_ERROR_BYTES))
        return None, error
    if marker != P2P.MESSAGE_MARKER:
        raise TypeError("neither a message nor an error")
    message = kind()
    most = MAX_MESSAGE_BYTES
    if isinstance(message, FetchRequest):
        most = MAX_REQUEST_BYTES
    message.ParseFromString(await _receive_bounded(reader, most))
    return message, None


P2P.receive_raw_data = staticmethod(_receive_bounded)
P2P.receive_protobuf = staticmethod(_receive_message)

# hivemind spells out a peer's id in every call and stream, digit by digit.
base58.b58encode = functools.lru_cache(1024)(base58.b58encode)

# hivemind writes a peer id within a multiaddr as a CID, which p2pd cannot read, so no relayed address could be dialled.
# The multiaddr specification requires a multihash, which hivemind writes for protocols that are not in this table.
cid.PROTO_NAME_TO_CIDv1_CODEC.clear()


class PendingCalls(dict[Any, "asyncio.Future[Any]"]):
    """Calls that wait for their answer.

    hivemind checks whether a call is `in` here and then sets its answer. If the call was cancelled in the same turn of
    the loop, this raises and ends the only task that reads answers: the node would receive nothing from then on.
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
        """Fail all calls, now and later, because p2pd is gone; otherwise each would wait for its timeout."""
        self.over = True
        for future in list(self.values()):
            if not future.done():
                future.set_exception(P2PDaemonError("p2pd has ended"))


class CallHandlers(dict[str, Callable[[bytes, PeerID], Awaitable[bytes]]]):
    """Handlers of unary calls by name, the DHT's included.

    Each peer has a limit of unfinished calls. A call beyond it is refused before its body is parsed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._under_way = Counter[PeerID]()

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
    """Tasks of running calls. hivemind keeps those that the caller cancelled for good; this removes them."""

    def __setitem__(self, call: Any, task: asyncio.Task[None]) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))


# The prelude of p2pd's process. It opens a session of its own, because Ctrl-C in a terminal reaches the whole group and
# p2pd must outlive it. It makes p2pd die with this process, whatever kills that (PR_SET_PDEATHSIG, SIGKILL). hivemind
# has set the log level. One thread at a time is enough for what a node sends; several spend a third more in waking one
# another.
_PRELUDE = (
    "import ctypes, os, sys; os.setsid(); ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.environ.setdefault('GOMAXPROCS', '1'); "
    f"os.environ['GOLOG_LOG_LEVEL'] += ',{_AUTONAT}=debug'; os.execv(sys.argv[2], sys.argv[2:])"
)


class _Child(P2P):  # type: ignore[misc]
    """A p2pd that ends with this process, releases its streams, and has its log read."""

    _MORE: Sequence[str] = ()
    made: Any = None  # of the class, which `launch` makes anew: to be ended if its start fails

    def __init__(self) -> None:
        super().__init__()
        self.reachability: Reachable = "unknown"
        type(self).made = self

    @classmethod
    def _make_process_args(cls, *args: Any, **kwargs: Any) -> list[str]:
        """p2pd's command line, after the prelude that executes it. hivemind calls this."""
        line: list[str] = [*P2P._make_process_args(*args, **kwargs), *cls._MORE]
        return [sys.executable, "-S", "-c", _PRELUDE, str(os.getpid()), *line]

    async def _add_protobuf_stream_handler(
        self,
        name: str,
        handler: Any,
        kind: type[Message],
        **more: Any,
    ) -> None:
        """Let `answer_stream` answer streams of this name. hivemind calls this."""
        answer = functools.partial(answer_stream, self, name, handler, kind)
        await self.add_binary_stream_handler(name, answer, **more)

    async def _read_outputs(self, ready: asyncio.Future[None]) -> None:
        """Read p2pd's log to its end, because a full pipe would stop p2pd. Set `ready` once it has started."""
        last = "it said nothing"
        while True:
            try:
                line = (await self._child.stdout.readline()).decode(errors="ignore")
            except ValueError:  # the reader has dropped a line that was too long
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
        """Process one line of p2pd's log."""
        with suppress(ValueError, AttributeError, TypeError):
            said = json.loads(line)
            if said.get("logger") == _AUTONAT:
                self.reachability = _FINDINGS.get(said.get("msg"), self.reachability)
                return
        self._log_p2pd_message(line)


def _private(sockets: Path, *more: str) -> Any:
    """A P2P class with private control sockets: hivemind puts them into /tmp, open to every local user.

    It does not join libp2p's own DHT, which would dial any address in a connected peer's answer. Handshakes, exchanges
    and hivemind's DHT supply addresses instead. With relays it is a client of libp2p's DHT, because p2pd searches for
    relays only then.
    """
    # By whether there are relays.
    modes = {False: {}, True: {"dhtClient": 1}}
    settings = {
        "_UNIX_SOCKET_PREFIX": f"/unix{sockets}/",
        "_MORE": more,
        "DHT_MODE_MAPPING": modes,
    }
    return type("_P2P", (_Child,), settings)


async def _relay_for_nobody(p2p: Any) -> None:
    """Remove the protocol by which peers ask for a relay.

    p2pd speaks it despite -relayService=0 while -relay is on, and without -relay it cannot reach relayed nodes. An own
    handler replaces p2pd's; its removal leaves none.
    """

    async def refuse(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    await p2p.add_binary_stream_handler(_HOP, refuse)
    await p2p.remove_binary_stream_handler(_HOP)


async def launch(how: Listening, port: int, patience: float) -> Any:
    """Start p2pd. Raises UserError if the port is taken, or p2pd does not start in `patience` times 30 s."""
    if how.listen:
        check_port(how.host, port)
    relay: Sequence[str] = ("-relayService=0",)
    if how.relay_for_others:  # p2pd's service starts once AutoNAT calls this node public
        relay = _RELAY
    kind = _private(how.sockets, *relay)
    try:
        p2p = await kind.create(
            host_maddrs=listen_addresses(how.host, port, quic=how.quic),
            no_listen=not how.listen,
            announce_maddrs=how.announce or None,
            nat_port_map=how.listen and scope_of_host(how.host) != "machine",
            use_auto_relay=bool(how.relays),
            trusted_relays=how.relays or None,
            identity_path=str(how.key),
            dht_mode=bool(how.relays),
            check_if_identity_free=False,  # hivemind's check only parses RSA keys; ours is `duplicate.somebody_else`
            startup_timeout=START_SECONDS * patience,
            persistent_conn_max_msg_size=MAX_CALL_BYTES,
        )
        if not how.relay_for_others:
            await asyncio.wait_for(_relay_for_nobody(p2p), START_SECONDS * patience)
    except (P2PDaemonError, OSError, EOFError) as error:
        if kind.made is not None:
            await kill(kind.made, how.sockets)
        message = str(error)
        if "address already in use" in message or "failed to listen" in message:
            raise port_error(how.host, port) from error
        raise UserError(
            f"The network daemon p2pd did not start: {message}", "Look into the log; then start again."
        ) from error
    control = p2p._client.control
    control._pending_calls = PendingCalls()
    control._handler_tasks = CallTasks()
    control.unary_handlers = CallHandlers()
    for task in (control._read_task, control._write_task):  # `Transport.trouble` checks how they end
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return p2p


async def kill(p2p: Any, sockets: Path) -> None:
    """End p2pd in any state, remove its sockets, and fail all calls that wait for an answer."""
    if p2p._child is not None:
        with suppress(ProcessLookupError):
            p2p._child.kill()
        await p2p._child.wait()
    with suppress(AttributeError):  # its start has failed
        p2p._client.control._pending_calls.fail()
    with suppress(Exception):  # hivemind's own clean-up; the daemon has ended already
        await asyncio.wait_for(p2p.shutdown(), KILL_SECONDS)
    _remove_sockets(sockets)


def _remove_sockets(directory: Path) -> None:
    """Remove the control sockets that p2pd has left."""
    for file in directory.glob("p2p*.sock"):
        file.unlink(missing_ok=True)
