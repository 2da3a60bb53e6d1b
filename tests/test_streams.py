"""Streams that others open leave nothing behind, however they end; and there are only so many."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio
from hivemind.p2p import P2P, PeerID

from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.limits import OWN
from ftis_node.swarm.wire import inbound, p2pd
from ftis_node.swarm.wire.inbound import STREAMS_OF_ONE_PEER, Streams
from ftis_node.swarm.wire.libp2p import FtisSwarm
from tests.support.swarm import PATIENCE, Answers, eventually, identity, member, transport

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALICE, BOB = identity(1), identity(2)
FETCH = "FtisSwarm.rpc_fetch"


class Busy(Answers):
    """Says "busy" to all that is asked, and counts it."""

    answered, admitting = 0, True

    def admits(self, peer):
        return self.admitting

    async def on_fetch(self, request, peer):
        for digest in request.digests:
            self.answered += 1
            yield ftis_pb2.FetchChunk(digest=digest, status=ftis_pb2.FetchChunk.BUSY)


async def opened(caller, called):
    """A stream on which nothing was asked yet."""
    _, *stream = await asyncio.wait_for(caller.p2p.call_binary_stream_handler(PeerID(called), FETCH), PATIENCE)
    return tuple(stream)


async def asked(stream, digests):
    """Asks once, and reads the answers."""
    reader, writer = stream
    await P2P.send_protobuf(request(digests), writer)
    for _ in range(digests):
        await P2P.receive_protobuf(ftis_pb2.FetchChunk, reader)


class Scene:
    """Alice opens streams to Bob, of whom all that a stream costs can be seen."""

    def __init__(self, alice, bob):
        self.alice, self.bob = alice, bob
        self.busy = Busy()
        self.served = FtisSwarm(self.busy)
        self._tasks_before = 0
        self._p2pd_before = 0

    async def begin(self):
        """As it was before any test."""
        self.busy.admitting = True
        self.served._lookups = FtisSwarm(self.busy)._lookups
        await self.connect()
        await self.answer(1)
        await eventually(lambda: not self.served._streams and not self.sockets(), "the first stream has ended")
        self._tasks_before, self._p2pd_before = len(asyncio.all_tasks()), self.files_of_p2pd()

    async def connect(self):
        await self.alice.connect(BOB.author, await self.bob.addresses())

    async def open(self):
        return await opened(self.alice, BOB.author)

    async def answer(self, requests):
        """A caller as it should be."""
        stream = await self.open()
        for _ in range(requests):
            await asked(stream, 1)
        stream[1].close()

    def sockets(self):
        """Of streams, on Bob's side, in this process."""
        path = self.bob.p2p._client_listen_maddr["unix"]
        found = psutil.Process().net_connections("unix")
        return sum(one.laddr == path for one in found) - 1  # that which listens

    def files_of_p2pd(self):
        return psutil.Process(self.bob.pid).num_fds()

    async def nothing_is_left(self):
        await eventually(lambda: not self.served._streams, "no stream is counted")
        await eventually(lambda: self.sockets() == 0, "its sockets are closed")
        await eventually(lambda: self.files_of_p2pd() <= self._p2pd_before, "p2pd has closed them too")
        await eventually(lambda: len(asyncio.all_tasks()) <= self._tasks_before, "its tasks have ended")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory) -> AsyncIterator[Scene]:
    path = tmp_path_factory.mktemp("scene")
    async with transport(ALICE, path / "alice") as alice, transport(BOB, path / "bob") as bob:
        made = Scene(alice, bob)
        await made.served.add_p2p_handlers(bob.p2p)
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def scene(stage) -> Scene:
    await stage.begin()
    return stage


def request(digests=64, size=32):
    return ftis_pb2.FetchRequest(digests=[bytes([number]) * size for number in range(digests)])


async def ask_ahead(writer):
    """Requests until nobody takes one any more."""
    with contextlib.suppress(Exception):
        while True:
            await asyncio.wait_for(P2P.send_protobuf(request(60, 100), writer), 1.0)


async def test_row_33_a_stranger_who_never_reads_costs_no_socket(scene, monkeypatch):
    monkeypatch.setattr(inbound, "STALL_SECONDS", 1.0)
    scene.served._lookups = inbound.Budgets(time.monotonic, 1e6, 1e6)  # else it takes a while to fill all that buffers
    monkeypatch.setattr(p2pd, "LINGER_SECONDS", 0.5)
    for _ in range(3):
        await scene.connect()
        opened = [await scene.open() for _ in range(STREAMS_OF_ONE_PEER)]
        await asyncio.gather(*(ask_ahead(writer) for _, writer in opened))
        await scene.nothing_is_left()
    await scene.connect()
    await scene.answer(1)


