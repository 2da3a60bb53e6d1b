"""Questions draw no more bytes than their budget, whoever asks how often; and others are answered meanwhile."""

import asyncio
import contextlib
import time

from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import PeerID, ServicerBase
from hivemind.proto import dht_pb2

from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.handshake import greeting
from ftis_node.swarm.wire.libp2p import FtisSwarm
from ftis_node.swarm.wire.records import key_bytes
from tests.hostile.directory import made_up
from tests.support.swarm import RUN, eventually, identity, member, stub, transport

UPLOAD = 50_000  # bytes a second
BURST = UPLOAD / 2
A_SECOND = UPLOAD / 8  # of all peers without a record
AT_MOST = 16 << 10  # the largest answer here, which may come last


QUESTIONS = {
    "announcements": (FtisSwarm, "rpc_exchange", lambda alice: ftis_pb2.ExchangeRequest(wanted=ids(alice), again=True)),
    "run file": (FtisSwarm, "rpc_handshake", lambda alice: greeting(None, [])),
    "look-up": (DHTProtocol, "rpc_find", lambda alice: dht_pb2.FindRequest(keys=[key_bytes(RUN.id)])),
}


def ids(alice):
    return [known.id for known in alice.swarm.gossip.table]


async def test_row_61_the_same_question_again_and_again_draws_few_bytes(tmp_path):
    """Two keys of one who asks draw no more than one."""
    async with contextlib.AsyncExitStack() as stack:
        alice = await stack.enter_async_context(member(1, tmp_path, upload_bytes=UPLOAD))
        bob = await stack.enter_async_context(member(2, tmp_path, [alice.address]))
        shelf = alice.swarm._directory._shelf
        for one in made_up(RUN.id, "", 60):
            shelf._shelves.setdefault(one.key, {})[one.subkey] = one
        callers = [
            await stack.enter_async_context(transport(identity(number), tmp_path / str(number))) for number in (50, 51)
        ]

        async def ask(caller, service, call, question):
            await caller.connect(alice.author, [alice.address])
            await stub(caller, alice.identity).rpc_handshake(greeting(RUN, []))
            say = getattr(ServicerBase.get_stub.__func__(service, caller.p2p, PeerID(alice.author)), call)
            drawn = 0
            for _ in range(60):
                with contextlib.suppress(Exception):  # it is refused
                    answer = await asyncio.wait_for(say(question(alice)), 5)
                    drawn += max(0, answer.ByteSize() - question(alice).ByteSize())
            return drawn

        for asked, how in QUESTIONS.items():
            for _ in range(20 if asked == "announcements" else 1):
                alice.make(16)
            began = time.monotonic()
            drawn = sum(await asyncio.gather(*(ask(caller, *how) for caller in callers)))
            assert drawn < BURST + A_SECOND * (time.monotonic() - began) + AT_MOST, asked
            made = alice.make(2)
            await eventually(lambda made=made: made <= set(bob.admitted), "an honest peer gets what is new")
