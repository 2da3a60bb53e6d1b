"""Both transports do the same: libp2p over the loopback interface, and the one in memory that simulations run on."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from ftis_node.lab.simulation import network as in_memory
from ftis_node.lab.simulation.network import MemoryTransport, Network
from ftis_node.lab.simulation.scenario import Machine
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.wire.transport import Transport, Unreachable
from tests.support.swarm import PATIENCE, Answers, identity, transport

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALICE, BOB, CAROL = (identity(number) for number in range(1, 4))
Two = tuple[Transport, Transport]


class Door(Answers):
    """Answers with the caller's name; serves two chunks for each digest."""

    open = True

    def admits(self, peer):
        return self.open

    async def on_handshake(self, request, peer):
        return ftis_pb2.Handshake(agent=request.agent, run_id=peer)

    async def on_exchange(self, request, peer):
        if request.again:
            raise ValueError("no")
        await asyncio.sleep(60.0 if not request.wanted else 0.0)
        return ftis_pb2.ExchangeResponse(wanted=request.wanted)

    async def on_fetch(self, request, peer):
        for digest in request.digests:
            yield ftis_pb2.FetchChunk(digest=digest, status=ftis_pb2.FetchChunk.BUSY)
            yield ftis_pb2.FetchChunk(digest=digest, status=ftis_pb2.FetchChunk.HERE, packet=b"packet")


DOOR = Door()


@pytest_asyncio.fixture(params=["libp2p", "memory"], scope="module", loop_scope="module")
async def both(request, tmp_path_factory) -> AsyncIterator[Two]:
    """Alice, and Bob, who answers."""
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(in_memory, "DIAL_SECONDS", 0.1)
        network = Network(0.001, random.Random(0))
        made = []
        for number, who in enumerate((ALICE, BOB)):
            if request.param == "libp2p":
                made.append(await stack.enter_async_context(transport(who, tmp_path_factory.mktemp(str(number)))))
            else:
                addresses = [f"/ip4/11.0.0.{number}/tcp/4001/p2p/{who.peer_id}"]
                made.append(MemoryTransport(network, who.author, Machine(1.0, 1.0, 1e6, False), addresses))
        await made[1].serve(DOOR)
        yield made[0], made[1]


@pytest_asyncio.fixture(loop_scope="module")
async def two(both) -> Two:
    """They have a connection."""
    DOOR.open = True
    await both[0].connect(BOB.author, await both[1].addresses())
    return both


async def asked(*digests):
    yield ftis_pb2.FetchRequest(digests=digests)
    await asyncio.sleep(60.0)


async def first(stream, count):
    return [(await asyncio.wait_for(anext(stream), PATIENCE)).packet for _ in range(count)]


async def test_an_address_is_this_nodes_own_and_leads_to_it(two):
    alice, bob = two
    (address, *_) = addresses = await bob.addresses()
    assert all(one.endswith(f"/p2p/{BOB.peer_id}") for one in addresses)
    await alice.disconnect(BOB.author)
    assert BOB.author not in await alice.neighbours()
    await alice.connect(BOB.author, [address])
    assert set(await alice.neighbours()) == {BOB.author}
    assert alice.up
    assert (await alice.health()) is not None


async def test_where_nobody_is_nobody_is_reached(two):
    alice, _ = two
    with pytest.raises(Unreachable):
        await alice.connect(CAROL.author, [f"/ip4/127.0.0.1/tcp/9/p2p/{CAROL.peer_id}"])
    with pytest.raises(Unreachable):
        await alice.connect(CAROL.author, [])


async def test_anothers_address_does_not_lead_to_a_peer(two):
    alice, bob = two
    theirs = [address.replace(BOB.peer_id, CAROL.peer_id) for address in await bob.addresses()]
    with pytest.raises(Unreachable):
        await alice.connect(CAROL.author, theirs)


async def test_the_one_who_answers_knows_the_caller(two):
    answer = await two[0].handshake(BOB.author, ftis_pb2.Handshake(agent="a"), PATIENCE)
    assert answer.agent == "a"
    assert answer.run_id == ALICE.author
    assert list((await two[0].exchange(BOB.author, ftis_pb2.ExchangeRequest(wanted=[7]), PATIENCE)).wanted) == [7]


@pytest.mark.parametrize(
    "request_",
    [
        ftis_pb2.ExchangeRequest(again=True),
        ftis_pb2.ExchangeRequest(),
    ],
)
async def test_an_error_and_silence_reach_the_caller(two, request_):
    with pytest.raises(Exception):  # noqa: B017 - whatever the network raises
        await two[0].exchange(BOB.author, request_, 0.5)


async def test_a_caller_that_is_not_admitted_gets_no_answer(two):
    DOOR.open = False
    with pytest.raises(Exception, match="calls too often"):
        await two[0].handshake(BOB.author, ftis_pb2.Handshake(), PATIENCE)
    stream = await two[0].fetch(BOB.author, asked(b"a"))
    with pytest.raises(Exception):  # noqa: B017 - it ends, breaks or stays silent
        await asyncio.wait_for(anext(stream), 0.5)


async def test_a_stream_brings_its_chunks_in_order(two):
    stream = await two[0].fetch(BOB.author, asked(b"a", b"b"))
    assert await first(stream, 4) == [b"", b"packet"] * 2
    await stream.aclose()


async def test_who_disconnects_a_peer_ends_its_streams(two):
    stream = await two[0].fetch(BOB.author, asked(b"a"))
    await first(stream, 2)
    await two[1].disconnect(ALICE.author)
    with pytest.raises(Exception):  # noqa: B017 - it ends, breaks or stays silent
        await asyncio.wait_for(anext(stream), 0.5)


async def test_a_node_that_serves_no_more_does_not_answer(two):
    """The last test of the two."""
    await two[1].serve_no_more()
    with pytest.raises(Exception):  # noqa: B017 - whatever the network raises
        await two[0].handshake(BOB.author, ftis_pb2.Handshake(), 1.0)
