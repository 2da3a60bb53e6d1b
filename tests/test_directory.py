"""Row 38: answers of the DHT are cut down, checked and known by their referrer; honest nodes still find one another."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

import msgpack
import pytest
import pytest_asyncio
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import NodeInfo, StoreRequest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.config.run import RunFile
from ftis_node.lab.simulation.directory import RECORD_BYTES, STORE_BYTES, directory_figures
from ftis_node.lab.simulation.scenario import Scenario
from ftis_node.swarm.address_book import DIALS_AT_ONCE, MISSED_MIN, PART_MAX, Referrers
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.membership import Membership
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire import dht_limits, records
from ftis_node.swarm.wire.dht_guard import NEW_IDS_AT_ONCE, RECORD, GuardedDht
from ftis_node.swarm.wire.dht_limits import DEPTHS, MAX_RECORDS, NEAREST_MAX, OWN_NODES
from ftis_node.swarm.wire.directory import NAMED_NODES, check
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.records import MAX_KEYS, OTHERS_MAX, OwnerSigned, Shelf, key_bytes, keys_of, shard_of
from tests.hostile.directory import DHTProtocol, made_up, near, pack
from tests.support.swarm import OTHER_RUN, RUN, directory_user, eventually, identity, member, transport

on_one_loop = pytest.mark.asyncio(loop_scope="module")
ALICE, BOB, MALLORY = (identity(number) for number in range(1, 4))
KEY = key_bytes(RUN.id)
VALIDATOR = OwnerSigned(ALICE, RUN.id)
MADE_UP = made_up(RUN.id, "", 2 * MAX_RECORDS)


@pytest.fixture(autouse=True)
def fresh():
    """Records expire, and a run of all tests may take longer than they last."""
    if MADE_UP[0].expiration_time < time.time() + 120:
        MADE_UP[:] = made_up(RUN.id, "", 2 * MAX_RECORDS)


def own(who):
    return [f"/ip4/8.8.4.4/tcp/4001/p2p/{who.peer_id}"]


def of(who, shard="", addresses=None, run_id=RUN.id):
    """A record as its owner signs it."""
    return OwnerSigned(who, run_id).sign(shard, addresses or own(who), 100.0)


def many(count):
    """So many strangers."""
    return [Identity((5000 + number).to_bytes(32, "big")) for number in range(count)]


# --- one answer -------------------------------------------------------------------------------------------------------


def test_row_38_an_answer_has_at_most_64_records():
    honest = records.pack_answer(MADE_UP)
    assert len(check(KEY, honest, VALIDATOR)) == MAX_RECORDS

    assert records.unpack_answer(KEY, pack(MADE_UP[: MAX_RECORDS + 1])) == []
    assert check(KEY, pack(MADE_UP), VALIDATOR) == {}


def test_row_38_an_answer_with_a_time_that_is_no_float_is_refused():
    rows = [[one.subkey, one.value, int(one.expiration_time)] for one in MADE_UP[:2]]
    assert records.unpack_answer(KEY, msgpack.packb(rows)) == []


def test_row_38_of_a_record_only_its_owners_addresses_are_taken_and_only_if_it_signed_them():
    through_bob = f"{own(BOB)[0]}/p2p-circuit{own(ALICE)[0]}"
    signed = of(BOB, addresses=[*own(BOB), *own(ALICE), through_bob])
    made = of(MALLORY)
    forged = DHTRecord(KEY, msgpack.packb(ALICE.peer_id), made.value, made.expiration_time)
    of_bobs = of(MALLORY, addresses=own(BOB))

    assert check(KEY, pack([signed, forged, of_bobs]), VALIDATOR) == {BOB.author: own(BOB)}


def test_row_38_a_record_lies_under_its_owners_keys_only():
    assert len(keys_of(RUN.id, BOB.author)) == len(DEPTHS)
    for depth in DEPTHS[1:]:
        shard = shard_of(BOB.author, depth)
        another = f"{(int(shard, 16) + 1) % 16**depth:0{depth}x}"
        assert VALIDATOR.owner(of(BOB, shard)) == BOB.author
        assert VALIDATOR.owner(of(BOB, another)) is None
    assert VALIDATOR.owner(of(BOB, run_id=OTHER_RUN.id)) is None


LEAVES = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.binary(max_size=20)


NESTED = st.recursive(LEAVES, lambda inner: st.lists(inner), max_leaves=20)


@given(st.binary(max_size=300) | NESTED.map(msgpack.packb))
def test_row_38_whatever_else_an_answer_is_gives_no_addresses(answer):
    assert check(KEY, answer, VALIDATOR) == {}


# --- what a node keeps ------------------------------------------------------------------------------------------------


def fill(shelf, records=MADE_UP):
    """Each record left by its owner."""
    for record in records:
        shelf.keep(record, VALIDATOR.owner(record))
    return shelf


def filled(known):
    return fill(Shelf(VALIDATOR, known.__contains__))


def test_row_38_strangers_fill_a_key_and_displace_no_peer_of_the_view():
    shelf = filled({ALICE.author})
    assert len(shelf.records(KEY)) == MAX_RECORDS
    assert not shelf.keep(of(ALICE), ALICE.author), "the key is full, and says so"
    assert own(ALICE) in shelf.addresses().values(), "but took a peer of the view all the same"

    fill(shelf, MADE_UP * 3)
    assert own(ALICE) in shelf.addresses().values()
    assert len(shelf.records(KEY)) == MAX_RECORDS


def test_row_38_a_key_full_of_peers_of_the_view_takes_no_stranger():
    shelf = filled({VALIDATOR.owner(record) for record in MADE_UP})
    shelf.keep(of(BOB), BOB.author)
    assert BOB.author not in shelf.addresses()


def test_row_38_strangers_who_fill_other_keys_displace_no_peer_of_the_view():
    shelf = Shelf(VALIDATOR, {ALICE.author}.__contains__)
    shelf.keep(of(ALICE), ALICE.author)
    for stranger in many(500):
        for depth in DEPTHS[1:]:
            shard = shard_of(stranger.author, depth)
            shelf.keep(of(stranger, shard), stranger.author)

    kept = {VALIDATOR.owner(record) for record in shelf.records(KEY)}
    assert ALICE.author in kept


def test_row_38_where_each_key_has_a_peer_of_the_view_a_strangers_new_key_has_no_room():
    view = {shard_of(one.author, 3): one for one in many(2 * MAX_KEYS)}
    shelf = Shelf(VALIDATOR, {one.author for one in view.values()}.__contains__)
    used = list(view)[:MAX_KEYS]
    for shard in used:
        one = view[shard]
        assert shelf.keep(of(one, shard), one.author)

    assert not shelf.keep(of(BOB), BOB.author)

    for shard in used:
        assert shelf.records(key_bytes(RUN.id, shard))


def test_row_38_there_are_few_keys_and_what_has_expired_makes_room(monkeypatch):
    shelf = filled(set())
    keys = {KEY}
    for who in many(2 * MAX_KEYS):
        shard = shard_of(who.author, 3)
        keys.add(key_bytes(RUN.id, shard))
        shelf.keep(of(who, shard), who.author)
    assert len(keys) > MAX_KEYS
    assert sum(bool(shelf.records(key)) for key in keys) <= MAX_KEYS

    later = time.time() + 500.0
    monkeypatch.setattr(time, "time", lambda: later)
    assert not any(shelf.records(key) for key in keys)


def test_row_38_a_teller_of_many_that_never_answer_is_doubted_until_others_of_its_do():
    referrers = Referrers()
    for _ in range(MISSED_MIN):
        assert not referrers.doubted(MALLORY.author)
        referrers.note(MALLORY.author, met=False)
    referrers.note(b"", met=False)

    assert referrers.doubted(MALLORY.author)
    assert not referrers.doubted(BOB.author)

    for _ in range(MISSED_MIN):
        referrers.note(MALLORY.author, met=True)
    assert not referrers.doubted(MALLORY.author)


# --- nodes of the DHT -------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def networks(tmp_path_factory) -> AsyncIterator[dict[Identity, Libp2p]]:
    """A p2pd of each, in which nothing is left of one test when the next begins."""
    async with contextlib.AsyncExitStack() as stack:
        made = {}
        for who in (ALICE, BOB, MALLORY):
            made[who] = await stack.enter_async_context(transport(who, tmp_path_factory.mktemp(who.peer_id)))
        yield made


@contextlib.asynccontextmanager
async def joined(who, networks, *others):
    network = networks[who]
    for other in others:
        await network.connect(other.p2p.peer_id.to_bytes(), await other.addresses())
    directory = network.directory(directory_user(who))
    await directory.join([other.p2p.peer_id.to_bytes() for other in others])
    yield directory, network
    await directory.leave()
    for peer in await network.neighbours():
        await network.disconnect(peer)


@contextlib.asynccontextmanager
async def both(networks):
    """Alice, who joined by Bob, and Bob."""
    async with joined(BOB, networks) as (bob, at_bob), joined(ALICE, networks, at_bob) as (alice, _):
        yield alice, bob


@contextlib.asynccontextmanager
async def liar(networks, answer):
    """Mallory, nearer to the first key than anybody else, with this answer to everything."""
    network = networks[MALLORY]
    node = DHTProtocol(near(RUN.id), {}, answer)
    await node.add_p2p_handlers(network.p2p)
    yield node, network
    await node.remove_p2p_handlers(network.p2p)


async def found(directory):
    answers = []
    await directory.find(answers.append, alone=True)
    return answers


def owners(answers):
    """Whose records these answers have."""
    return {owner for answer in answers for owner in answer.addresses}


@on_one_loop
async def test_row_38_two_nodes_find_each_others_records_and_know_who_told(networks):
    async with both(networks) as (alice, bob):
        for settled in (False, True):
            await alice.publish(own(ALICE), settled=settled)
            await bob.publish(own(BOB), settled=settled)

        for directory, other in ((alice, BOB), (bob, ALICE)):
            told = {}
            for answer in await found(directory):
                told |= answer.addresses
            assert told[other.author] == own(other)
        assert BOB.author in {one.referrer for one in await found(alice)}


@on_one_loop
async def test_three_nodes_draw_as_many_bytes_as_three_simulated_ones(networks):
    """In a turn of `Swarm._record_loop`. Before, simulated answers named twenty nodes however few there were."""
    async with (
        joined(ALICE, networks) as (alice, at_alice),
        joined(BOB, networks, at_alice) as (bob, at_bob),
        joined(MALLORY, networks, at_alice, at_bob) as (carol, _),
    ):
        nodes = {ALICE: alice, BOB: bob, MALLORY: carol}
        drawn = []
        for _ in range(2):  # of the second each finds all records
            for who, node in nodes.items():
                await node.join([other.author for other in nodes if other != who])
                await node.publish(own(who), settled=False)
                await node.find(lambda answer: None, alone=False)
            drawn.append(sum(node._user.traffic.bytes_out for node in nodes.values()))

    few = Scenario(nodes=3, session_seconds=1e9)
    size = len(records.pack_answer([of(ALICE)]))
    simulated = await asyncio.to_thread(
        directory_figures,
        few,
        warmup=1.0,
        seconds=20.0,
        fresh=True,
        record_bytes=size,
    )
    expected = simulated["directory_bytes_out_per_node_s"] * 20 * 3
    assert drawn[1] - drawn[0] == pytest.approx(expected, rel=0.03)

    address = f"/ip4/11.22.33.44/udp/40001/quic-v1/p2p/{ALICE.peer_id}"
    long = of(ALICE, addresses=[address] * 4)
    values = (long.key, long.subkey, long.value, 1.0, False)
    fields = {name: [value] for name, value in zip(RECORD, values, strict=True)}
    stored = StoreRequest(**fields, peer=NodeInfo(node_id=bytes(20))).ByteSize()
    packed = len(records.pack_answer([long]))
    assert packed == pytest.approx(RECORD_BYTES, abs=12)
    assert stored - packed == pytest.approx(STORE_BYTES, abs=12)


@on_one_loop
async def test_who_asks_while_a_nodes_dht_begins_is_answered(networks, monkeypatch):
    add = GuardedDht.add_p2p_handlers
    told = []

    async def asked_early(bob, *about):
        await add(bob, *about)
        told.append(await dht.look_up(BOB.author, KEY))

    async with joined(ALICE, networks) as (alice, at_alice):
        dht = alice._dht
        monkeypatch.setattr(GuardedDht, "add_p2p_handlers", asked_early)
        async with joined(BOB, networks, at_alice):
            assert told == [(b"", [])]


async def test_who_knows_only_a_node_of_another_run_finds_its_own_run_through_the_dht(tmp_path):
    async with (
        member(1, tmp_path, run=OTHER_RUN) as outside,
        member(2, tmp_path, [outside.address]) as alice,
        member(3, tmp_path, [outside.address]) as bob,
    ):
        await eventually(lambda: alice.met(bob) and bob.met(alice), "the two of one run have met")
        assert not outside.swarm.membership.active_view, "and are strangers in the other run"
        for node in (alice, bob):
            assert outside.author not in node.swarm.membership.active_view


def test_row_38_records_of_other_runs_take_no_room_of_the_own_and_few_are_kept():
    shelf = filled(set())
    elsewhere = key_bytes(OTHER_RUN.id)
    other = of(BOB, run_id=OTHER_RUN.id)

    assert shelf.keep(other, BOB.author)

    assert shelf.records(elsewhere) == [other]
    assert len(shelf.records(KEY)) == MAX_RECORDS
    assert not shelf.keep(other, ALICE.author), "only its owner leaves it"
    assert BOB.author not in shelf.addresses(), "no peer of this run"

    more = [of(BOB, run_id=number.to_bytes(16, "big")) for number in range(9)]
    kept = [shelf.keep(one, BOB.author) for one in more]
    assert sum(kept) == len(DEPTHS) - 1

    for who in many(OTHERS_MAX):
        shelf.keep(of(who, run_id=OTHER_RUN.id), who.author)
    assert len(shelf._others) == OTHERS_MAX
    assert len(shelf.records(elsewhere)) == MAX_RECORDS


@pytest.mark.parametrize("count", [MAX_RECORDS, 2000])
@on_one_loop
async def test_row_38_beside_made_up_answers_a_node_publishes_and_finds_honest_ones(networks, count):
    made = (MADE_UP * 16)[:count]
    async with (
        liar(networks, pack(made)) as (mallory, at_mallory),
        joined(BOB, networks, at_mallory) as (bob, at_bob),
        joined(ALICE, networks, at_mallory, at_bob) as (alice, at_alice),
    ):
        await bob.publish(own(BOB), settled=False)
        await alice.publish(own(ALICE), settled=False)
        book = Membership(at_alice, ALICE, RunFile(run=RUN), Traffic()).addresses
        for answer in await found(alice):
            for addresses in answer.addresses.values():
                book.hear(addresses, answer.referrer)

        assert mallory.calls > 0, "it was asked"
        assert BOB.author in book.strangers()
        assert len(book.strangers()) <= 1 + PART_MAX
        dialled = 0
        for peer in book.strangers():
            dialled += len(book.to_dial(peer) or ())
        assert dialled <= 1 + DIALS_AT_ONCE
        assert ALICE.author in owners(await found(bob))


@on_one_loop
async def test_row_38_an_answer_names_few_nodes_and_a_peer_has_few_ids(networks):
    async with liar(networks, b"") as (mallory, at_mallory), joined(ALICE, networks, at_mallory) as (alice, _):
        dht = alice._dht
        for number in range(20):
            mallory.node = DHTID(number).to_bytes()
            _, named = await dht.look_up(MALLORY.author, KEY)
            assert len(named) == NEAREST_MAX
            await dht.call_ping(PeerID(MALLORY.author))
        assert len(dht.routing_table.uid_to_peer_id) <= 1 + NEW_IDS_AT_ONCE

        before = mallory.calls
        await alice._walk(KEY, lambda answer: False)
        assert mallory.calls - before <= OWN_NODES + NAMED_NODES


@on_one_loop
async def test_row_38_signatures_are_checked_in_another_thread(networks):
    threads = set()

    class Watched(OwnerSigned):
        def owner(self, record):
            threads.add(threading.get_ident())
            return super().owner(record)

    async with (
        liar(networks, records.pack_answer(MADE_UP)) as (_, at_mallory),
        joined(ALICE, networks, at_mallory) as (alice, _),
    ):
        alice._validator = Watched(ALICE, RUN.id)
        await found(alice)
    assert threads
    assert threading.get_ident() not in threads


def lies_at(directory, depth):
    """Whether a node has Alice's record under her key of this depth."""
    key = key_bytes(RUN.id, shard_of(ALICE.author, depth))
    lying = directory._shelf.records(key)
    return ALICE.author in map(VALIDATOR.owner, lying)


