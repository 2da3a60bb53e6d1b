"""Packets as names and sizes, and the store that holds them: `store.packets.PacketStore` without a disk."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ftis_node.lab.simulation.wire import RUN
from ftis_node.packet import SHORT_DIGEST_BYTES, Group, Packet, packet_digest
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.announcement import PacketRef

_IDS, _LOGPROBS = np.zeros(0, np.uint32), np.zeros(0, np.float32)
_SHORT = bytes(SHORT_DIGEST_BYTES)


@dataclass(frozen=True, eq=False, slots=True)
class Body:
    """A packet on its way or in a store. chunk_bytes: of the message that brings it; signal: whether rewards differ."""

    group: Group
    chunk_bytes: int
    signal: bool


def make_body(author: bytes, round: int, slot: int, size: int, signal: bool) -> tuple[Body, PacketRef]:
    """A packet of `size` bytes without completions, and what its announcement says of it."""
    digest = packet_digest(author + round.to_bytes(8, "big") + slot.to_bytes(4, "big"))
    packet = Packet(RUN.id, _SHORT, round, slot, round, _SHORT, (), (), _IDS, _LOGPROBS)
    body = Body(Group(author, 0, packet, digest, b""), _chunk_bytes(size), signal)
    return body, PacketRef(slot=slot, digest=digest, size=size)


@functools.cache
def _chunk_bytes(size: int) -> int:
    chunk = ftis_pb2.FetchChunk(digest=bytes(32), status=ftis_pb2.FetchChunk.HERE, packet=bytes(size))
    return int(chunk.ByteSize())


class SimulatedStore:
    """What a node holds and has dealt with."""

    def __init__(self) -> None:
        self._bodies: dict[bytes, Body] = {}
        self._seen: set[tuple[bytes, int, int]] = set()

    def add(self, bodies: Iterable[Body]) -> None:
        for body in bodies:
            self._bodies[body.group.digest] = body
            self._seen.add(body.group.key)

    def body(self, digest: bytes) -> Body | None:
        return self._bodies.get(digest)

    def seen(self, author: bytes, round: int, slot: int) -> bool:
        return (author, round, slot) in self._seen
