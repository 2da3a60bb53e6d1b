"""The search for another live node with this node's key: two of one identity would contradict each other."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

from ftis_node.errors import FtisError
from ftis_node.host.loops import end
from ftis_node.swarm.addresses import NetworkScope, parse_address, peer_at
from ftis_node.swarm.handshake import MAX_ADDRESSES, greeting, shake
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.transport import Listening, Transport

TWIN_SECONDS = 5.0


async def somebody_else(
    how: Listening,
    own: bytes,
    bootstraps: Sequence[str],
    seconds: float,
    owners: Sequence[str] = (),
) -> bool:
    """Whether another node of this identity is alive. False too if no bootstrap answers or knows of one.

    The search uses a throw-away key and a p2pd of its own, which ends with it: it asks peers for the identity's
    addresses and dials them.

    Args:
        how: this node's listening settings.
        own: the 38-byte peer id; the node's own p2pd must not run yet.
        seconds: time limit of the search, without the start of that p2pd.
        owners: of the bootstraps, those that this node's owner named.

    Raises:
        UserError: p2pd does not start.
    """
    scratch = how.sockets / "probe.key"
    Identity(os.urandom(32)).keep(scratch)
    try:
        only_dials = replace(
            how,
            key=scratch,
            listen=False,
            announce=(),
            relays=(),
        )
        probe = await Libp2p.start(only_dials)
    finally:
        scratch.unlink()
    places = NetworkScope(how.host, owners)
    tasks = {asyncio.create_task(_meets(probe, own, text, places)) for text in bootstraps}
    try:
        async with asyncio.timeout(seconds):
            for meeting in asyncio.as_completed(tasks):  # a silent one holds up no other
                if await meeting:
                    return True
    except TimeoutError:
        pass
    finally:
        await end(tasks)
        await probe.close()
    return False


async def _meets(probe: Transport, peer: bytes, bootstrap: str, places: NetworkScope) -> bool:
    """Whether this bootstrap knows where `peer` is, and a node with its key answers there."""
    try:
        referrer = parse_address(bootstrap)
        await probe.connect(referrer, [bootstrap])
        question = greeting()
        question.whereabouts = peer
        answer = await shake(probe, referrer, question)
        found = [text for text in answer.peers if peer_at(text) == peer and not places.why_not(text)]
        await probe.connect(peer, found[:MAX_ADDRESSES])
    except FtisError:  # nobody answers there
        return False
    return True
