"""Attacks of rows 33 to 44 all at once against nodes of a real swarm without models: `make hostile` in short."""

import contextlib
import time

import psutil
import pytest

from ftis_node.swarm.wire import inbound
from tests.hostile import directory, reputation, streams
from tests.hostile.attack import striking
from tests.hostile.peer import hostile
from tests.hostile.world import World
from tests.support.swarm import PROMPTS, RUN, eventually, identity, member

KINDS = (
    streams.Row33NeverRead,
    streams.Row33HalfOpen,
    reputation.Row34Contradictions,
    reputation.Row36Downwards,
    reputation.Row37Introducers,
    directory.Row38MadeUp,
    streams.Row41Requests,
    reputation.Row44Large,
)
WORLD = World(RUN, PROMPTS, ["1"] * len(PROMPTS), lambda text: [1, 2, 3])
REFUSED = {reason for kind in KINDS for reason in kind.refusals}
SOME_FILES = 8


def open_files(node):
    """Of this process, which is the nodes', and of the node's p2pd."""
    return psutil.Process().num_fds(), psutil.Process(node.transport.pid).num_fds()


@pytest.mark.slow  # each row has quick tests of its own
async def test_rows_33_to_44_at_once_silence_and_blame_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(inbound, "STALL_SECONDS", 5.0)
    async with member(1, tmp_path, unix=time.time) as bob, member(2, tmp_path, [bob.address], unix=time.time) as alice:
        nodes = (alice, bob)
        await eventually(lambda: bob.met(alice) and alice.met(bob), "they meet")
        before = {node.address: open_files(node) for node in nodes}
        async with contextlib.AsyncExitStack() as stack:
            attacks = []
            for number, kind in enumerate(KINDS, start=1000):
                path = tmp_path / f"hostile-{number}"
                opening = hostile(path, [node.address for node in nodes], identity(number), WORLD)
                attacks.append(kind(await stack.enter_async_context(opening)))
            await stack.enter_async_context(striking(attacks))
            await eventually(lambda: all(attack.strikes >= 2 for attack in attacks), "each has struck twice")
            for node in nodes:
                counts = node.swarm.gossip.counts
                await eventually(lambda counts=counts: counts.keys() >= REFUSED, "lies are refused")
            for node, other in ((alice, bob), (bob, alice)):
                made = node.make(3)
                await eventually(lambda made=made, other=other: made <= set(other.admitted), "they go on")
        for node, other in ((alice, bob), (bob, alice)):
            reputation = node.swarm.reputation
            assert reputation.banned(other.author) is None and reputation.shunned(other.author) is None
            assert node.met(other)
            assert len(node.swarm.gossip.table) <= node.swarm.gossip.table.capacity

        def nothing_is_left():
            now = {node.address: open_files(node) for node in nodes}
            pairs = [pair for one in now for pair in zip(now[one], before[one], strict=True)]
            return all(after <= earlier + SOME_FILES for after, earlier in pairs)

        await eventually(nothing_is_left, "all that the attackers held is let go")
