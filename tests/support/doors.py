"""Memberships behind a transport, which answer handshakes and nothing else."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from ftis_node.config.run import Hints, Run, RunFile
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.handshake import PROTOCOL_MAJOR
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.membership import Membership
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.libp2p import Libp2p
from tests.support.swarm import RUN, Answers, transport


class Door(Answers):
    """Answers handshakes as a node does, in another major version if told so."""

    def __init__(self, membership: Membership, major: int):
        self.membership = membership
        self.major = major

    async def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake:
        answer = self.membership.on_handshake(request, peer)
        answer.major = self.major
        return answer


@contextlib.asynccontextmanager
async def node(
    who: Identity, path: Path, run: Run = RUN, major: int = PROTOCOL_MAJOR
) -> AsyncIterator[tuple[Membership, Libp2p]]:
    async with transport(who, path / who.peer_id) as network:
        run_file = RunFile(run=run, hints=Hints(name=f"the run of {who.peer_id}"))
        membership = Membership(network, who, run_file, Traffic(), path / f"{who.peer_id}.json")
        await membership.refresh_addresses()
        await network.serve(Door(membership, major))
        yield membership, network
