"""The daemon's own bytes and tables, read once for all nodes: what ten thousand tables share, they share in memory."""

from __future__ import annotations

import random
from collections.abc import Callable

from ftis_node.lab.bench.packets import make_run
from ftis_node.swarm.announcement import Announcement, decode_announcement
from ftis_node.swarm.table import Heard, Known, Table

RUN = make_run(400)  # whose packets may be as large as a scenario's


class Unverified(Announcement):
    """An announcement whose signature is not looked at: nobody forges anything in here, and a check takes 0.1 ms."""

    __slots__ = ()

    def verify(self) -> bool:
        return True


class Reader:
    """Decodes announcements as the daemon does, each once, however many nodes receive it."""

    def __init__(self) -> None:
        self._read: dict[bytes, tuple[bytes, Unverified]] = {}

    def __call__(self, data: bytes, *, max_packets: int) -> Announcement:
        return self._known(data, max_packets)[1]

    def shared(self, data: bytes) -> bytes:
        """The one copy of these bytes."""
        return self._known(data, RUN.slots)[0]

    def _known(self, data: bytes, max_packets: int) -> tuple[bytes, Unverified]:
        known = self._read.get(data)
        if known is None:
            a = decode_announcement(data, max_packets=max_packets)
            known = self._read[data] = (
                data,
                Unverified(a.run_id, a.author, a.round, a.policy_step, a.issued_at, a.packets, a.signature),
            )
        return known


class SharedTable(Table):
    """The daemon's table, with the bytes of announcements in common; nothing is looked for that cannot be there."""

    def __init__(self, max_age: float, clock: Callable[[], float], rng: random.Random, reader: Reader) -> None:
        super().__init__(max_age, clock, rng)
        self._reader = reader
        self._named: set[bytes] = set()  # peers that any entry may name

    def add(
        self, announcement: Announcement, data: bytes, *, age: float, introducer: bytes | None, held: int = 0
    ) -> Heard:
        return super().add(announcement, self._reader.shared(data), age=age, introducer=introducer, held=held)

    def sample(self, count: int, peer: bytes) -> list[Known]:
        self._named.add(peer)  # whom one offers something one tells it
        return super().sample(count, peer)

    def note_holder(self, known: Known, peer: bytes, held: int, born: float | None) -> bool:
        self._named.add(peer)
        return super().note_holder(known, peer, held, born)

    def untell(self, peer: bytes) -> None:
        if peer in self._named:
            super().untell(peer)

    def forget_peer(self, peer: bytes) -> None:
        if peer in self._named:
            self._named.discard(peer)
            super().forget_peer(peer)


def draw_addresses(peer: str, rng: random.Random) -> tuple[str, ...]:
    """Two addresses as libp2p writes them, over TCP and QUIC."""
    host = ".".join(str(rng.randint(1, 254)) for _ in range(4))
    port = rng.randint(1024, 65535)
    return (f"/ip4/{host}/tcp/{port}/p2p/{peer}", f"/ip4/{host}/udp/{port}/quic-v1/p2p/{peer}")
