"""Questions draw no more bytes than their budget, whoever asks how often; and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import PeerID, ServicerBase
from hivemind.proto import dht_pb2

from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.handshake import greeting
from ftis_node.swarm.wire.records import key_bytes
from tests.hostile.directory import made_up
from tests.support.swarm import RUN, Member, eventually, identity, member, stub, transport

UPLOAD = 50_000  # bytes a second
BURST, A_SECOND = UPLOAD / 2, UPLOAD / 8  # of all peers without a record
AT_MOST = 16 << 10  # the largest answer here, which may come last


def again(alice: Member) -> ftis_pb2.ExchangeRequest:
    """The same announcements, however often it had them."""
    return ftis_pb2.ExchangeRequest(wanted=[known.id for known in alice.swarm.gossip.table], again=True)


QUESTIONS: dict[str, tuple[str, Callable[[Member], Any]]] = {
    "exchange": ("exchange", again),
    "run file": ("handshake", lambda alice: greeting(None, [])),
    "look-up": ("find", lambda alice: dht_pb2.FindRequest(keys=[key_bytes(RUN.id)])),
}


@pytest.mark.parametrize("keys", [1, 6])
@pytest.mark.parametrize(("call", "question"), QUESTIONS.values(), ids=QUESTIONS.keys())
async def test_row_61_the_same_question_again_and_again_draws_a_bounded_number_of_bytes(
    call: str, question: Callable[[Member], Any], keys: int, tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        alice = await stack.enter_async_context(member(1, tmp_path, upload_bytes=UPLOAD))
        bob = await stack.enter_async_context(member(2, tmp_path, [alice.address]))
        shelf = alice.swarm._directory._shelf  # type: ignore[attr-defined]
        for one in made_up(RUN.id, "", 60):
            shelf._shelves.setdefault(one.key, {})[one.subkey] = one
        for _ in range(20):
            alice.make(16)
        began, drawn = time.monotonic(), []
        callers = [
            await stack.enter_async_context(transport(identity(50 + n), tmp_path / f"m{n}")) for n in range(keys)
        ]

        async def ask(caller: Any) -> None:
            await caller.connect(alice.author, [alice.address])
            asked = stub(caller, alice.identity)
            await asked.rpc_handshake(greeting(RUN, []))
            if call == "find":
                asked = ServicerBase.get_stub.__func__(DHTProtocol, caller.p2p, PeerID(alice.author))
            for _ in range(150):
                with contextlib.suppress(Exception):  # it is refused
                    answer = await asyncio.wait_for(getattr(asked, f"rpc_{call}")(question(alice)), 5)
                    drawn.append(max(0, answer.ByteSize() - question(alice).ByteSize()))

        await asyncio.gather(*map(ask, callers))
        allowed = BURST + A_SECOND * (time.monotonic() - began) + AT_MOST
        assert sum(drawn) < allowed, f"{sum(drawn)} bytes in {len(drawn)} answers"
        made = alice.make(2)
        await eventually(lambda: made <= set(bob.admitted), "an honest peer gets what is new", 60)
