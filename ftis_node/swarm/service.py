"""The three RPCs as hivemind wants them; what they do stands elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import AsyncIterator, Protocol  # noqa: UP035 - hivemind recognises a stream by typing's alias only

from hivemind.p2p import P2PContext, ServicerBase

from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.deadline import Deadline

# Announcements that a node cannot read are held against who passes them on: another form of them is another major.
PROTOCOL_MAJOR, PROTOCOL_MINOR = 2, 0
STALL_SECONDS = 30.0
STREAMS_OF_ONE_PEER = 4


class Handlers(Protocol):
    """Who answers. `peer` is the caller's 38-byte peer id, proven by the connection."""

    def admits(self, peer: bytes) -> bool: ...

    async def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake: ...

    async def on_exchange(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> ftis_pb2.ExchangeResponse: ...

    def on_fetch(self, request: ftis_pb2.FetchRequest, peer: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]: ...


class FtisSwarm(ServicerBase):  # type: ignore[misc]
    """Handlers under the names ``FtisSwarm.rpc_…``, the same for every run: a stranger gets an answer, not silence."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._streams: Counter[bytes] = Counter()

    async def rpc_handshake(self, request: ftis_pb2.Handshake, context: P2PContext) -> ftis_pb2.Handshake:
        return await self._handlers.on_handshake(request, self._admitted(context))

    async def rpc_exchange(self, request: ftis_pb2.ExchangeRequest, context: P2PContext) -> ftis_pb2.ExchangeResponse:
        return await self._handlers.on_exchange(request, self._admitted(context))

    async def rpc_fetch(
        self, requests: AsyncIterator[ftis_pb2.FetchRequest], context: P2PContext
    ) -> AsyncIterator[ftis_pb2.FetchChunk]:
        """The stream stays open until the caller ends its own side.

        If this side closed first, p2pd would reset the stream, and a reset overtakes chunks that are still under way.
        hivemind waits without limit for a caller who does not read, or neither asks nor hangs up; its task, which this
        runs in, is what holds the stream, and the upload slot with it.
        """
        peer = context.remote_id.to_bytes()
        task = asyncio.current_task()
        if task is None or self._streams[peer] >= STREAMS_OF_ONE_PEER or not self._handlers.admits(peer):
            return
        self._streams[peer] += 1
        stall = Deadline(task.cancel)
        stall.put_off(STALL_SECONDS)
        try:
            async for request in requests:
                async for chunk in self._handlers.on_fetch(request, peer):
                    stall.put_off(STALL_SECONDS)
                    yield chunk
                stall.put_off(STALL_SECONDS)
        finally:
            stall.cancel()
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    def _admitted(self, context: P2PContext) -> bytes:
        """The caller, if it is to be answered; else it hears an error."""
        peer: bytes = context.remote_id.to_bytes()
        if not self._handlers.admits(peer):
            raise PermissionError("calls too often, or is banned")
        return peer