async def test_row_33_callers_that_stop_or_vanish_leave_nothing(scene, monkeypatch):
    half = P2P.MESSAGE_MARKER + (1000).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + b"x"
    patience = inbound.STALL_SECONDS
    for sent, vanishing in (
        (b"", True),
        (half, True),
        (b"", False),
        (half, False),
    ):
        monkeypatch.setattr(inbound, "STALL_SECONDS", patience if vanishing else 0.5)
        opened = [await scene.open() for _ in range((1 if vanishing else 2) * STREAMS_OF_ONE_PEER)]
        for _, writer in opened:
            writer.write(sent)
        if vanishing:
            await eventually(lambda: len(scene.served._streams) == STREAMS_OF_ONE_PEER, "they are open")
            for _, writer in opened:
                writer.transport.abort()
        await scene.nothing_is_left()  # also where the callers hold on


async def test_row_33_what_is_no_request_ends_the_stream_and_leaves_nothing(scene):
    for rubbish in (b"\x07", P2P.MESSAGE_MARKER + (3).to_bytes(8, "big") + b"\xff\xff\xff"):
        reader, writer = await scene.open()
        writer.write(rubbish)
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        await scene.nothing_is_left()
        writer.close()


async def test_row_33_streams_end_with_their_node(scene):
    opened = [await scene.open() for _ in range(3)]
    await eventually(lambda: len(scene.served._streams) == 3, "they are open")
    scene.served.end_streams()
    await scene.nothing_is_left()
    for _, writer in opened:
        writer.close()


async def test_row_33_peers_outside_the_view_share_a_part_and_the_oldest_silent_stream_makes_room(
    monkeypatch,
):
    monkeypatch.setattr(inbound, "limit", lambda: 4 * 16)
    bound = Streams()
    ended = []

    async def silent(number):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    tasks = [asyncio.create_task(silent(number)) for number in range(40)]
    await asyncio.sleep(0)
    peers = [bytes([number]) for number in range(40)]
    taken = [bound.enter(task, peer, stranger=True) for task, peer in zip(tasks[:8], peers, strict=False)]
    assert taken == [True] * 4 + [False] * 4, "strangers have a quarter of 16"
    assert bound.enter(tasks[8], peers[8], stranger=False)
    await asyncio.sleep(0)
    assert ended == [0], "a quarter may be silent: the oldest has made room"
    bound.leave(tasks[0])
    for task in tasks[1:4] + tasks[8:9]:
        bound.asked(task)
    crowd = tasks[9:13]
    assert [bound.enter(task, b"crowd", stranger=False) for task in crowd] == [True] * STREAMS_OF_ONE_PEER
    assert not bound.enter(tasks[13], b"crowd", stranger=False), "one peer has four"
    for number in range(14, 20):
        bound.enter(tasks[number], peers[number], stranger=False)
        bound.asked(tasks[number])
    assert len(bound) == 14, "four strangers less one, one more, four of one peer, and six"
    bound.end(b"crowd")
    await asyncio.sleep(0)
    assert set(range(9, 13)) <= set(ended)
    for task in tasks:
        task.cancel()


async def test_row_41_a_streams_requests_have_a_budget_and_wait(scene, monkeypatch):
    monkeypatch.setattr(inbound, "STALL_SECONDS", 2.0)
    now = 0.0
    scene.served._lookups = inbound.Budgets(lambda: now, 0.01, 3 * (inbound.LOOKUPS_A_REQUEST + OWN.digests))
    before = scene.busy.answered
    reader, writer = await scene.open()
    for _ in range(p2pd.SENT_AHEAD):
        await P2P.send_protobuf(request(), writer)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            await asyncio.wait_for(P2P.receive_protobuf(ftis_pb2.FetchChunk, reader), PATIENCE)
    assert scene.busy.answered - before == 3 * OWN.digests, "three are within the budget, the fourth never had its turn"
    await scene.nothing_is_left()
    writer.close()


async def test_row_41_who_hangs_up_or_sends_too_much_ahead_leaves_no_requests_to_work_off(scene):
    for sent in (p2pd.SENT_AHEAD, 100 * p2pd.SENT_AHEAD):
        scene.served._lookups = inbound.Budgets(lambda: 0.0, 1e-3, 1.0)
        _, writer = await scene.open()
        with contextlib.suppress(OSError):
            for _ in range(sent):
                await P2P.send_protobuf(request(64, 100), writer)
        if sent == p2pd.SENT_AHEAD:
            await eventually(lambda: scene.sockets() == 1, "it waits for its turn")
            writer.transport.abort()
        await scene.nothing_is_left()
        writer.close()


async def test_row_41_a_stream_whose_caller_is_no_longer_admitted_answers_no_further_request(scene):
    before = scene.busy.answered
    reader, writer = stream = await scene.open()
    await asked(stream, 2)
    scene.busy.admitting = False
    await P2P.send_protobuf(request(2), writer)
    assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    assert scene.busy.answered - before == 2
    await scene.nothing_is_left()
    writer.close()


async def test_row_41_a_ban_ends_the_peers_streams(tmp_path):
    async with member(1, tmp_path) as bob, member(2, tmp_path, [bob.address]) as alice:
        await eventually(lambda: bob.met(alice) and alice.met(bob), "they meet")
        reader, writer = stream = await opened(alice.transport, bob.author)
        await asked(stream, 1)
        for _ in range(3):
            bob.swarm.reputation.lied(alice.author, "was found out")
        await asyncio.wait_for(reader.read(), PATIENCE)  # until the stream has ended
        writer.close()
