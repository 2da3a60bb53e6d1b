"""The three RPCs as hivemind wants them; what they do stands elsewhere."""

from __future__ import annotations

from typing import AsyncIterator, Protocol  # noqa: UP035 - hivemind recognises a stream by typing's alias only

from hivemind.p2p import P2PContext, ServicerBase

from ftis_node.swarm import ftis_pb2

PROTOCOL_MAJOR, PROTOCOL_MINOR = 1, 0


class Handlers(Protocol):
    """Who answers. `peer` is the caller's 38-byte peer id, proven by the connection."""

    async def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake: ...

    async def on_exchange(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> ftis_pb2.ExchangeResponse: ...

    def on_fetch(self, request: ftis_pb2.FetchRequest, peer: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]: ...


class FtisSwarm(ServicerBase):  # type: ignore[misc]
    """Handlers under the names ``FtisSwarm.rpc_…``, the same for every run: a stranger gets an answer, not silence."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    async def rpc_handshake(self, request: ftis_pb2.Handshake, context: P2PContext) -> ftis_pb2.Handshake:
        return await self._handlers.on_handshake(request, context.remote_id.to_bytes())

    async def rpc_exchange(self, request: ftis_pb2.ExchangeRequest, context: P2PContext) -> ftis_pb2.ExchangeResponse:
        return await self._handlers.on_exchange(request, context.remote_id.to_bytes())

    async def rpc_fetch(
        self, requests: AsyncIterator[ftis_pb2.FetchRequest], context: P2PContext
    ) -> AsyncIterator[ftis_pb2.FetchChunk]:
        """The stream stays open until the caller ends its own side.

        If this side closed first, p2pd would reset the stream, and a reset overtakes chunks that are still under way.
        """
        peer = context.remote_id.to_bytes()
        async for request in requests:
            async for chunk in self._handlers.on_fetch(request, peer):
                yield chunk
