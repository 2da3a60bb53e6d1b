"""Connections to peers, and the three RPCs over them: what the swarm needs of a network."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ftis_node.errors import FtisError
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.identity import Identity

Reachable = Literal["unknown", "public", "private"]


class Unreachable(FtisError):
    """A peer could not be dialled, or did not answer in time."""


@dataclass(frozen=True)
class Listening:
    """How p2pd is started.

    key: the identity. sockets: a directory of mode 0700 for its control sockets. host, port: where to listen, TCP and
    (with `quic`) UDP; port 0 means any. listen: False dials only. announce: multiaddrs to name in place of those that
    p2pd sees itself. relays: nodes to be reached through where nobody can dial this one. relay_for_others: whether
    others are reached through this one.
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


@dataclass(frozen=True)
class Health:
    """How p2pd is. reachability: AutoNAT's finding. connections: that are open, whoever opened them."""

    reachability: Reachable
    connections: int
    memory_bytes: int
    cpu_seconds: float
    open_files: int


class Handlers(Protocol):
    """The node that answers. `peer` is the caller's 38-byte peer id, proven by the connection."""

    def admits(self, peer: bytes) -> bool: ...

    def knows(self, peer: bytes) -> bool: ...

    async def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake: ...

    async def on_exchange(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> ftis_pb2.ExchangeResponse: ...

    def on_fetch(self, request: ftis_pb2.FetchRequest, peer: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]: ...


@dataclass(frozen=True)
class Answer:
    """What one peer said of a key. node, teller: its id in the DHT and its 38-byte peer id.

    addresses: by the 38-byte peer id of the record's owner, who signed them and whose they are.
    """

    node: int
    teller: bytes
    addresses: dict[bytes, list[str]]


class PeerDirectory(Protocol):
    """This node's place in a directory of all peers of its run. What goes wrong there is logged and goes no further."""

    async def join(self, peers: Collection[bytes]) -> None:
        """Takes part, and makes sure that some of these peers are among its neighbours there."""

    async def publish(self, addresses: Sequence[str], *, settled: bool) -> None:
        """Leaves this node's addresses for others, for some minutes."""

    async def find(self, take: Callable[[Answer], None], *, alone: bool) -> None:
        """Hands over what others left, answer by answer."""

    async def leave(self) -> None:
        """Takes part no more, until it joins again."""


class Transport(Protocol):
    """A network with an identity of its own. Peers are named by their 38-byte peer ids.

    listening: how it was started. up: False while it cannot be used.
    """

    listening: Listening
    up: bool

    async def restart(self) -> None:
        """Starts the network anew where it was. Nobody is connected then, and no call is passed on."""

    async def trouble(self) -> str:
        """Returns when the network has ended or does not answer, saying which."""

    async def addresses(self) -> list[str]:
        """Multiaddrs under which this node may be dialled, each ending in its peer id; none if it only dials."""

    async def health(self) -> Health | None:
        """How the network is; None if it does not answer."""

    async def connect(self, peer: bytes, addresses: Sequence[str]) -> None:
        """Makes sure that there is a connection, dialling `addresses` if there is none. Raises Unreachable."""

    async def disconnect(self, peer: bytes) -> None:
        """Closes the connections to `peer`, if there are any; it may dial again."""

    async def connected(self) -> set[bytes]:
        """Peers that there is a connection to."""

    async def neighbours(self) -> dict[bytes, list[str]]:
        """Multiaddrs, without peer ids, of the other ends of all connections, by peer."""

    async def serve(self, handlers: Handlers) -> None:
        """Passes calls of peers on to these handlers from now on; once more after a restart."""

    async def serve_no_more(self) -> None:
        """Ends all streams of peers, and passes no call on any more."""

    def end_streams(self, peer: bytes) -> None:
        """Ends the streams that this peer has opened."""

    async def handshake(self, peer: bytes, hello: ftis_pb2.Handshake, seconds: float) -> ftis_pb2.Handshake:
        """Calls `peer`. Raises what the network raises: a timeout, an error of the other side, or anything else."""

    async def exchange(
        self, peer: bytes, request: ftis_pb2.ExchangeRequest, seconds: float
    ) -> ftis_pb2.ExchangeResponse:
        """Calls `peer`. Raises as `handshake` does."""

    async def fetch(
        self, peer: bytes, requests: AsyncIterator[ftis_pb2.FetchRequest]
    ) -> AsyncGenerator[ftis_pb2.FetchChunk, None]:
        """Opens a stream to `peer`, whose answers end as soon as it ends. Raises as `handshake` does."""

    def directory(
        self, identity: Identity, run_id: bytes, known: Callable[[bytes], bool], doubted: Callable[[bytes], bool]
    ) -> PeerDirectory:
        """The directory of a run.

        Args:
            known: whether a peer is in the view: its record outlasts strangers' here.
            doubted: whether too many of those that a peer named did not answer: it does not count as a teller.
        """
