"""p2pd under our identity: private sockets, clear errors, and no wait without a limit."""

import asyncio
import contextlib
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from ftis_node.errors import UsageError, UserError
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.addresses import free_port, parse_address, peer_at
from ftis_node.swarm.wire.libp2p import FtisSwarm, Libp2p
from ftis_node.swarm.wire.p2pd import CALLS_OF_ONE_PEER, MAX_MESSAGE_BYTES
from ftis_node.swarm.wire.transport import Listening, Unreachable
from tests.support.swarm import PATIENCE, Answers, eventually, identity, stub, transport

ALICE = identity(1)
BOB = identity(2)
PEER = ALICE.peer_id
Pair = tuple[Libp2p, Libp2p]
on_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory) -> AsyncIterator[Pair]:
    path = tmp_path_factory.mktemp("both")
    async with transport(ALICE, path / "a") as alice, transport(BOB, path / "b") as bob:
        yield alice, bob


@pytest_asyncio.fixture(loop_scope="module")
async def pair(both) -> AsyncIterator[Pair]:
    """Two without a connection, which serve nothing yet."""
    yield both
    for node in both:
        if node.p2p._client.control.unary_handlers:
            await FtisSwarm(Answers()).remove_p2p_handlers(node.p2p)
    await both[0].disconnect(BOB.author)


async def start(path, who=ALICE, port=0, before=0):
    os.makedirs(path, 0o700, exist_ok=True)
    (path / "key").write_bytes(who.to_bytes())
    return await Libp2p.start(Listening(path / "key", path, "127.0.0.1", port), before=before)


TCP = "/ip4/192.0.2.7/tcp/4001"
QUIC = "/ip4/192.0.2.7/udp/4001/quic-v1"
NAMED = ("/ip6/2001:db8::1/tcp/4001", "/dns4/node.example/tcp/4001", f"{TCP}/p2p/{BOB.peer_id}/p2p-circuit")


@pytest.mark.parametrize("where", [TCP, QUIC, *NAMED])
def test_an_address_names_the_peer_at_its_end(where):
    assert parse_address(f"{where}/p2p/{PEER}") == ALICE.author


def test_row_26_a_long_text_from_a_stranger_is_not_remembered():
    text = f"{TCP}/p2p/{PEER}" + "\N{GRINNING FACE}" * 1000
    held = sys.getrefcount(text)
    assert peer_at(text) == b""
    assert sys.getrefcount(text) == held


NO_ADDRESSES = (
    "",
    "/",
    "hello",
    "192.0.2.7:4001",
    PEER,
    "/ip4/192.0.2.7/tcp/4001",
    "/ip4/192.0.2.7/tcp/4001/p2p/",
    "/ip4/192.0.2.7/tcp/4001/p2p/Qm",
    f"/ip4/192.0.2.700/tcp/4001/p2p/{PEER}",
    f"/ip4/192.0.2.7/tcp/port/p2p/{PEER}",
    f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER[:-1]}",
    f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}/ws",
    f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}/p2p-circuit",
    "/ip4/192.0.2.7/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # an RSA key's
)


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_of_a_peer_says_how_one_looks(address):
    with pytest.raises(UsageError) as error:
        parse_address(address)
    assert "/p2p/12D3Koo" in error.value.fix


async def test_p2pds_sockets_are_private_and_gone_after_closing(tmp_path):
    sockets = tmp_path / "sockets"
    before = set(os.listdir("/tmp"))
    network = await start(sockets)
    await FtisSwarm(Answers()).add_p2p_handlers(network.p2p)
    names = {path.name.split("-")[0] for path in sockets.iterdir() if stat.S_ISSOCK(path.stat().st_mode)}
    assert names == {"p2pd", "p2pclient"}
    assert not [name for name in set(os.listdir("/tmp")) - before if name.startswith("hivemind")]
    pid = network.pid
    assert psutil.Process(pid).environ()["GOMAXPROCS"] == "1", "its threads would wake one another"
    await network.close()
    assert not psutil.pid_exists(pid)
    assert [path for path in sockets.iterdir() if stat.S_ISSOCK(path.stat().st_mode)] == []


async def test_a_taken_port_says_which_and_what_to_do(tmp_path):
    async with transport(ALICE, tmp_path / "alice") as network:
        with pytest.raises(UserError) as error:
            await start(tmp_path / "bob", BOB, network.port)
    assert str(network.port) in error.value.what
    assert "--port" in error.value.fix


