"""The three RPCs in the form that hivemind requires; `inbound` and the node implement them."""

from __future__ import annotations

from contextlib import aclosing
from typing import AsyncIterator  # noqa: UP035 - hivemind recognises a stream by typing's alias only

from hivemind.p2p import P2PContext, ServicerBase

from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.wire.inbound import Inbound


class FtisSwarm(Inbound, ServicerBase):  # type: ignore[misc]
    """Handlers named ``FtisSwarm.rpc_…`` in every run, so that a stranger gets an answer instead of silence."""

    async def rpc_handshake(self, request: ftis_pb2.Handshake, context: P2PContext) -> ftis_pb2.Handshake:
        return await self.handshake(request, context.remote_id.to_bytes())

    async def rpc_exchange(self, request: ftis_pb2.ExchangeRequest, context: P2PContext) -> ftis_pb2.ExchangeResponse:
        return await self.exchange(request, context.remote_id.to_bytes())

    async def rpc_fetch(
        self, requests: AsyncIterator[ftis_pb2.FetchRequest], context: P2PContext
    ) -> AsyncIterator[ftis_pb2.FetchChunk]:
        """Answer a fetch stream, which stays open until the caller ends its own side.

        If this side closed first, p2pd would reset the stream, and a reset overtakes chunks that are still under way.
        If this task is cancelled, `streams.answer_stream` releases everything that the stream holds.
        """
        async with aclosing(self.fetch(requests, context.remote_id.to_bytes())) as chunks:
            async for chunk in chunks:
                yield chunk
