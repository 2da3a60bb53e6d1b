"""Every packet arrives as its author signed it, or its holder is at fault; a slow one keeps nobody waiting."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hivemind.p2p import P2P, PeerID

from ftis_node.packet import packet_digest
from ftis_node.swarm import fetch as fetching
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm import traffic as accounting
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.books import Holder
from ftis_node.swarm.fetch import HolderFault, Uploads, fetch
from ftis_node.swarm.known import Known, Target
from ftis_node.swarm.limits import OWN
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire import inbound
from ftis_node.swarm.wire.libp2p import FtisSwarm
from tests.support.swarm import RUN, Answers, eventually, identity, transport

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALICE, BOB, CAROL = (identity(number) for number in range(1, 4))
HERE, GONE, BUSY = ftis_pb2.FetchChunk.HERE, ftis_pb2.FetchChunk.GONE, ftis_pb2.FetchChunk.BUSY


def bodies(count, size=1300):
    rng = random.Random(count)
    return [rng.randbytes(size) for _ in range(count)]


def targets(contents):
    refs = [PacketRef(slot, packet_digest(body), len(body), 1) for slot, body in enumerate(contents)]
    made = announce(
        ALICE,
        run_id=RUN.id,
        round=0,
        policy_step=0,
        issued_at=0,
        packets=refs,
    )
    known = Known(made, made.encode(), 0.0, 0.0, None)
    return [Target(known, index) for index in range(len(contents))]


def holding(contents):
    return {packet_digest(body): body for body in contents}.get


def uploads_of(contents):
    return Uploads(holding(contents), Traffic())


class Pair:
    """Bob holds, Alice fetches."""

    def __init__(self, alice, bob):
        self.alice = alice
        self.bob = bob
        self.traffic = Traffic()
        self.handlers = None

    async def serve(self, serve):
        """From now on Bob answers so."""
        if self.handlers is None:
            self.handlers = Answers()
            await FtisSwarm(self.handlers).add_p2p_handlers(self.bob.p2p)
        self.handlers.serve = serve

    async def say(self, *chunks, silent=False):
        """Answers every request with these; then it ends, or says no more."""

        async def serve(request, peer):
            for one in chunks:
                yield one
            if silent:
                await asyncio.Event().wait()

        await self.serve(serve)

    async def answers(self, wanted):
        async for _, answer in fetch(self.alice, self.bob.p2p.peer_id.to_bytes(), wanted, self.traffic):
            yield answer.packet or None

    async def fetch(self, wanted):
        return [packet async for packet in self.answers(wanted)]

    async def fault(self, wanted, got):
        """Fetches from a holder who is at fault; `got` is what must have come before that."""
        came = []
        with pytest.raises(HolderFault) as fault:
            async for packet in self.answers(wanted):
                came.append(packet)
        assert came == got
        return str(fault.value)


@contextlib.asynccontextmanager
async def connected(path):
    async with transport(ALICE, path / "alice") as alice, transport(BOB, path / "bob") as bob:
        await alice.connect(BOB.author, await bob.addresses())
        yield Pair(alice, bob)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def together(tmp_path_factory) -> AsyncIterator[Pair]:
    async with connected(tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest.fixture
def pair(together) -> Pair:
    """The pair of all tests that say how Bob answers."""
    together.traffic = Traffic()
    return together


def chunk(body, digest=None, status=HERE):
    return ftis_pb2.FetchChunk(digest=digest or packet_digest(body), packet=body, status=status)


async def test_all_packets_arrive_and_those_that_are_gone_are_named(pair):
    contents = bodies(24)
    traffic = Traffic()
    await pair.serve(Uploads(holding(contents[:20]), traffic).serve)
    answers = fetch(pair.alice, BOB.author, targets(contents), pair.traffic)
    got = [(target.index, answer.packet or None) async for target, answer in answers]
    assert got == [*enumerate(contents[:20] + [None] * 4)]
    assert pair.traffic.bytes_in == traffic.bytes_out > sum(map(len, contents[:20]))
    assert pair.traffic.bytes_out == traffic.bytes_in > 0


async def test_over_quic_all_arrives_too(tmp_path):
    contents = bodies(24)
    async with (
        transport(ALICE, tmp_path / "alice", quic=True) as alice,
        transport(BOB, tmp_path / "bob", quic=True) as bob,
    ):
        both = await bob.addresses()
        quic = [address for address in both if "/quic-v1/" in address]
        assert len(quic) == 1
        assert len(both) == 2
        await alice.connect(BOB.author, quic)
        pair = Pair(alice, bob)
        await pair.serve(uploads_of(contents).serve)
        assert await pair.fetch(targets(contents)) == contents


async def test_what_is_over_the_limit_waits_and_then_is_busy(monkeypatch):
    now = 100.0
    slept = []

    async def sleep(seconds):
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(fetching.asyncio, "sleep", sleep)
    contents = bodies(8, 1000)
    monkeypatch.setattr(accounting, "boot_seconds", lambda: now)
    traffic = Traffic()
    traffic.limit(1100)  # a little more than a packet a second
    uploads = Uploads(holding(contents), traffic)
    assert await read(uploads, ALICE.author, contents) == [HERE] * 8
    assert 5 < sum(slept) < 7
    assert max(slept) < 1.1, "a second's worth at once, then one a second"
    traffic.answer(BOB.author, 10_000)
    slept.clear()
    assert await read(uploads, ALICE.author, contents[:2]) == [BUSY, BUSY]
    assert not sum(slept)
    now += 60
    assert await read(uploads, ALICE.author, contents[:2]) == [HERE] * 2


async def test_the_largest_packet_arrives(pair):
    contents = bodies(2, 4 << 20)
    await pair.serve(uploads_of(contents).serve)
    assert await pair.fetch(targets(contents)) == contents


async def test_many_fetches_come_without_a_fault(pair):
    contents = bodies(24)
    await pair.serve(uploads_of(contents).serve)
    wanted = targets(contents)
    for _ in range(50):
        got = await pair.fetch(wanted)
        while None in got:  # the holder has not yet noticed that the last stream was hung up
            got = await pair.fetch(wanted)
        assert got == contents


# --- a holder at fault ------------------------------------------------------------------------------------------------


WRONG = {
    "other bytes": lambda all: [chunk(all[0]), chunk(bytes(1300), packet_digest(all[1])), chunk(all[2])],
    "other bytes than": lambda all: [chunk(all[0]), chunk(all[1] + b"x", packet_digest(all[1]))],
    "not asked for": lambda all: [chunk(all[0]), chunk(b"unasked")],
    "was not asked for": lambda all: [chunk(all[0]), chunk(all[0])],
    "Timeout": lambda all: [chunk(all[0])],
}


async def test_unsigned_unasked_twice_or_never_is_its_fault(pair, monkeypatch):
    contents = bodies(3)
    for why, said in WRONG.items():
        monkeypatch.setattr(fetching, "CHUNK_SECONDS", 0.3 if why == "Timeout" else 30.0)
        await pair.say(*said(contents), silent=True)
        assert why in await pair.fault(targets(contents), contents[:1]), f"what came before stands: {why}"


async def test_a_holder_that_dies_half_way_is_at_fault(pair, tmp_path, monkeypatch):
    contents = bodies(2)
    came = []
    monkeypatch.setattr(fetching, "CHUNK_SECONDS", 0.5)  # p2pd tells of the end only when both sides have ended
    async with transport(CAROL, tmp_path) as carol:
        await pair.alice.connect(CAROL.author, await carol.addresses())
        dying = Pair(pair.alice, carol)
        await dying.say(chunk(contents[0]), silent=True)
        with pytest.raises(HolderFault):
            async for packet in dying.answers(targets(contents)):
                came.append(packet)
                os.kill(carol.pid, signal.SIGKILL)
    assert came == contents[:1]


async def test_a_holder_that_sends_just_often_enough_is_at_fault(pair, monkeypatch):
    contents = bodies(30, 10)
    monkeypatch.setattr(fetching, "CHUNK_SECONDS", 0.5)
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 1.0)

    async def serve(request, peer):
        for body in contents:
            await asyncio.sleep(0.2)  # the slowness is what is tested
            yield chunk(body)

    await pair.serve(serve)
    with pytest.raises(HolderFault, match="Timeout"):
        await pair.fetch(targets(contents))


async def test_a_holder_whose_handler_fails_is_at_fault(pair):
    async def serve(request, peer):
        raise RuntimeError("my disk is gone")
        yield chunk(b"")

    await pair.serve(serve)
    assert "broke its stream" in await pair.fault(targets(bodies(1)), [])


async def test_a_holder_without_the_service_or_without_a_connection_is_at_fault(pair):
    """Alice has no service."""
    assert "no stream" in await Pair(pair.bob, pair.alice).fault(targets(bodies(1)), [])
    with pytest.raises(HolderFault, match="no stream"):
        [_ async for _ in fetch(pair.alice, identity(4).author, targets(bodies(1)), Traffic())]


async def test_a_length_header_of_four_gigabytes_is_the_holders_fault(pair):
    async def handler(info, reader, writer):
        await P2P.receive_protobuf(ftis_pb2.FetchRequest, reader)
        writer.write(P2P.MESSAGE_MARKER + (1 << 32).to_bytes(8, "big") + bytes(100_000))
        with contextlib.suppress(Exception):
            await reader.read()
        writer.close()

    await pair.alice.p2p.add_binary_stream_handler("FtisSwarm.rpc_fetch", handler)
    assert "no answer" in await Pair(pair.bob, pair.alice).fault(targets(bodies(1)), [])
    await pair.alice.p2p.remove_binary_stream_handler("FtisSwarm.rpc_fetch")


# --- a holder among many ----------------------------------------------------------------------------------------------


def asked(contents):
    return ftis_pb2.FetchRequest(digests=map(packet_digest, contents))


async def read(uploads, peer, contents):
    return [chunk.status async for chunk in uploads.serve(asked(contents), peer)]


async def slots_taken(uploads, contents):
    """All slots for peers without a record, each by one that has read its first packet."""
    others = []
    for number in range(fetching.UPLOADS):
        others.append(uploads.serve(asked(contents), identity(100 + number).author))
        assert (await anext(others[-1])).status == HERE
    return others


async def test_a_peer_that_fetches_twice_at_once_hears_busy(pair):
    contents = bodies(3)
    uploads = uploads_of(contents)
    first_out = asyncio.Event()
    go_on = asyncio.Event()

    async def serve(request, peer):
        async for made in uploads.serve(request, peer):
            yield made
            if made.status == HERE and not first_out.is_set():
                first_out.set()
                await go_on.wait()

    await pair.serve(serve)
    first = asyncio.create_task(pair.fetch(targets(contents)))
    await first_out.wait()
    assert await pair.fetch(targets(contents)) == [None, None, None]
    go_on.set()
    assert await first == contents


async def test_who_would_wait_too_long_for_a_slot_hears_busy(monkeypatch):
    monkeypatch.setattr(fetching, "BUSY_AFTER", 0.1)
    contents = bodies(2)
    uploads = Uploads(holding(contents), Traffic(recorded=lambda peer: peer == BOB.author))
    others = await slots_taken(uploads, contents)
    assert await read(uploads, ALICE.author, contents) == [BUSY, BUSY]
    assert await read(uploads, BOB.author, contents) == [HERE, HERE], "peers with a record have slots of their own"
    await others[0].aclose()
    assert await read(uploads, ALICE.author, contents) == [HERE, HERE]


async def test_asking_often_takes_one_place_in_the_queue_only(monkeypatch):
    monkeypatch.setattr(fetching, "BUSY_AFTER", 5.0)
    contents = bodies(2)
    uploads = uploads_of(contents)
    others = await slots_taken(uploads, contents)
    greedy = [asyncio.create_task(read(uploads, ALICE.author, contents)) for _ in range(20)]
    await eventually(lambda: sum(task.done() for task in greedy) == 19, "all but one of its requests are refused")
    assert all(task.result() == [BUSY, BUSY] for task in greedy if task.done())
    modest = asyncio.create_task(read(uploads, BOB.author, contents))
    for other in others[:2]:
        await other.aclose()
    assert await modest == [HERE, HERE]
    assert [HERE, HERE] in await asyncio.gather(*greedy)


async def test_row_61_a_request_is_answered_up_to_its_limit_only():
    contents = bodies(OWN.digests + 10, 10)
    uploads = uploads_of(contents)
    assert await read(uploads, ALICE.author, contents) == [HERE] * OWN.digests


async def test_peers_that_do_not_read_lose_their_slots(pair, monkeypatch):
    monkeypatch.setattr(inbound, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(fetching, "UPLOADS", 1)
    contents = bodies(20, 4 << 20)  # more than the sockets between the two swallow
    uploads = uploads_of(contents)
    await pair.serve(uploads.serve)
    _, _, writer = await pair.alice.p2p.call_binary_stream_handler(PeerID(BOB.author), "FtisSwarm.rpc_fetch")
    await P2P.send_protobuf(asked(contents), writer)
    await eventually(lambda: bool(uploads._active), "the upload has begun")
    assert uploads._slots.locked()
    await eventually(lambda: not uploads._active and not uploads._slots.locked(), "its slot is free again")
    writer.close()


def test_who_never_has_anything_is_left_alone_for_ever_longer():
    book = Holder()
    seen = []
    for book.in_vain in range(1, 13):
        seen.append(book.rest(0.1))
    assert seen == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0]
    assert book.rest(90.0) == 90.0, "an interval at least"
    assert Holder().rest(0.1) == 0.1, "something is enough to be asked as before"