@on_one_loop
async def test_row_38_whatever_is_full_a_new_node_publishes_on_its_way(networks, monkeypatch):
    monkeypatch.setattr(dht_limits, "FULL_PART", 0.0)
    async with (
        liar(networks, b"") as (_, at_mallory),
        joined(BOB, networks, at_mallory) as (bob, at_bob),
        joined(ALICE, networks, at_mallory, at_bob) as (alice, _),
    ):
        fill(bob._shelf)
        fill(bob._shelf, made_up(RUN.id, shard_of(ALICE.author, 1), MAX_RECORDS))

        await alice.publish(own(ALICE), settled=False)

        for depth in (0, 1):
            assert lies_at(bob, depth), "under keys that are full too"
        assert alice._full >= {0, 1}


@on_one_loop
async def test_row_38_a_settled_node_goes_below_a_full_key(networks, monkeypatch):
    monkeypatch.setattr(dht_limits, "FULL_PART", 0.0)
    async with both(networks) as (alice, bob):
        for directory in (alice, bob):
            fill(directory._shelf)
        await alice.publish(own(ALICE), settled=True)
        assert alice._full == {0}
        assert lies_at(bob, 1)

        monkeypatch.setattr(dht_limits, "FULL_PART", 1.0)
        for directory in (alice, bob):
            directory._shelf._shelves.clear()
        await alice.publish(own(ALICE), settled=True)
        assert alice._full == set(), "it has seen that there is room again"
