"""Streams that peers open; each releases everything when it ends.

hivemind's own handler waits without limit to hand over a request that has no reader any more. Its socket and task then
stay for good, and so do p2pd's.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from google.protobuf.message import Message
from hivemind.p2p import P2P, P2PContext
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto.p2pd_pb2 import RPCError

from ftis_node.errors import brief
from ftis_node.host.loops import end

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
    while (request := await waiting.get()) is not None:
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
