"""Limits on calls from peers, for every transport: refused callers, open streams, and the rate of requests."""

import asyncio
from typing import Any

from ftis_node.host.clocks import boot_seconds
from ftis_node.host.descriptors import limit
from ftis_node.swarm.deadline import Deadline
from ftis_node.swarm.ftis_pb2 import ExchangeRequest, ExchangeResponse, Handshake
from ftis_node.swarm.limits import OWN, Budgets
from ftis_node.swarm.wire.transport import Chunks, Handlers, Requests

Task = asyncio.Task[Any]

STREAMS = 256  # in all, or a quarter of the limit of open files; p2pd has a file open for each too
STREAMS_OF_ONE_PEER = 4
STRANGERS_PART = HALF_OPEN_PART = 4  # one stream in so many
STALL_SECONDS = 30.0
FIRST_SECONDS = 10.0  # an honest node sends its request as soon as its stream is open
# One peer's requests in streams: ten full ones a second, forty at once. A further one waits for its turn.
LOOKUPS_A_SECOND = 800.0
LOOKUPS_AT_ONCE = 3200.0
LOOKUPS_A_REQUEST = 16  # cost of a request beside its digests


class Streams:
    """The open streams by the task that answers each.

    One peer has at most 4, so a few peers cannot fill the 256. All peers outside the view share a quarter. At
    most a quarter are half-open, which means that no request has come; the oldest of those makes room for a new one.
    """

    def __init__(self) -> None:
        self._most = max(STREAMS_OF_ONE_PEER, min(STREAMS, limit() // 4))
        self._open = dict[Task, tuple[bytes, bool]]()  # its peer, and whether that is a stranger
        self._half_open = dict[Task, None]()

    def __len__(self) -> int:
        return len(self._open)

    def of(self, peer: bytes) -> int:
        """The number of streams that this peer has open."""
        return sum(owner == peer for owner, _ in self._open.values())

    def enter(self, task: Task, peer: bytes, *, stranger: bool) -> bool:
        """Add a stream, which must `leave` in the end; False if there is no room for it."""
        if len(self._open) >= self._most or self.of(peer) >= STREAMS_OF_ONE_PEER:
            return False
        strangers = sum(strange for _, strange in self._open.values())
        if stranger and strangers >= max(1, self._most // STRANGERS_PART):
            return False
        if len(self._half_open) >= max(1, self._most // HALF_OPEN_PART):
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            oldest.cancel()
        self._open[task] = peer, stranger
        self._half_open[task] = None
        return True

    def asked(self, task: Task) -> None:
        """Note a stream's first request."""
        self._half_open.pop(task, None)

    def leave(self, task: Task) -> None:
        """Remove a stream that has ended."""
        del self._open[task]
        self._half_open.pop(task, None)

    def end(self, peer: bytes | None = None) -> None:
        """End all streams of a peer; by default all streams."""
        for task, (owner, _) in self._open.items():
            if peer is None or owner == peer:
                task.cancel()


class Inbound:
    """Passes peers' calls to the node within limits. Every transport puts it between itself and its handlers."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._streams = Streams()
        self._lookups = Budgets(boot_seconds, LOOKUPS_A_SECOND, LOOKUPS_AT_ONCE)

    def end_streams(self, peer: bytes | None = None) -> None:
        """End the streams that this peer has opened; by default those of all peers."""
        self._streams.end(peer)

    async def handshake(self, request: Handshake, peer: bytes) -> Handshake:
        """Answer a caller. Raises PermissionError if the node refuses it."""
        self._admit(peer)
        return await self._handlers.on_handshake(request, peer)

    async def exchange(self, request: ExchangeRequest, peer: bytes) -> ExchangeResponse:
        """Answer a caller. Raises PermissionError if the node refuses it."""
        self._admit(peer)
        return await self._handlers.on_exchange(request, peer)

    async def fetch(self, requests: Requests, peer: bytes) -> Chunks:
        """Answer a stream, which stays open until the caller ends its own side.

        The wait for a caller that does not read, or neither sends a request nor hangs up, has a limit. After it this
        task is cancelled.
        """
        task = asyncio.current_task()
        if task is None or not self._handlers.admits(peer):
            return
        if not self._streams.enter(task, peer, stranger=not self._handlers.knows(peer)):
            return
        stall = Deadline(task.cancel)
        stall.put_off(min(FIRST_SECONDS, STALL_SECONDS))
        admitted = True  # the stream's admission is its first request's too
        try:
            async for request in requests:
                self._streams.asked(task)
                stall.put_off(STALL_SECONDS)
                if not (admitted or self._handlers.admits(peer)):
                    return
                admitted = False
                lookups = LOOKUPS_A_REQUEST + min(len(request.digests), OWN.digests)
                await asyncio.sleep(self._lookups.wait(peer, lookups))
                async for chunk in self._handlers.on_fetch(request, peer):
                    stall.put_off(STALL_SECONDS)
                    yield chunk
                stall.put_off(STALL_SECONDS)
        finally:
            stall.cancel()
            self._streams.leave(task)

    def _admit(self, peer: bytes) -> None:
        """Raise PermissionError if the node refuses calls of this peer."""
        if not self._handlers.admits(peer):
            raise PermissionError("calls too often, or is banned")
