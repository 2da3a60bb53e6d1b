"""A membership without a network, and what peers say to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftis_node.config.run import RunFile
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.handshake import PROTOCOL_MAJOR, PROTOCOL_MINOR
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.membership import Membership
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.transport import Listening, Unreachable
from tests.support.swarm import RUN
from tests.support.talkers import ALICE, BOB


class Deaf(Libp2p):
    """Reaches only those whose answer to a handshake is given; remembers what was dialled."""

    def __init__(self, listening: Listening):
        super().__init__(listening)
        self.up = True
        self.dialled: dict[bytes, list[str]] = {}
        self.answers: dict[bytes, ftis_pb2.Handshake] = {}

    async def connect(self, peer: bytes, addresses: Sequence[str]):
        self.dialled[peer] = list(addresses)
        if peer not in self.answers:
            raise Unreachable("nobody is there")

    async def handshake(self, peer: bytes, hello: ftis_pb2.Handshake, seconds: float) -> ftis_pb2.Handshake:
        return self.answers[peer]

    async def neighbours(self) -> dict[bytes, list[str]]:
        return {}

    async def disconnect(self, peer: bytes):
        pass


class Alone(Membership):
    """A membership without a network."""

    def __init__(self, who: Identity = ALICE, cache: Path | None = None, **listening: Any):
        self.network = Deaf(Listening(Path(), Path(), **listening))
        super().__init__(self.network, who, RunFile(run=RUN), Traffic(), cache)

    async def dials(self, peer: bytes) -> list[str]:
        """Where it dials a peer when it greets it."""
        self.network.dialled.clear()
        await self.greet(peer)
        return self.network.dialled.get(peer, [])


def address(who: Identity, port: int = 1) -> str:
    return f"/ip4/8.8.4.4/tcp/{4000 + port % 60000}/p2p/{who.peer_id}"


LAN = "/ip4/192.168.1.7"
LOOPBACK = "/ip4/127.0.0.1"
ELSEWHERE = (LAN, LOOPBACK, "/ip6/fd00::1", "/ip4/100.64.0.1", "/dns4/router.example")


def at(place: str, who: Identity = BOB, port: int = 4001) -> str:
    return f"{place}/tcp/{port}/p2p/{who.peer_id}"


def hello(who: Identity, **changes: object) -> ftis_pb2.Handshake:
    fields = {
        "major": PROTOCOL_MAJOR,
        "minor": PROTOCOL_MINOR,
        "run_id": RUN.id,
        "addresses": [address(who)],
    }
    return ftis_pb2.Handshake(**(fields | {"agent": "test/1"} | changes))


def hears(membership: Membership, teller: Identity, *addresses: str) -> bool:
    """A peer names addresses; return whether one of them is news."""
    return membership.addresses.hear(addresses, teller.author)


def strangers(membership: Membership) -> list[bytes]:
    """The peers that are to be greeted now."""
    return membership.addresses.strangers()


def greets(membership: Membership, who: Identity, **changes: object) -> ftis_pb2.Handshake:
    """The answer to a peer's handshake."""
    return membership.on_handshake(hello(who, **changes), who.author)
