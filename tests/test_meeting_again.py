"""Live nodes that lost one another under load meet again while they have a live peer in common."""

import contextlib
import os
import signal

import pytest

from ftis_node.config.run import RunFile
from ftis_node.swarm import ftis_pb2, membership, swarm
from ftis_node.swarm.address_book import FIRST_PAUSE, NAMED_PAUSE, TIMES_OF_REFUSED, TRIES_OF_MET, TRIES_OF_NAMED
from ftis_node.swarm.addresses import NetworkScope, free_port
from ftis_node.swarm.handshake import MAX_ADDRESSES, PROTOCOL_MAJOR
from ftis_node.swarm.known_addresses import KnownAddresses
from ftis_node.swarm.membership import Membership
from ftis_node.swarm.traffic import Traffic
from tests.support.alone import Alone, hears, strangers
from tests.support.swarm import OTHER_RUN, RUN, Answers, all_meet, eventually, held_up, identity, member, transport

BOB, MALLORY = identity(2), identity(4)
NOWHERE = f"/ip4/127.0.0.1/tcp/1024/p2p/{BOB.peer_id}"


@pytest.fixture
def hasty(monkeypatch):
    """Nodes that lose patience sooner, so that the tests need not wait."""
    monkeypatch.setattr(swarm, "EXCHANGE_SECONDS", 1.0)
    monkeypatch.setattr(swarm, "MAINTAIN_SECONDS", 1.0)
    monkeypatch.setattr(membership, "GIVE_UP_SECONDS", 1.0)


@contextlib.asynccontextmanager
async def three(path):
    """A common peer, which dials nobody (its own address is public and theirs are not), and two that know it."""
    async with (
        member(1, path) as common,
        member(2, path, [common.address]) as one,
        member(3, path, [common.address]) as other,
    ):
        common.swarm.membership.addresses.scope = NetworkScope("0.0.0.0")
        await all_meet(common, one, other)
        yield common, one, other


async def test_row_13b_a_node_whose_network_hung_is_met_again_by_all_that_lost_it(tmp_path, hasty, monkeypatch):
    async with three(tmp_path) as (common, one, slow):
        again = held_up(slow, monkeypatch)
        slow.transport.up = False  # its supervisor finds that out within 5 s, sooner than it would blame anybody
        os.kill(slow.transport.pid, signal.SIGSTOP)
        await eventually(lambda: not common.met(slow) and not one.met(slow), "both have lost it")
        for node in (common, one):
            await greeted_in_vain(node, slow)
        assert slow.met(common, one), "it blames nobody while its own network is down, and goes on asking them"
        again.set()
        await all_meet(common, one, slow)


@pytest.mark.virtual_time
async def test_row_13b_two_that_lost_each_other_meet_again_through_a_common_peer(tmp_path, hasty):
    async with three(tmp_path) as (common, one, other):
        forgets(one, other)
        forgets(other, one)
        await all_meet(common, one, other)


# --- a node that was away, or whose network is another ---------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_node_finds_its_swarm_by_what_its_home_keeps_whoever_moved_or_forgot(tmp_path):
    """Only the first start names a peer; at the others one of them has another port than the other knows."""
    async with member(1, tmp_path, cache=True) as founder:
        async with member(2, tmp_path, [founder.address], cache=True) as node:
            await all_meet(founder, node)
        forgets(founder, node)
        async with member(2, tmp_path, cache=True) as again:
            assert again.address != node.address
            await all_meet(founder, again)
    port = int(again.address.split("/")[4])
    async with member(2, tmp_path, cache=True, port=port) as alone, member(1, tmp_path, cache=True) as moved:
        assert moved.address != founder.address
        await all_meet(alone, moved)


@pytest.mark.virtual_time
async def test_peers_that_come_long_after_a_node_are_met(tmp_path):
    """They know nobody; its owner named one of them at an earlier start."""
    port = free_port("127.0.0.1")
    where = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity(1).peer_id}"
    async with member(2, tmp_path, [where], cache=True):
        pass
    async with member(2, tmp_path, cache=True) as node:
        waiting = node.swarm.membership.addresses._passive_view[identity(1).author]
        await eventually(lambda: waiting.failures > 1, "it is dialled in vain")
        async with member(1, tmp_path, port=port) as late:
            await all_meet(node, late)


async def test_of_a_peers_addresses_the_one_that_answered_is_kept_and_named_first(tmp_path):
    port = free_port("127.0.0.1")
    announce = tuple(f"/ip4/127.0.0.1/tcp/{one}" for one in (1025, 1026, 1027, port))
    async with member(1, tmp_path, port=port, announce=announce) as one:
        good = one.address.replace("1025", str(port))
        async with member(2, tmp_path, [good], cache=True) as node:
            await all_meet(one, node)
            (known,) = node.swarm.membership.active_view.values()
            assert known.addresses[0] == good
    assert good in KnownAddresses.read(tmp_path / "member-2" / "peers.json").met


def forgets(node, peer):
    known = node.swarm.membership
    known.active_view.pop(peer.author, None)
    known.sessions.pop(peer.author, None)
    known.addresses.forget(peer.author)


async def greeted_in_vain(node, lost):
    """As often as a peer that nobody has met is greeted before it is forgotten."""
    for _ in range(TRIES_OF_NAMED):
        assert not await node.swarm.membership.greet(lost.author)


