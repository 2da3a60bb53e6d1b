"""The DHT keeps small, short-lived hints that their owner signed, and nothing else; nothing that it is sent hurts."""

import asyncio
import time
from dataclasses import astuple, replace

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.serializer import MSGPackSerializer

from ftis_node.swarm.signed import Malformed
from ftis_node.swarm.wire import dht_guard
from ftis_node.swarm.wire import records as subject
from ftis_node.swarm.wire.dht_guard import CALLS_AT_ONCE, NEW_IDS_AT_ONCE
from ftis_node.swarm.wire.records import OwnerSigned, key_bytes, pack_addresses, unpack_addresses
from tests.support.swarm import OTHER_RUN, PATIENCE, RUN, directory_user, identity, store_request, transport

ALICE = identity(1)
BOB = identity(2)
ADDRESSES = [f"/ip4/192.0.2.7/tcp/4001/p2p/{ALICE.peer_id}"]
PACKED = MSGPackSerializer.dumps(pack_addresses(ADDRESSES))
VALIDATOR = OwnerSigned(BOB, RUN.id)


def record(who=ALICE, value=PACKED, run_id=RUN.id, lifetime=60):
    unsigned = DHTRecord(
        key=key_bytes(run_id),
        subkey=MSGPackSerializer.dumps(who.peer_id),
        value=value,
        expiration_time=time.time() + lifetime,
    )
    return replace(unsigned, value=OwnerSigned(who, run_id).sign_value(unsigned))


def bomb(depth):
    """A DHT value nested as deep as told; some 200 levels would end a process that decodes it as hivemind does."""
    data = msgpack.packb([])
    for _ in range(depth):
        data = msgpack.packb([msgpack.ExtType(0x40, data)])
    return data


def test_a_record_that_its_owner_signed_is_accepted_by_anyone():
    assert VALIDATOR.owner(record()) == ALICE.author
    assert record().value[:-64] == PACKED, "as older versions wrote it"


def altered(place):
    """A record of whose value one byte is another."""
    made = record()
    value = bytearray(made.value)
    value[place] ^= 1
    return replace(made, value=bytes(value))


# Made when the test runs: a minute after they are signed they would be refused for their age.
REFUSED = {
    "of another run": lambda: record(run_id=OTHER_RUN.id),
    "under somebody else's name": lambda: replace(record(), subkey=MSGPackSerializer.dumps(BOB.peer_id)),
    "without a name": lambda: replace(record(), subkey=MSGPackSerializer.dumps(None)),
    "under a name as bytes": lambda: replace(record(), subkey=msgpack.packb(ALICE.author)),
    "with an altered value": lambda: altered(0),
    "with an altered signature": lambda: altered(-1),
    "with a prolonged life": lambda: replace(made := record(), expiration_time=made.expiration_time + 60),
    "too large": lambda: record(value=bytes(subject.MAX_VALUE_BYTES)),
    "too long-lived": lambda: record(lifetime=subject.MAX_LIFETIME + 10),
    "long dead": lambda: record(lifetime=-70),
    "without a time": lambda: replace(record(), expiration_time=float("nan")),
    "for ever": lambda: replace(record(), expiration_time=float("inf")),
    "without a signature": lambda: replace(record(), value=b""),
    "signed for another run": lambda: replace(record(run_id=OTHER_RUN.id), key=record().key),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED.keys())
def test_any_other_record_is_refused(refused):
    assert VALIDATOR.owner(refused()) is None


def test_addresses_come_back_up_to_a_bound():
    assert unpack_addresses(pack_addresses(ADDRESSES)) == ADDRESSES

    packed = pack_addresses(ADDRESSES * 20)
    assert len(unpack_addresses(packed)) == subject.MAX_ADDRESSES


def test_strange_things_in_a_list_of_addresses_are_left_out():
    strange = msgpack.packb([1, None, b"x", "good"])
    assert unpack_addresses(strange) == ["good"]

    with pytest.raises(Malformed):
        unpack_addresses(msgpack.packb(["x"] * (subject.MAX_ADDRESSES + 1)))


@pytest.mark.parametrize(
    "inner",
    [
        bomb(3),
        bomb(200),
        b"\xdd" + (900).to_bytes(4, "big") + bytes(900),
        b"\xc1",
        b"",
    ],
)
def test_a_signed_value_that_is_no_address_list_is_read_as_none(inner):
    hostile = record(value=inner[: subject.MAX_VALUE_BYTES - 64])
    assert VALIDATOR.owner(hostile) == ALICE.author
    assert VALIDATOR.addresses(hostile, ALICE.author) == []
    assert VALIDATOR.addresses(record(), ALICE.author) == ADDRESSES