async def test_where_any_port_will_do_it_is_the_one_from_before_while_that_is_free(tmp_path):
    port = free_port("127.0.0.1")
    first = await start(tmp_path, before=port)
    assert first.port == port
    other = await start(tmp_path / "other", before=port)
    assert other.port not in (0, port)
    await asyncio.gather(first.close(), other.close())


@on_one_loop
async def test_somebody_else_at_a_peers_address_is_not_taken_for_it(pair):
    alice, bob = pair
    where = (await bob.addresses())[0].rpartition("/")[0]
    victim = identity(9)
    with pytest.raises(Unreachable, match=f"another node answers there, {BOB.peer_id}"):
        await alice.connect(victim.author, [f"{where}/{victim.peer_id}"])
    with pytest.raises(Unreachable, match="nothing listens there"):
        await alice.connect(victim.author, [f"/ip4/127.0.0.1/tcp/1/p2p/{victim.peer_id}"])
    with pytest.raises(Unreachable):
        await alice.connect(victim.author, ["rubbish", f"/p2p/{victim.peer_id}", "/ip4/127.0.0.1"])
    await alice.connect(BOB.author, await bob.addresses())
    assert BOB.author in await alice.neighbours()
    assert victim.author not in await alice.neighbours()


@pytest.mark.parametrize("kind", ["tcp/{}", "udp/{}/quic-v1"])
async def test_where_somebody_begins_to_listen_is_dialled_at_once_also_after_dials_in_vain(tmp_path, kind):
    """p2pd would put the dial off, for up to five minutes."""
    port = free_port("127.0.0.1")
    where = f"/ip4/127.0.0.1/{kind.format(port)}/p2p/{BOB.peer_id}"
    async with transport(ALICE, tmp_path / "a", quic=True) as alice:
        for _ in range(2):
            with pytest.raises(Unreachable, match="nothing listens there"):
                await alice.connect(BOB.author, [where])
        async with transport(BOB, tmp_path / "b", port, quic=True):
            await alice.connect(BOB.author, [where])


@on_one_loop
async def test_row_78_a_peer_is_reached_as_soon_as_its_own_address_answers_whatever_is_at_others(pair, monkeypatch):
    async def nobody(place):
        if place.endswith("/tcp/1025"):
            await asyncio.Event().wait()
        return await knock(place)

    alice, bob = pair
    knock = alice.knock
    monkeypatch.setattr(alice, "knock", nobody)
    others = [f"/ip4/127.0.0.1/tcp/1025/p2p/{BOB.peer_id}", "rubbish"]
    await asyncio.wait_for(alice.connect(BOB.author, [*others, *await bob.addresses()]), PATIENCE)
    assert BOB.author in await alice.neighbours()


async def test_an_address_that_a_neighbours_routing_table_names_is_not_dialled(tmp_path):
    """As p2pd's own DHT would: with it a stranger could make a node knock at any door of its owner's network."""
    secret = await P2P.create(dht_mode="server")
    referrer = await P2P.create(dht_mode="server")
    try:
        async with transport(ALICE, tmp_path) as alice:
            await referrer._client.connect(secret.peer_id, await secret.get_visible_maddrs())
            where = [str(address) for address in await referrer.get_visible_maddrs()]
            await alice.connect(referrer.peer_id.to_bytes(), where)
            asked = await P2P.create(dht_mode="client", initial_peers=where)
            try:
                await eventually_connects(asked, secret.peer_id)  # the referrer would tell
            finally:
                await asked.shutdown()
            with pytest.raises(Unreachable):
                await alice.connect(secret.peer_id.to_bytes(), [])
    finally:
        await asyncio.gather(secret.shutdown(), referrer.shutdown())


async def test_a_node_with_relays_starts_and_meets_them(tmp_path):
    """`make nat` shows what they are good for; p2pd takes them in one mode of its DHT only."""
    async with (
        transport(BOB, tmp_path / "bob") as bob,
        transport(ALICE, tmp_path / "alice", relays=tuple(await bob.addresses())) as alice,
    ):
        await alice.connect(BOB.author, await bob.addresses())
        assert BOB.author in await alice.neighbours()


async def eventually_connects(p2p, peer):
    for _ in range(round(10 * PATIENCE)):
        with contextlib.suppress(ControlFailure):
            return await p2p._client.connect(peer, [])
        await asyncio.sleep(0.1)
    pytest.fail("libp2p's DHT does not know the peer")


