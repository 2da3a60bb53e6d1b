"""Peers of one run meet, others part politely, and what strangers say about addresses is kept small and plain."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from ftis_node.config.run import run_file_from_json
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.address_book import DIALS_AT_ONCE, PART_MAX, PASSIVE_VIEW_MAX
from ftis_node.swarm.addresses import NetworkScope, parsed_peer
from ftis_node.swarm.handshake import PROTOCOL_MAJOR
from ftis_node.swarm.limits import OWN, Limits
from ftis_node.swarm.membership import ANCHORS, GIVE_UP_AFTER, INBOUND_MAX, VIEW_SIZE
from ftis_node.swarm.sessions import OBSERVERS_MAX, SESSIONS_MAX
from tests.support.alone import ELSEWHERE, LAN, LOOPBACK, Alone, address, at, greets, hears, hello, strangers
from tests.support.doors import node
from tests.support.swarm import OTHER_RUN, RUN, identity
from tests.support.talkers import ALICE, BOB, CAROL, MALLORY


@pytest.fixture
def alice() -> Alone:
    return Alone()


def identities(first, count):
    return [identity(number) for number in range(first, first + count)]


def crowd(alice, first, count, **changes):
    """So many peers shake hands with her, one after the other."""
    for who in identities(first, count):
        greets(alice, who, **changes)
        assert who.author in alice.active_view or changes.get("run_id")


def test_who_greets_again_keeps_its_turn_and_who_may_renew_a_certificate_is_greeted_again(alice):
    for who in (BOB, CAROL, BOB):
        greets(alice, who)
    assert alice.sessions[CAROL.author].asked >= alice.sessions[BOB.author].asked > 0
    for peer in alice.active_view.values():
        peer.told = frozenset(alice.own_addresses)
    assert alice.outdated() == []
    alice.roster = SimpleNamespace(due_at=lambda peer: peer == BOB.author)
    assert alice.outdated() == [BOB.author], "it may renew the certificate now"


def named(who, to):
    """The addresses of others that a node tells a peer."""
    answer = ftis_pb2.ExchangeResponse()
    who.introduce(answer, 8, to)
    return list(answer.peers)


# --- meeting ----------------------------------------------------------------------------------------------------------


async def test_two_nodes_of_a_run_meet_and_each_learns_where_the_other_is(tmp_path):
    async with node(ALICE, tmp_path) as (alice, _), node(BOB, tmp_path) as (bob, network):
        alice.addresses.hear(await network.addresses())
        assert strangers(alice) == [BOB.author]
        assert await alice.greet(BOB.author)
        assert strangers(alice) == []
        for one, other, who in ((alice, bob, BOB), (bob, alice, ALICE)):
            assert list(one.active_view) == [who.author]
            assert one.active_view[who.author].addresses == await other.refresh_addresses()
            assert one.active_view[who.author].agent.startswith("ftis-node/")


@pytest.mark.virtual_time
async def test_nodes_of_different_runs_part_politely_and_both_know_why(tmp_path):
    async with node(ALICE, tmp_path) as (alice, _), node(BOB, tmp_path, OTHER_RUN) as (bob, network):
        alice.addresses.hear(await network.addresses())
        assert not await alice.greet(BOB.author)
        assert not alice.active_view
        assert not bob.active_view
        assert OTHER_RUN.id.hex() in alice.refused[BOB.author]
        assert RUN.id.hex() in alice.refused[BOB.author]
        assert RUN.id.hex() in bob.refused[ALICE.author]
        assert strangers(alice) == [], "it is not asked again and again"


@pytest.mark.parametrize(
    ("major", "todo", "told"),
    [
        (PROTOCOL_MAJOR - 1, "its owner has to upgrade", ": upgrade ftis-node"),
        (PROTOCOL_MAJOR + 1, "upgrade ftis-node here", ""),
    ],
)
async def test_nodes_of_different_major_versions_part_politely_until_one_has_upgraded(alice, major, todo, told):
    alice.network.answers[BOB.author] = hello(BOB, major=major)
    assert not await alice.greet(BOB.author)
    assert f"it speaks protocol {major}, this node speaks {PROTOCOL_MAJOR}: {todo}" in alice.refused[BOB.author]
    assert alice.majors == {BOB.author: major}
    answer = greets(alice, CAROL, major=major)
    assert answer.refusal == f"this node speaks protocol {PROTOCOL_MAJOR}, you speak {major}{told}"
    assert not answer.run_file
    assert not answer.peers
    assert not alice.active_view
    assert alice.majors[CAROL.author] == major
    for who in (BOB, CAROL):
        greets(alice, who)
        assert who.author in alice.active_view
    assert not alice.refused
    assert not alice.majors


async def test_a_peer_that_is_not_there_is_forgotten_after_three_greetings():
    alice = Alone(host="127.0.0.1")
    hears(alice, MALLORY, at(LOOPBACK))
    for _ in range(GIVE_UP_AFTER):
        assert strangers(alice) or alice.addresses.patience() < math.inf, "it is going to be greeted"
        assert not await alice.greet(BOB.author)
    assert not strangers(alice)
    assert alice.addresses.patience() == math.inf
    assert alice.addresses.hear([address(BOB)]), "somebody mentions it again"


def test_a_later_minor_version_and_unknown_fields_do_no_harm(alice):
    later = ftis_pb2.Handshake.FromString(hello(BOB, minor=9).SerializeToString() + b"\x9a\x06\x03new")
    assert not alice.on_handshake(later, BOB.author).refusal
    assert BOB.author in alice.active_view


def test_a_peer_that_has_no_run_is_given_ours_and_one_of_another_run_let_in_when_it_is_in_ours(alice):
    answer = greets(alice, BOB, run_id=b"")
    assert run_file_from_json(answer.run_file).run == RUN
    assert not alice.active_view
    assert not alice.refused
    greets(alice, BOB, run_id=OTHER_RUN.id)
    assert alice.refused
    assert not alice.active_view
    greets(alice, BOB)
    assert alice.active_view
    assert not alice.refused


def test_a_peer_of_another_run_is_not_greeted_again_soon_since_it_is_named_again(alice, clock):
    book = alice.addresses
    book.clock = clock
    book.hear([address(BOB)])
    book.refused(BOB.author)
    book.hear([address(BOB)])
    clock.now += 30
    assert book.strangers() == [BOB.author], "a node without peers asks those, too"
    crowd(alice, 100, 1)
    book.refused(BOB.author)
    book.hear([address(BOB)])
    clock.now += 170
    assert book.strangers() == []
    clock.now += 100
    assert book.strangers() == [BOB.author]


# --- the view ---------------------------------------------------------------------------------------------------------


async def found(alice, first, count, network="10.0.0"):
    """So many peers are greeted, one after the other, and enter the view."""
    authors = []
    for number, who in enumerate(identities(first, count)):
        place = at(f"/ip4/{network}.{number % 250}", who)
        alice.network.answers[who.author] = hello(who, addresses=[place])
        assert await alice.greet(who.author)
        assert who.author in alice.active_view
        authors.append(who.author)
    return authors


async def test_the_view_is_bounded_and_the_newest_is_in_it(alice):
    crowd(alice, 100, VIEW_SIZE + 30)
    assert len(alice.active_view) == INBOUND_MAX
    await found(alice, 500, VIEW_SIZE)
    assert len(alice.active_view) == VIEW_SIZE


async def test_row_16_who_comes_by_itself_pushes_nobody_out_whom_this_node_has_found(alice):
    honest = await found(alice, 100, VIEW_SIZE - INBOUND_MAX)
    crowd(alice, 1000, 300)
    assert len(alice.active_view) == VIEW_SIZE
    assert set(honest) <= set(alice.active_view)


async def test_row_16_peers_that_were_found_in_networks_of_their_own_stay(alice):
    honest = []
    for number in range(30):
        honest += await found(alice, 100 + number, 1, f"198.51.{number}")
    await found(alice, 1000, 500, "203.0.113")
    assert set(honest) <= set(alice.active_view)


async def test_row_16_the_first_that_were_found_stay(alice):
    first = await found(alice, 100, ANCHORS)
    await found(alice, 1000, 500)
    assert set(first) <= set(alice.active_view)


def test_row_16_what_one_peer_tells_does_not_push_out_what_others_told(alice):
    others = identities(100, 50)
    alice.addresses.hear(list(map(address, others)))
    hears(alice, MALLORY, *map(address, identities(1000, PASSIVE_VIEW_MAX)))
    found = strangers(alice)
    assert len(found) == 50 + PART_MAX
    assert {who.author for who in others} <= set(found)


@pytest.mark.parametrize("place", [*ELSEWHERE, *(f"{at(place, CAROL)}/p2p-circuit" for place in ELSEWHERE)])
async def test_row_16_nobody_can_make_a_public_node_dial_into_its_own_network(place):
    """Neither by naming others there, nor by saying that it is there itself, nor in the cache of the last start."""
    alice = Alone()
    told = place + f"/p2p/{BOB.peer_id}" if "p2p-circuit" in place else at(place)
    assert not hears(alice, MALLORY, told)
    assert not strangers(alice)
    greets(alice, BOB, addresses=[told])
    assert await alice.dials(BOB.author) == []
    assert named(alice, CAROL.author) == [told], "others may be at home there"


@pytest.mark.parametrize(
    ("own", "taken"),
    [
        ({"host": "192.168.7.7"}, (LAN,)),
        ({"host": "127.0.0.1"}, (LAN, LOOPBACK)),
        ({"announce": ("/ip4/10.0.0.1/tcp/4001",)}, (LAN,)),
        ({"announce": ("/ip4/8.8.4.4/tcp/4001",)}, ()),
        ({"peers": (at("/ip4/10.0.0.1"),)}, (LAN,)),
        ({"peers": (at(LOOPBACK),)}, (LAN, LOOPBACK)),
        ({"peers": (at("/dns4/boot.example"),)}, ()),
        ({"announce": ("/ip6/64:ff9b::7f00:1/tcp/4001",)}, (LAN, LOOPBACK)),
    ],
)
async def test_who_is_at_home_in_a_network_dials_whom_others_name(own, taken):
    peers = own.pop("peers", ())
    alice = Alone(**own)
    alice.addresses.trust(peers)
    alice.addresses.hear(peers)
    assert await alice.dials(BOB.author) == list(peers)
    for place, who in ((LAN, CAROL), (LOOPBACK, identity(5))):
        assert hears(alice, MALLORY, at(place, who)) is (place in taken)


async def test_row_73_a_node_is_at_home_where_a_host_that_its_owner_named_leads(tmp_path, monkeypatch):
    async def elsewhere(*_, **__):
        return [(2, 1, 6, "", ("8.8.4.4", 0))]

    async with node(ALICE, tmp_path) as (alice, _), node(BOB, tmp_path) as (_, network):
        alice.addresses.scope = NetworkScope("0.0.0.0")
        await network.connect(ALICE.author, alice.own_addresses)
        assert await alice.greet(BOB.author)
        assert not hears(alice, MALLORY, at(LOOPBACK, CAROL)), "that somebody has come says nothing"
        alice.addresses.trust([f"/dns4/localhost/tcp/4001/p2p/{BOB.peer_id}"])
        assert not hears(alice, MALLORY, at(LOOPBACK, CAROL)), "and a name neither"
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "getaddrinfo", elsewhere)
            assert await alice.greet(BOB.author)
        assert not hears(alice, MALLORY, at(LOOPBACK, CAROL)), "Bob came through a proxy"
        assert await alice.greet(BOB.author)
        assert hears(alice, MALLORY, at(LOOPBACK, CAROL))


def test_row_75_free_keys_that_come_by_themselves_push_no_named_peer_out(alice):
    def are_known(peers):
        return all(who.author in alice.addresses for who in peers)

    owned = identities(20, 4)
    alice.addresses.hear(alice.addresses.trust(list(map(address, owned))))
    named = identities(100, 120)
    for number, who in enumerate(named):
        hears(alice, identity(number % 8), address(who))
    crowd(alice, 1000, 800)
    assert are_known(named), "these have one referrer's part"
    came = list(alice.active_view)
    for number, who in enumerate(identities(10_000, 1000)):
        alice.addresses.hear([address(who)], came[number % 30])
    assert are_known(named), "nor do the peers that such keys make up"
    for number, who in enumerate(identities(5000, 1000)):
        hears(alice, identity(number % 50), address(who))
    assert are_known(owned), "the owner's are never drawn"


def test_row_75_why_a_friend_is_not_dialled_stays_whatever_another_peer_names(alice):
    hears(alice, CAROL, at(LAN))
    for who in identities(100, 300):
        hears(alice, MALLORY, at(LAN, who))
    assert "is not dialled" in alice.addresses.skipped()[BOB.author]
    for number, teller in enumerate(identities(100, PASSIVE_VIEW_MAX)):
        first = PART_MAX * (100 + number)
        for port in range(first, first + PART_MAX):
            hears(alice, teller, at(LAN, CAROL, port))
    parsed = parsed_peer.cache_info().misses
    assert CAROL.author in alice.addresses.skipped()
    assert parsed_peer.cache_info().misses == parsed, "thousands of addresses are not parsed anew at each look"


@pytest.fixture
def frugal(monkeypatch) -> Alone:
    """Her budgets of dials do not grow meanwhile."""
    monkeypatch.setattr("ftis_node.swarm.address_book.boot_seconds", lambda: 0.0)
    return Alone()


async def test_row_16_of_what_one_peer_names_only_so_much_is_dialled(frugal):
    named = identities(100, 50)
    for who in named:
        hears(frugal, MALLORY, address(who, 1), address(who, 2))
    hears(frugal, CAROL, address(BOB))
    for peer in strangers(frugal):
        assert not await frugal.greet(peer)
    dialled = frugal.network.dialled
    assert all(dialled.values()), "for the rest p2pd is not asked"
    assert sum(map(len, dialled.values())) == DIALS_AT_ONCE + 1
    assert dialled[BOB.author] == [address(BOB)]
    left = next(who for who in named if who.author not in dialled)
    frugal.addresses.hear([address(left)])
    assert await frugal.dials(left.author) == [address(left)], "the DHT and this node's owner name it too"


def test_row_78_dials_of_members_that_nobody_met_count_against_who_passed_their_word_on(frugal):
    dialled = 0
    for who in identities(100, 50):
        frugal.addresses.hear([address(who)], who.author, MALLORY.author)
        dialled += len(frugal.addresses.to_dial(who.author) or ())
    assert dialled == DIALS_AT_ONCE


def test_peers_of_other_runs_do_not_fill_the_memory(alice):
    crowd(alice, 100, PASSIVE_VIEW_MAX + 50, run_id=OTHER_RUN.id)
    assert len(alice.refused) == PASSIVE_VIEW_MAX
    assert not alice.sessions
    assert not strangers(alice)


def fails(alice, times):
    for _ in range(times):
        alice.failed(BOB.author)


def test_three_failures_in_a_row_drop_a_peer_that_is_long_silent(alice, monkeypatch):
    greets(alice, BOB)
    fails(alice, GIVE_UP_AFTER)
    assert BOB.author in alice.active_view, "its p2pd may just be starting again"
    monkeypatch.setattr("ftis_node.swarm.membership.GIVE_UP_SECONDS", 0.0)
    for _ in range(3):
        alice.answered(BOB.author)
        fails(alice, GIVE_UP_AFTER - 1)
    assert BOB.author in alice.active_view
    alice.failed(BOB.author)
    assert BOB.author not in alice.active_view
    alice.failed(BOB.author)
    alice.answered(CAROL.author)
    assert strangers(alice) == [BOB.author], "it may come back"


def test_a_peer_that_moved_is_known_at_its_new_address_only(alice):
    alice.addresses.hear([address(BOB, 1)])
    greets(alice, BOB, addresses=[address(BOB, 2)])
    greets(alice, BOB, addresses=[address(BOB, 3)])
    assert alice.active_view[BOB.author].addresses == [address(BOB, 3)]
    assert named(alice, CAROL.author) == [address(BOB, 3)]
    assert named(alice, BOB.author) == [], "it knows that itself"


@pytest.mark.parametrize(
    "said",
    [
        address(CAROL),
        BOB.peer_id,
        f"\x1b[2J{BOB.peer_id}",
        f"/ip4/192.0.2.7{'/tcp/1' * 100}/p2p/{BOB.peer_id}",
        "x" * 100_000,
    ],
)
def test_what_a_peer_says_of_itself_must_be_its_address(alice, said):
    greets(alice, BOB, addresses=[said, address(BOB)])
    assert alice.active_view[BOB.author].addresses == [address(BOB)]


def test_a_peers_words_are_short_and_nothing_that_a_terminal_obeys(alice):
    greets(alice, BOB, agent="\x1b[2Jnice\nname" + "x" * 9999)
    agent = alice.active_view[BOB.author].agent
    assert agent.startswith("?[2Jnice?name")
    assert agent.isprintable()
    assert len(agent) <= 64


# --- who may ask, and how much ----------------------------------------------------------------------------------------


async def test_row_16_ten_thousand_identities_end_no_session_of_the_view_and_the_latest_may_ask(alice):
    honest = await found(alice, 100, VIEW_SIZE - INBOUND_MAX)
    sessions = {peer: alice.sessions[peer] for peer in honest}
    keys = [number.to_bytes(38, "big") for number in range(10_000)]
    for number, key in enumerate(keys):
        alice.on_handshake(hello(MALLORY, addresses=[], observer=number % 2 == 1), key)
    for peer, session in sessions.items():
        assert alice.sessions[peer] is session
    assert len(alice.sessions) == SESSIONS_MAX + OBSERVERS_MAX
    assert alice.limits(CAROL.author) is None
    for peer in (*alice.active_view, *keys[-2:]):
        assert alice.limits(peer)


def test_who_turns_out_to_be_in_another_run_may_ask_no_more(alice):
    greets(alice, BOB)
    answer = greets(alice, BOB, run_id=OTHER_RUN.id, tokenizer=b"x" * 32)
    assert alice.limits(BOB.author) is None
    assert BOB.author not in alice.active_view
    assert answer.refusal.endswith(", which has another tokenizer")
    answer = greets(alice, BOB, run_id=OTHER_RUN.id, tokenizer=bytes.fromhex(RUN.tokenizer))
    assert answer.refusal.endswith(OTHER_RUN.id.hex())


def test_a_message_holds_what_both_take(alice):
    assert greets(alice, BOB, limits=ftis_pb2.Limits(entries=4, mentions=2**32 - 1)).limits == OWN.message()
    assert alice.limits(BOB.author) == Limits(4, OWN.mentions, OWN.digests)


# --- what is heard ----------------------------------------------------------------------------------------------------


def test_an_address_heard_for_the_first_time_is_news(alice):
    assert alice.addresses.hear([address(BOB)])
    assert not alice.addresses.hear([address(BOB), address(BOB, 2)])
    assert not alice.addresses.hear([address(ALICE)]), "that is this node itself"
    assert strangers(alice) == [BOB.author]


def test_addresses_without_number_are_kept_to_a_bound(alice):
    for who in identities(2, 2 * PASSIVE_VIEW_MAX):
        alice.addresses.hear([address(who)])
    assert len(strangers(alice)) == PASSIVE_VIEW_MAX
