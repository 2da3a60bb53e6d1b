"""The three RPCs as hivemind wants them; what they do stands elsewhere."""

from __future__ import annotations

import asyncio
import time
from typing import AsyncIterator  # noqa: UP035 - hivemind recognises a stream by typing's alias only

from hivemind.p2p import P2PContext, ServicerBase

from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.budgets import Budgets
from ftis_node.swarm.deadline import Deadline
from ftis_node.swarm.limits import OWN
from ftis_node.swarm.wire.streams import Streams
from ftis_node.swarm.wire.transport import Handlers

STALL_SECONDS = 30.0
FIRST_SECONDS = 10.0  # a node asks as soon as its stream is open
# Of one peer's requests in streams: ten full ones a second, forty at once. One more waits for its turn.
LOOKUPS_A_SECOND, LOOKUPS_AT_ONCE = 800.0, 3200.0
LOOKUPS_A_REQUEST = 16  # what a request costs beside its digests


class FtisSwarm(ServicerBase):  # type: ignore[misc]
    """Handlers under the names ``FtisSwarm.rpc_…``, the same for every run: a stranger gets an answer, not silence."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._streams = Streams()
        self._lookups = Budgets(time.monotonic, LOOKUPS_A_SECOND, LOOKUPS_AT_ONCE)

    def end_streams(self, peer: bytes | None = None) -> None:
        """Ends the streams that this peer has opened; by default those of all."""
        self._streams.end(peer)

    async def rpc_handshake(self, request: ftis_pb2.Handshake, context: P2PContext) -> ftis_pb2.Handshake:
        return await self._handlers.on_handshake(request, self._admitted(context))

    async def rpc_exchange(self, request: ftis_pb2.ExchangeRequest, context: P2PContext) -> ftis_pb2.ExchangeResponse:
        return await self._handlers.on_exchange(request, self._admitted(context))

    async def rpc_fetch(
        self, requests: AsyncIterator[ftis_pb2.FetchRequest], context: P2PContext
    ) -> AsyncIterator[ftis_pb2.FetchChunk]:
        """The stream stays open until the caller ends its own side.

        If this side closed first, p2pd would reset the stream, and a reset overtakes chunks that are still under way.
        A caller who does not read, or neither asks nor hangs up, is waited for up to a limit: then the task ends, which
        this runs in, and `streams.answer_stream` lets go of all that the stream holds.
        """
        peer = context.remote_id.to_bytes()
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
                if (seconds := self._lookups.wait(peer, LOOKUPS_A_REQUEST + _digests(request))) > 0:
                    await asyncio.sleep(seconds)
                async for chunk in self._handlers.on_fetch(request, peer):
                    stall.put_off(STALL_SECONDS)
                    yield chunk
                stall.put_off(STALL_SECONDS)
        finally:
            stall.cancel()
            self._streams.leave(task)

    def _admitted(self, context: P2PContext) -> bytes:
        """The caller, if it is to be answered; else it hears an error."""
        peer: bytes = context.remote_id.to_bytes()
        if not self._handlers.admits(peer):
            raise PermissionError("calls too often, or is banned")
        return peer


def _digests(request: ftis_pb2.FetchRequest) -> int:
    """How many are looked up."""
    return min(len(request.digests), OWN.digests)
