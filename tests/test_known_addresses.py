"""Which addresses a node dials, and which it remembers for its next start."""

import json

import pytest

from ftis_node.swarm.handshake import PROTOCOL_MAJOR
from ftis_node.swarm.known_addresses import MET_MAX
from ftis_node.swarm.sessions import LOOKS_ON
from tests.support.alone import ELSEWHERE, LAN, LOOPBACK, Alone, address, at, greets, hears
from tests.support.swarm import OTHER_RUN, identity
from tests.support.talkers import BOB, CAROL, MALLORY


def next_start(path):
    """Alice with the cache of earlier starts; her owner names nobody."""
    alice = Alone(cache=path / "peers.json")
    named = alice.addresses.trust([])
    alice.addresses.recall()
    alice.addresses.hear(named)
    return alice


def kept(path):
    return json.loads((path / "peers.json").read_text())


def test_the_next_start_hears_of_the_peers_of_this_one_and_of_earlier_ones(tmp_path):
    cache = tmp_path / "peers.json"
    first = Alone(cache=cache)
    first.save_cache()
    assert not cache.exists(), "an empty view must not overwrite what was known"
    for peer in (BOB, CAROL):
        greets(first, peer)
    first.save_cache()
    second = Alone(cache=cache)
    greets(second, CAROL, addresses=[address(CAROL, 7)])
    second.save_cache()
    third = next_start(tmp_path)
    assert set(third.addresses.strangers()) == {BOB.author, CAROL.author}, "a smaller view forgets nobody"
    assert set(kept(tmp_path)["met"]) == {address(CAROL, 7), address(BOB)}, "no older one of a peer"
    for number in range(100, 300):
        greets(third, identity(number))
        third.save_cache()
        third.active_view.pop(identity(number).author)
    met = kept(tmp_path)["met"]
    assert len(met) <= MET_MAX
    assert {address(CAROL, 7), address(BOB)} <= set(met), "who comes by pushes nobody out"


@pytest.mark.parametrize("place", [LAN, LOOPBACK, "/ip4/10.1.2.3"])
async def test_what_the_owner_named_once_is_dialled_again_by_the_command_without_it(tmp_path, place):
    first = Alone(cache=tmp_path / "peers.json")
    assert first.addresses.trust([at(place)]) == [at(place)]
    greets(first, BOB, addresses=[at(place)])
    greets(first, CAROL, addresses=[at(place, CAROL)])
    first.save_cache()
    second = next_start(tmp_path)
    for peer in (BOB, CAROL):
        dialled = await second.dials(peer.author)
        assert dialled == [at(place, peer)]


async def test_row_43_what_strangers_claim_makes_no_node_at_home_in_a_private_network_next_time(tmp_path):
    first = Alone(cache=tmp_path / "peers.json", host="192.168.7.7")
    greets(first, BOB, addresses=[at(LAN)])
    first.save_cache()
    second = next_start(tmp_path)
    assert await second.dials(BOB.author) == []
    assert not hears(second, MALLORY, at(LAN, CAROL))
    second.addresses.trust([at(LAN, CAROL)])
    assert await second.dials(BOB.author) == [at(LAN)], "its owner says again that it is there"


async def test_row_62_what_mdns_named_is_dialled_exactly_and_not_in_the_next_starts_network(tmp_path):
    first = Alone(cache=tmp_path / "peers.json")
    first.addresses.hear_on_lan([at(LAN)])
    assert await first.dials(BOB.author) == [at(LAN)]
    assert not hears(first, MALLORY, at(LAN, CAROL), at(LAN, BOB, 4002))
    greets(first, BOB, addresses=[at(LAN)])
    first.save_cache()
    assert await next_start(tmp_path).dials(BOB.author) == []


