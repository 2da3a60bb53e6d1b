"""Packet transfers: serving held packets, and fetching wanted ones from any holder."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ftis_node.errors import brief
from ftis_node.packet import packet_digest
from ftis_node.swarm.deadline import Deadline
from ftis_node.swarm.ftis_pb2 import FetchChunk, FetchRequest
from ftis_node.swarm.known import Target
from ftis_node.swarm.limits import OWN
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.transport import Transport

UPLOADS = 4  # at once
BUSY_AFTER = 3.0  # seconds of waiting, for an upload slot or for the upload limit
OPEN_SECONDS = 5.0
# p2pd does not report a broken connection while this side of the stream is open, so a timeout must detect it. A holder
# may wait for an upload slot and for its upload limit; then it must send at least so many bytes a second.
CHUNK_SECONDS = 2 * BUSY_AFTER + 2.0
SLOWEST_BYTES = 64 << 10
DIGEST_BYTES = 32
FETCH_SECONDS = 60.0  # total wait for one holder: a chunk every 7 s is too slow


class HolderFault(Exception):
    """A holder did not answer, or did not finish. The text continues "Holder …" in the log."""


class HolderLie(HolderFault):
    """A holder sent something other than what was requested."""


@dataclass
class Uploads:
    """Serves packets: one upload per peer at a time, four in all, and as many besides to peers with a record. After
    three seconds of waiting it answers "busy".

    body: returns a packet by its sha256; None if this node does not hold it. traffic: counts and limits what is sent.
    """

    body: Callable[[bytes], bytes | None]
    traffic: Traffic

    def __post_init__(self) -> None:
        self._active = set[bytes]()
        self._slots = asyncio.Semaphore(UPLOADS)
        self._kept_free = asyncio.Semaphore(UPLOADS)

    async def serve(self, request: FetchRequest, peer: bytes, *, may: bool = True) -> AsyncIterator[FetchChunk]:
        """Answer the requested digests in order, each HERE, GONE (not held) or BUSY (ask again). Those beyond 64 and
        those that are no digests get no answer.

        The caller takes the next answer when the peer has read the last one: a peer that is slow loses its slot. The
        slot is free once the iterator has ended or is closed.

        Args:
            may: whether this peer gets packets at all; if not, all is BUSY.
        """
        self.traffic.received[peer] += request.ByteSize()
        digests = [digest for digest in request.digests[: OWN.digests] if len(digest) == DIGEST_BYTES]
        if peer in self._active or not may:
            for digest in digests:
                yield FetchChunk(digest=digest, status=FetchChunk.BUSY)
            return
        self._active.add(peer)  # before the wait: a peer must not stand in the queue more than once
        slots = self._slots
        if self.traffic.recorded(peer):
            slots = self._kept_free
        slot = _Slot(slots)
        try:
            await slot.acquire()
            for digest in digests:
                delay = self.traffic.delay()
                body = self.body(digest)
                if slot.lost or delay > BUSY_AFTER:
                    yield FetchChunk(digest=digest, status=FetchChunk.BUSY)
                    continue
                chunk = FetchChunk(digest=digest, status=FetchChunk.GONE)
                if body is not None:
                    chunk.status = FetchChunk.HERE
                    chunk.packet = body
                size = chunk.ByteSize()
                self.traffic.send(peer, size)
                await asyncio.sleep(delay)
                slot.expect(size)
                yield chunk
        finally:
            slot.release()
            self._active.discard(peer)


class _Slot:
    """An upload slot, `lost` while it is not held: none was free in time, or the reader took nothing; else four idle
    readers would shut out all others."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self.lost = True
        self._slots = slots
        self._patience = Deadline(self._lose)

    async def acquire(self) -> None:
        """Wait for the slot, for three seconds at most; `lost` says whether it came. Call it once, and then `release`
        in any case."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._slots.acquire(), BUSY_AFTER)
            self.lost = False

    def expect(self, size: int) -> None:
        """Note that the previous bytes have arrived and so many are under way now: the reader has 3 s and 1 s for each
        64 KiB until the next call."""
        if not self.lost:
            self._patience.put_off(BUSY_AFTER + size / SLOWEST_BYTES)

    def release(self) -> None:
        """Give the slot back, if it is held."""
        self._patience.cancel()
        if not self.lost:
            self._slots.release()

    def _lose(self) -> None:
        """Give the slot back early, because the reader took nothing."""
        self.lost = True
        self._slots.release()


async def fetch(
    transport: Transport,
    holder: bytes,
    targets: Sequence[Target],
    traffic: Traffic,
) -> AsyncIterator[tuple[Target, FetchChunk]]:
    """Fetch packets from one holder; yield each target with its answer, in the holder's order, until all are answered.
    A packet that is HERE has the size and sha256 that the author signed; nothing else in it was checked.

    It waits for the holder for a minute in all, and for the opening of the stream for 5 s. The stream ends when the
    iterator does or is closed.

    Args:
        targets: of different digests, and no more than the holder reads in a request (`Limits.digests`).

    Raises:
        HolderFault: a short or silent stream, a failed call, or (a `HolderLie`) wrong bytes or an invalid answer. The
            answers yielded before stay valid.
    """
    open_targets = {target.ref.digest: target for target in targets}
    request = FetchRequest(digests=list(open_targets))
    received = asyncio.Event()
    try:
        stream = await asyncio.wait_for(transport.fetch(holder, _ask(request, received)), OPEN_SECONDS)
    except Exception as error:  # see `Transport.handshake`
        raise HolderFault(f"gave no stream: {brief(error)}") from error
    traffic.send(holder, request.ByteSize())
    patience = FETCH_SECONDS
    clock = asyncio.get_running_loop().time
    try:
        while open_targets:
            asked = clock()
            largest = max(target.ref.size for target in open_targets.values())
            chunk = await _next(stream, min(CHUNK_SECONDS + largest / SLOWEST_BYTES, patience))
            patience -= clock() - asked
            traffic.received[holder] += chunk.ByteSize()
            target = open_targets.pop(chunk.digest, None)
            if target is None:
                raise HolderLie("sent a packet that was not asked for")
            as_signed = len(chunk.packet) == target.ref.size and packet_digest(chunk.packet) == chunk.digest
            if chunk.status == FetchChunk.HERE and not as_signed:
                raise HolderLie("sent other bytes than the author signed")
            yield target, chunk
    finally:
        received.set()
        with suppress(Exception):  # closing a stream whose other end is gone may raise anything
            await stream.aclose()


async def _ask(request: FetchRequest, received: asyncio.Event) -> AsyncIterator[FetchRequest]:
    """Send the request, then keep this side open until everything was received."""
    yield request
    await received.wait()


async def _next(stream: AsyncIterator[FetchChunk], timeout: float) -> FetchChunk:
    """Wait `timeout` seconds for the next answer, and return it. An early end, silence and errors are all the holder's
    fault: raises HolderFault."""
    try:
        async with asyncio.timeout(timeout):
            return await anext(stream)
    except StopAsyncIteration:
        raise HolderFault("ended its stream early") from None
    except (DecodeError, TypeError, ValueError) as error:  # not line noise: libp2p's packets are authenticated
        raise HolderLie("sent what is no answer") from error
    except Exception as error:
        raise HolderFault(f"broke its stream: {brief(error)}") from error