# --- when a peer that does not answer is greeted again ----------------------------------------------------------------


@pytest.fixture
def alice(clock) -> Alone:
    """A node without a network, whose pauses are counted by a clock in hand."""
    made = Alone(identity(1), host="127.0.0.1")
    made.addresses.clock = clock
    return made


@pytest.fixture
def bereft(alice) -> Alone:
    """The same, after it has met Bob and lost him."""
    alice.on_handshake(hello(), BOB.author)
    alice.active_view.pop(BOB.author)
    return alice


def hello(run_id=RUN.id):
    return ftis_pb2.Handshake(major=PROTOCOL_MAJOR, run_id=run_id, addresses=[NOWHERE])


async def test_row_13b_who_was_met_is_greeted_again_after_growing_pauses(bereft, clock):
    for times in range(TRIES_OF_MET):
        assert strangers(bereft) == [BOB.author]
        assert not await bereft.greet(BOB.author)
        assert not strangers(bereft), "not at once again"
        clock.now += 2.0**times
    assert not strangers(bereft), "after half an hour it is forgotten"
    assert hears(bereft, MALLORY, NOWHERE), "until it is named"
    assert strangers(bereft)


async def test_row_13b_a_lost_peer_that_others_name_is_greeted_within_the_minute(bereft, clock):
    for _ in range(TRIES_OF_MET - 1):
        await bereft.greet(BOB.author)
    assert bereft.addresses.patience() > 1000.0
    hears(bereft, MALLORY, NOWHERE)
    assert bereft.addresses.patience() == NAMED_PAUSE
    clock.now += NAMED_PAUSE
    assert strangers(bereft) == [BOB.author]


async def test_row_38_fresh_made_up_peers_of_one_teller_do_not_keep_others_from_being_greeted(alice, clock):
    hears(alice, identity(3), NOWHERE)
    assert not await alice.greet(BOB.author)
    clock.now += NAMED_PAUSE
    made_up = [NOWHERE.replace(BOB.peer_id, identity(number).peer_id) for number in range(100, 120)]
    hears(alice, MALLORY, *made_up)
    assert BOB.author in strangers(alice)[:2], "the two who named somebody have turns"


def test_row_13b_of_a_lost_peer_false_addresses_leave_its_own_among_those_dialled(alice):
    false = [NOWHERE.replace("1024", str(port)) for port in range(4001, 4001 + 2 * MAX_ADDRESSES)]
    alice.on_handshake(hello(), BOB.author)
    hears(alice, MALLORY, *false[:MAX_ADDRESSES])
    alice.active_view[BOB.author].seen -= 60.0
    for _ in range(TRIES_OF_NAMED):
        alice.failed(BOB.author)
    assert BOB.author not in alice.active_view
    hears(alice, MALLORY, *false[MAX_ADDRESSES:])
    dialled = alice.addresses.to_dial(BOB.author) or []
    assert NOWHERE in dialled
    assert false[-1] in dialled, "its own, and the newest that others name"


@pytest.mark.virtual_time
async def test_row_13b_a_lost_peer_that_calls_is_greeted_over_its_connection(tmp_path):
    """Also where this node may dial none of its addresses."""
    async with transport(identity(1), tmp_path / "1") as network, member(2, tmp_path) as bob:
        await network.serve(Answers())
        alice = Membership(network, identity(1), RunFile(run=RUN), Traffic())
        alice.addresses.scope = NetworkScope("0.0.0.0")
        assert not alice.addresses.called(BOB.author), "they have not met"
        alice.on_handshake(hello(), BOB.author)
        assert not alice.addresses.called(BOB.author), "it is in the view"
        alice.active_view.pop(BOB.author)
        alice.addresses.forget(BOB.author)
        assert alice.addresses.called(BOB.author)
        assert strangers(alice) == [BOB.author]
        assert not await alice.greet(BOB.author), "there is no connection"
        await bob.transport.connect(identity(1).author, await network.addresses())
        assert await alice.greet(BOB.author)


def test_who_was_refused_is_asked_again_when_it_may_be_in_another_run(alice, clock):
    alice.addresses.hear([NOWHERE])
    alice.on_handshake(hello(OTHER_RUN.id), BOB.author)
    assert BOB.author in alice.refused
    assert not strangers(alice)
    alice.addresses.hear([NOWHERE])
    clock.now += NAMED_PAUSE
    assert strangers(alice) == [BOB.author], "where it is named"
    alice.on_handshake(hello(OTHER_RUN.id), BOB.author)
    clock.now += FIRST_PAUSE * 2.0 ** (TIMES_OF_REFUSED - 1)
    assert strangers(alice) == [BOB.author], "and where it is not"


async def test_the_peers_of_the_owner_are_never_given_up(alice, clock):
    named = alice.addresses.trust([NOWHERE])
    for _ in range(2 * TRIES_OF_MET):
        alice.addresses.hear(named)
        assert strangers(alice) == [BOB.author]
        await alice.greet(BOB.author)
        alice.addresses.hear(named)
        assert not strangers(alice)
        assert alice.addresses.patience() <= NAMED_PAUSE
        clock.now += alice.addresses.patience()