FORBIDDEN = (
    "/ip4/169.254.169.254",
    "/ip6/fe80::1",
    "/ip4/224.0.0.251",
    "/ip4/255.255.255.255",
    "/ip4/0.0.0.0",
    "/ip6/::",
    "/ip6/::ffff:169.254.169.254",
    "/ip6/64:ff9b::a9fe:a9fe",
    "/ip6/2002:a9fe:a9fe::1",
    "/ip4/127.1",
    "/unix/x",
    "/dnsaddr/node.example",
    "/ip4/192.168.1.7/tcp/22/ip4/192.168.1.7",
    "/ip6/64:ff9b:1::a9fe:a9fe",
)


@pytest.mark.parametrize("place", [LAN, LOOPBACK, "/ip4/8.8.4.4", "/dns4/vault.corp.internal", "/ip6/::ffff:10.0.0.1"])
async def test_row_62_what_an_owner_was_given_is_dialled_exactly_and_widens_nothing(tmp_path, place):
    """Of an invitation or a run file, at once and at the next start; a peer's words and claims lead nowhere inside."""
    for words in ([at(place)], []):
        alice = Alone(cache=tmp_path / "peers.json", host="0.0.0.0")
        alice.addresses.hear(alice.addresses.trust([], words))
        assert await alice.dials(BOB.author) == [at(place)]
        inside = [at(other, who) for other in (*ELSEWHERE, *FORBIDDEN) for who in (CAROL, BOB)]
        hears(alice, MALLORY, *inside)
        for port in (22, 443, 4002):
            hears(alice, MALLORY, at(place, BOB, port))
        greets(alice, CAROL, addresses=inside)
        bobs = await alice.dials(BOB.author)
        assert at(place) in bobs
        for text in (*bobs, *await alice.dials(CAROL.author)):
            assert text == at(place) or "8.8.4.4" in text
        alice.save_cache()


@pytest.mark.parametrize("place", FORBIDDEN)
async def test_row_62_nobody_but_the_owner_names_what_is_of_the_link_or_of_no_host(place):
    alice = Alone()  # at home on loopback, thus everywhere
    alice.addresses.hear(alice.addresses.trust([], [at(place)]))
    hears(alice, MALLORY, at(place))
    assert await alice.dials(BOB.author) == []


async def test_an_address_that_is_not_dialled_is_told_once_and_why(caplog):
    caplog.set_level("INFO", "ftis_node.swarm.address_book")
    alice = Alone()
    greets(alice, BOB, addresses=[at(LAN), address(BOB)])
    for _ in range(2):
        hears(alice, MALLORY, at(LAN), at("/dns4/node.example"))
        await alice.greet(BOB.author)
    lan, name = (one.getMessage() for one in caplog.records if one.name.endswith("address_book"))
    for word in (at(LAN), "outside the networks", "--peers"):
        assert word in lan
    for word in (at("/dns4/node.example"), "owner"):
        assert word in name


def test_a_peer_that_was_named_and_is_of_another_run_is_not_kept_and_one_of_another_version_is(tmp_path):
    alice = Alone(cache=tmp_path / "peers.json")
    alice.addresses.trust([address(BOB), address(CAROL), address(MALLORY)])
    alice._refuse(MALLORY.author, LOOKS_ON)
    greets(alice, BOB, run_id=OTHER_RUN.id)
    greets(alice, CAROL, major=PROTOCOL_MAJOR + 1)
    alice.save_cache()
    assert kept(tmp_path)["peers"] == [address(CAROL), address(MALLORY)]


@pytest.mark.parametrize(
    "content", ["", "{", "5", "null", "{}", '[5, null, ["x"], "rubbish"]', "\udcff", '["rubbish"]']
)
def test_a_damaged_cache_is_as_none(tmp_path, content):
    (tmp_path / "peers.json").write_bytes(content.encode(errors="surrogateescape"))
    assert next_start(tmp_path).addresses.strangers() == []


def test_the_cache_holds_two_addresses_a_peer(tmp_path):
    alice = Alone(cache=tmp_path / "peers.json")
    greets(alice, BOB, addresses=[address(BOB, port) for port in range(1, 20)])
    alice.save_cache()
    assert kept(tmp_path)["met"] == [address(BOB, 1), address(BOB, 2)]
