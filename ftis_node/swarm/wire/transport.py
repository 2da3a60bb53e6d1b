"""The network interface of the swarm: connections to peers, and three RPCs over them."""

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Protocol

from ftis_node.errors import FtisError
from ftis_node.step_report import Health
from ftis_node.swarm.addresses import is_plain
from ftis_node.swarm.ftis_pb2 import ExchangeRequest, ExchangeResponse, FetchChunk, FetchRequest, Handshake
from ftis_node.swarm.identity import Identity, OfPeer
from ftis_node.swarm.traffic import Traffic

Reachable = Literal["unknown", "public", "private"]
Requests = AsyncIterator[FetchRequest]
Chunks = AsyncGenerator[FetchChunk, None]


async def resolved(address: str) -> list[str]:
    """The plain addresses that an address with a name leads to; any other address as it is. p2pd would dial whatever
    host the name's owner likes. Raises OSError if the name leads nowhere."""
    found = re.match(r"/(dns[46]?)/([^/]+)", address)
    if found is None or not is_plain(address):
        return [address]
    families = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}
    answers = await asyncio.get_running_loop().getaddrinfo(
        found[2],
        None,
        family=families.get(found[1], socket.AF_UNSPEC),
        type=socket.SOCK_STREAM,
    )
    hosts = (f"/ip{6 if ':' in str(place[0]) else 4}/{place[0]}" for *_, place in answers)
    return list(filter(is_plain, (host + address[found.end() :] for host in hosts)))


class Unreachable(FtisError):
    """A peer could not be dialled, or did not answer in time."""


@dataclass(frozen=True)
class Listening:
    """The options of p2pd.

    key: the identity. sockets: a directory of mode 0700 for its control sockets. host, port: where to listen, TCP and
    (with `quic`) UDP; port 0 means any. listen: False dials only. announce: multiaddrs to announce instead of those
    that p2pd finds. relays: nodes that relay to this one if no peer can dial it. relay_for_others: whether this node
    relays to others.
    """

    key: Path
    sockets: Path
    host: str = "0.0.0.0"
    port: int = 0
    quic: bool = True
    listen: bool = True
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    relay_for_others: bool = False


LISTENING = [field.name for field in fields(Listening)[2:]]  # settings have these names


class Handlers(Protocol):
    """The node's answers to calls. `peer` is the caller's 38-byte peer id, authenticated by the connection."""

    def admits(self, peer: bytes) -> bool:
        """Whether to answer this call; it is asked once for each call, and for each further request in a stream."""

    def knows(self, peer: bytes) -> bool:
        """Whether the peer is in the active view; all others together have a quarter of the streams."""

    async def on_handshake(self, request: Handshake, peer: bytes) -> Handshake:
        """Answer a handshake."""

    async def on_exchange(self, request: ExchangeRequest, peer: bytes) -> ExchangeResponse:
        """Answer an exchange of announcements."""

    def on_fetch(self, request: FetchRequest, peer: bytes) -> AsyncIterator[FetchChunk]:
        """Answer one request of a stream, a chunk for each digest; an early end leaves the others out."""


@dataclass(frozen=True)
class Answer:
    """One peer's answer about a DHT key. node, referrer: its id in the DHT and its 38-byte peer id.

    addresses: by the 38-byte peer id of the record's owner, who signed them; they are the owner's own.
    """

    node: int
    referrer: bytes
    addresses: dict[bytes, list[str]]


@dataclass(frozen=True)
class DirectoryUser:
    """A node as the directory of its run needs it. run_id: 16 bytes.

    known: returns whether a peer is in the view; its record outlasts those of strangers here. doubted: returns whether
    too many peers that this one named did not answer; it then counts as no referrer. traffic: budgets what answers may
    have, and counts them.
    """

    identity: Identity
    run_id: bytes
    known: OfPeer
    doubted: OfPeer
    traffic: Traffic


class PeerDirectory:
    """This node's access to a directory of all peers of its run. Errors there are logged and not raised.

    This one is that of a private run: there is none, for it would answer strangers.
    """

    async def join(self, peers: Collection[bytes], outside: Collection[bytes]) -> None:
        """Join the directory, and make some of these peers its neighbours there; all of those outside of the run."""

    async def publish(self, addresses: Sequence[str], *, settled: bool) -> None:
        """Publish this node's addresses for some minutes."""

    async def find(self, take: Callable[[Answer], None], *, alone: bool) -> None:
        """Pass the published addresses of others to `take`, answer by answer."""

    async def leave(self) -> None:
        """Leave the directory until the next `join`."""


class Transport(Protocol):
    """A network with an identity of its own. A 38-byte peer id names each peer.

    listening: its options. up: False while it cannot be used.
    """

    listening: Listening
    up: bool

    async def restart(self) -> None:
        """Restart the network on the same port. It then has no connections and no handlers."""

    async def trouble(self) -> str:
        """Wait until the network has ended or does not answer; return which."""

    async def addresses(self) -> list[str]:
        """The multiaddrs under which peers may dial this node, each ending in its peer id; none if it only dials."""

    async def health(self) -> Health | None:
        """The health of the network; None if it does not answer."""

    async def connect(self, peer: bytes, addresses: Sequence[str]) -> None:
        """Dial `addresses` unless there is a connection. Raises Unreachable."""

    async def disconnect(self, peer: bytes) -> None:
        """End the streams that `peer` has opened, and close all connections to it; it may dial again."""

    async def neighbours(self) -> dict[bytes, list[str]]:
        """The remote multiaddrs of all connections, without peer ids, by peer."""

    async def serve(self, handlers: Handlers) -> None:
        """Pass calls of peers to these handlers from now on; call it again after a restart."""

    async def serve_no_more(self) -> None:
        """End all streams of peers, and refuse further calls."""

    async def handshake(self, peer: bytes, hello: Handshake, seconds: float) -> Handshake:
        """Call `peer`. Raises what the network raises: a timeout, an error of the other side, or anything else."""

    async def exchange(self, peer: bytes, request: ExchangeRequest, seconds: float) -> ExchangeResponse:
        """Call `peer`. Raises as `handshake` does."""

    async def fetch(self, peer: bytes, requests: Requests) -> Chunks:
        """Open a stream to `peer`; the answers end when the stream ends. Raises as `handshake` does."""

    def directory(self, user: DirectoryUser) -> PeerDirectory:
        """The directory of the user's run."""