async def test_a_p2pd_that_does_not_listen_to_reason_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.swarm.wire.libp2p.DIAL_SECONDS", 0.2)
    network = await start(tmp_path)
    pid = network.pid
    os.kill(pid, signal.SIGSTOP)  # a stopped process does not act on SIGTERM
    try:
        await asyncio.wait_for(network.close(), PATIENCE)
        assert not psutil.pid_exists(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@on_one_loop
async def test_a_length_that_no_message_has_ends_the_stream_before_memory_is_spent(pair):
    alice, bob = pair
    await FtisSwarm(Answers()).add_p2p_handlers(bob.p2p)
    await alice.connect(BOB.author, await bob.addresses())
    for length in (MAX_MESSAGE_BYTES + 1, 1 << 32, (1 << 64) - 1):
        _, reader, writer = await alice.p2p.call_binary_stream_handler(PeerID(BOB.author), "FtisSwarm.rpc_fetch")
        writer.write(P2P.MESSAGE_MARKER + length.to_bytes(8, "big") + b"x" * 1000)
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()
    largest = ftis_pb2.FetchChunk(digest=bytes(32), packet=bytes(MAX_MESSAGE_BYTES - 1024))
    assert largest.ByteSize() <= MAX_MESSAGE_BYTES


@on_one_loop
async def test_an_answer_to_a_call_that_is_just_being_given_up_does_not_make_the_node_deaf(pair):
    alice, bob = pair

    class GivesUp(Answers):
        async def on_handshake(self, request, peer):
            if not request.minor:  # this call ends just before its answer comes
                calls = alice.p2p._client.control._pending_calls
                given_up.update(calls)
                calls.update(dict.fromkeys(calls, cancelled))
            return ftis_pb2.Handshake(agent="here")

    given_up = {}
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    await FtisSwarm(GivesUp()).add_p2p_handlers(bob.p2p)
    await alice.connect(BOB.author, await bob.addresses())
    caller = stub(alice, BOB)
    with pytest.raises(TimeoutError):
        await caller.rpc_handshake(ftis_pb2.Handshake(), timeout=0.5)
    assert given_up
    assert (await caller.rpc_handshake(ftis_pb2.Handshake(minor=1), timeout=PATIENCE)).agent == "here"


class Slow(Answers):
    """Handshakes wait for a word; counts how many wait."""

    def __init__(self):
        self.waiting = 0
        self.word = asyncio.Event()

    async def on_handshake(self, request, peer):
        self.waiting += 1
        try:
            await self.word.wait()
        finally:
            self.waiting -= 1
        return ftis_pb2.Handshake()


@on_one_loop
async def test_row_17_one_peer_has_a_few_calls_at_once_and_others_are_answered(pair, tmp_path):
    alice, bob = pair
    async with transport(identity(3), tmp_path / "c") as other:
        slow = Slow()
        await FtisSwarm(slow).add_p2p_handlers(alice.p2p)
        for caller in (bob, other):
            await caller.connect(ALICE.author, await alice.addresses())
        calls = [asyncio.create_task(stub(bob, ALICE).rpc_handshake(ftis_pb2.Handshake())) for _ in range(40)]
        await eventually(lambda: sum(call.done() for call in calls) == 40 - CALLS_OF_ONE_PEER, "the rest is refused")
        assert slow.waiting == CALLS_OF_ONE_PEER
        one_more = asyncio.create_task(stub(other, ALICE).rpc_handshake(ftis_pb2.Handshake()))
        await eventually(lambda: slow.waiting == CALLS_OF_ONE_PEER + 1, "another peer has calls of its own")
        slow.word.set()
        answers = await asyncio.gather(*calls, one_more, return_exceptions=True)
        assert sum(isinstance(answer, ftis_pb2.Handshake) for answer in answers) == CALLS_OF_ONE_PEER + 1
        assert "too many calls at once" in str(next(one for one in answers if isinstance(one, Exception)))
        await stub(bob, ALICE).rpc_handshake(ftis_pb2.Handshake())


@on_one_loop
async def test_row_26_calls_that_their_callers_gave_up_are_forgotten(pair):
    alice, bob = pair
    slow = Slow()
    await FtisSwarm(slow).add_p2p_handlers(alice.p2p)
    await bob.connect(ALICE.author, await alice.addresses())
    for _ in range(3):
        call = asyncio.create_task(stub(bob, ALICE).rpc_handshake(ftis_pb2.Handshake()))
        await eventually(lambda: slow.waiting == 1, "the call has arrived")
        call.cancel()
        await eventually(lambda: slow.waiting == 0, "it is given up")
    tasks = alice.p2p._client.control._handler_tasks
    await eventually(lambda: not tasks, "nothing is left of the calls")