def test_addresses_of_others_and_those_that_are_too_long_are_left_out():
    longest = f"/dns4/{'y.' * 91}de/tcp/4001/p2p/{ALICE.peer_id}"
    others = f"/ip4/192.0.2.1/tcp/1/p2p/{BOB.peer_id}"
    too_long = longest.replace("de", "org")
    assert len(longest) == 256

    mixed = record(value=msgpack.packb(pack_addresses([too_long, others, longest])))

    assert VALIDATOR.owner(mixed) == ALICE.author
    assert VALIDATOR.addresses(mixed, ALICE.author) == [longest]


# --- two DHT nodes ----------------------------------------------------------------------------------------------------


async def test_an_address_record_is_found_by_another_node_and_attacks_leave_it_alone(tmp_path, monkeypatch):
    async with transport(ALICE, tmp_path / "a") as at_alice, transport(BOB, tmp_path / "b") as at_bob:
        alice = at_alice.directory(directory_user(ALICE))
        bob = at_bob.directory(directory_user(BOB))
        await at_bob.connect(ALICE.author, await at_alice.addresses())
        await alice.join([])
        await bob.join([ALICE.author])
        await alice.publish(ADDRESSES, settled=False)
        assert alice._dht is not None
        assert bob._dht is not None
        asking = bob._dht.get_stub(PeerID(ALICE.author))

        async def store(*records):
            request = store_request(*map(astuple, records))
            answer = await asyncio.wait_for(asking.rpc_store(request), PATIENCE)
            return list(answer.store_ok)

        async def ping(told):
            await asyncio.wait_for(asking.rpc_ping(dht_pb2.PingRequest(peer=told)), PATIENCE)

        immortal = record(BOB, lifetime=10**6)
        foreign = record(ALICE, run_id=OTHER_RUN.id)
        assert await store(record(ALICE), immortal, foreign) == [False] * 3
        # "a whole dictionary", which hivemind decodes before anybody validates it
        assert await store(replace(record(BOB), subkey=b"", value=bomb(200))) == [False]
        assert await store(replace(record(BOB), value=bomb(200))) == [False]
        for keys in ([b""] * 1000, [b"\xff" * 1000], [bytes(20)] * 2):
            with pytest.raises(Exception, match="at most 1 keys"):
                await asyncio.wait_for(asking.rpc_find(dht_pb2.FindRequest(keys=keys)), PATIENCE)

        for number in range(50):
            await ping(dht_pb2.NodeInfo(node_id=number.to_bytes(20, "big")))
        await ping(dht_pb2.NodeInfo(node_id=bytes(99)))
        assert len(alice._dht.routing_table.uid_to_peer_id) <= 1 + NEW_IDS_AT_ONCE

        failed = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failed.append(what))
        by = P2PContext("DHTProtocol.rpc_find", at_alice.p2p.peer_id, PeerID(identity(998).author))
        for _ in range(int(CALLS_AT_ONCE)):  # each counts once, though hivemind pings itself within
            await alice._dht.rpc_find(dht_pb2.FindRequest(keys=[bytes(20)]), by)
        await asyncio.sleep(0.1)
        assert not failed

        found = []
        await bob.find(found.append, alone=False)
        known = {}
        for one in found:
            known.update(one.addresses)
        assert known == {ALICE.author: ADDRESSES}

        pings = [asking.rpc_ping(dht_pb2.PingRequest()) for _ in range(2 * int(CALLS_AT_ONCE))]
        answers = await asyncio.wait_for(asyncio.gather(*pings, return_exceptions=True), PATIENCE)
        assert any("DHT calls a second" in str(answer) for answer in answers)

        table = alice._dht.routing_table
        spoof = PeerID(identity(999).author)
        monkeypatch.setattr(dht_guard, "NODES_MAX", 64)
        of_bob = table[PeerID(BOB.author)]
        assert not alice._dht._believes(spoof.to_bytes(), of_bob.to_bytes()), "it is another's"
        for number in range(200):
            await alice._dht.update_routing_table(DHTID.generate(), PeerID(identity(number % 150).author))
            assert len(table.uid_to_peer_id) == len(table.peer_id_to_uid) <= 64
        assert PeerID(BOB.author) in table
        await bob.leave()
        await alice.leave()
