"""Serving packets: `swarm.fetch.Uploads`, as events, over an uplink that all uploads of a node share.

Up to four uploads send a packet each in turn; their packets stand in one queue for the uplink, so the four share it
evenly. An upload gives its slot back when its last packet has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ftis_node.lab.simulation.network import PACKETS, Line, Network
from ftis_node.lab.simulation.store import Body, SimulatedStore
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.fetch import BUSY_AFTER, UPLOADS, Limit
from ftis_node.swarm.limits import OWN

HERE, GONE, BUSY = ftis_pb2.FetchChunk.HERE, ftis_pb2.FetchChunk.GONE, ftis_pb2.FetchChunk.BUSY

Reply = Callable[[bytes, int, Body | None], None]
"""Takes a chunk: digest, status, and the packet if it is here."""


@dataclass(eq=False)
class Upload:
    """One request that is being served, or waits for a slot."""

    peer: bytes
    digests: deque[bytes]
    reply: Reply
    waiting: bool = field(default=True)


class SimulatedUploads:
    """One upload a peer at a time, four in all; who would wait over three seconds hears "busy"."""

    def __init__(self, line: Line, network: Network, store: SimulatedStore, upload_bytes: float) -> None:
        """
        Args:
            upload_bytes: most payload a second that it sends; 0: no limit.
        """
        self._line = line
        self._network = network
        self._store = store
        self._limit = Limit(upload_bytes, network.scheduler.clock)
        self._active: set[bytes] = set()
        self._running = 0
        self._queue: deque[Upload] = deque()

    def serve(self, digests: list[bytes], peer: bytes, reply: Reply) -> None:
        if peer in self._active:
            self.refuse(digests, peer, reply)
            return
        self._active.add(peer)
        upload = Upload(peer, deque(digests[: OWN.digests]), reply)
        if self._running < UPLOADS:
            self._begin(upload)
        else:
            self._queue.append(upload)
            self._line.after(BUSY_AFTER, self._give_up, upload)

    def refuse(self, digests: list[bytes], peer: bytes, reply: Reply) -> None:
        """Says "busy" for every packet asked for."""
        for digest in digests[: OWN.digests]:
            self._answer(peer, digest, BUSY, reply)

    def _give_up(self, upload: Upload) -> None:
        if upload.waiting:
            self._queue.remove(upload)
            upload.waiting = False
            self._active.discard(upload.peer)
            self.refuse(list(upload.digests), upload.peer, upload.reply)

    def _begin(self, upload: Upload) -> None:
        upload.waiting = False
        self._running += 1
        self._next(upload)

    def _next(self, upload: Upload) -> None:
        while upload.digests:
            digest = upload.digests.popleft()
            if self._limit.delay() > BUSY_AFTER:
                self._answer(upload.peer, digest, BUSY, upload.reply)
            elif (body := self._store.body(digest)) is None:
                self._answer(upload.peer, digest, GONE, upload.reply)
            else:
                self._line.after(self._limit.reserve(body.chunk_bytes), self._send, upload, digest, body)
                return
        self._active.discard(upload.peer)
        self._running -= 1
        if self._queue:
            self._begin(self._queue.popleft())

    def _send(self, upload: Upload, digest: bytes, body: Body) -> None:
        seconds = self._line.departs(body.chunk_bytes)
        arrived = (upload.reply, digest, HERE, body)
        self._network.depart(self._line, upload.peer, PACKETS, body.chunk_bytes, seconds, *arrived)
        self._line.after(seconds, self._next, upload)

    def _answer(self, peer: bytes, digest: bytes, status: int, reply: Reply) -> None:
        size = ftis_pb2.FetchChunk(digest=digest, status=status).ByteSize()
        self._line.meter.counts["busy given" if status == BUSY else "gone given"] += 1
        self._network.send(self._line, peer, PACKETS, size, reply, digest, status, None)
