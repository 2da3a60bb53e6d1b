"""Peers of one run meet, others part politely, and what strangers say about addresses is kept small and plain."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.config.run import Hints, Run, RunFile, run_file_from_json
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.addresses import Whereabouts
from ftis_node.swarm.budgets import Budgets
from ftis_node.swarm.handshake import PROTOCOL_MAJOR, PROTOCOL_MINOR
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.limits import OWN, Limits
from ftis_node.swarm.membership import (
    ANCHORS,
    DIALS_AT_ONCE,
    GIVE_UP_AFTER,
    HEARD_SIZE,
    INBOUND_MAX,
    MET_SIZE,
    TELLER_PART,
    VIEW_SIZE,
    Membership,
)
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.service import FtisSwarm
from ftis_node.swarm.wire.transport import Listening
from tests.helpers_swarm import (
    OTHER_RUN,
    RUN,
    Answers,
    event_loop_policy,  # noqa: F401 - a fixture
    identity,
    stub,
    transport,
)

ALICE, BOB, CAROL, MALLORY = (identity(number) for number in range(1, 5))


class Door(Answers):
    """Answers handshakes as a node does, in another major version if told so."""

    def __init__(self, membership: Membership, major: int) -> None:
        self.membership, self.major = membership, major

    def admits(self, peer: bytes) -> bool:
        return True

    def knows(self, peer: bytes) -> bool:
        return True

    async def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake:
        answer = self.membership.on_handshake(request, peer)
        answer.major = self.major
        return answer


@contextlib.asynccontextmanager
async def node(
    who: Identity, path: Path, run: Run = RUN, major: int = PROTOCOL_MAJOR
) -> AsyncIterator[tuple[Membership, Libp2p]]:
    async with transport(who, path / who.peer_id) as network:
        run_file = RunFile(run=run, hints=Hints(name=f"the run of {who.peer_id}"))
        membership = Membership(network, who, run_file, Traffic(), path / f"{who.peer_id}.json")
        await membership.refresh_addresses()
        await FtisSwarm(Door(membership, major)).add_p2p_handlers(network.p2p)
        yield membership, network


def alone(who: Identity = ALICE, cache: Path | None = None, **listening: Any) -> Membership:
    """A membership that never gets as far as its transport."""
    transport = Libp2p(Listening(Path(), Path(), **listening))
    transport.up = True
    return Membership(transport, who, RunFile(run=RUN), Traffic(), cache)


def address(who: Identity, port: int = 1) -> str:
    return f"/ip4/8.8.4.4/tcp/{4000 + port % 60000}/p2p/{who.peer_id}"


LAN, LOOPBACK = "/ip4/192.168.1.7", "/ip4/127.0.0.1"


def at(place: str, who: Identity = BOB, port: int = 4001) -> str:
    return f"{place}/tcp/{port}/p2p/{who.peer_id}"


def hello(who: Identity, **changes: object) -> ftis_pb2.Handshake:
    fields = {"major": PROTOCOL_MAJOR, "minor": PROTOCOL_MINOR, "run_id": RUN.id, "addresses": [address(who)]}
    return ftis_pb2.Handshake(**(fields | {"agent": "test/1"} | changes))


# --- meeting ----------------------------------------------------------------------------------------------------------


async def test_two_nodes_of_a_run_meet_and_each_learns_where_the_other_is(tmp_path: Path) -> None:
    async with node(ALICE, tmp_path) as (alice, _), node(BOB, tmp_path) as (bob, network):
        alice.hear(await network.addresses())
        assert alice.strangers() == [BOB.author]
        assert await alice.greet(BOB.author)
        assert alice.strangers() == []
        for one, other, who in ((alice, bob, BOB), (bob, alice, ALICE)):
            assert list(one.view) == [who.author]
            assert one.view[who.author].addresses == await other.refresh_addresses()
            assert one.view[who.author].agent.startswith("ftis-node/")


async def test_nodes_of_different_runs_part_politely_and_both_know_why(tmp_path: Path) -> None:
    async with node(ALICE, tmp_path) as (alice, _), node(BOB, tmp_path, OTHER_RUN) as (bob, network):
        alice.hear(await network.addresses())
        assert not await alice.greet(BOB.author)
        assert not alice.view and not bob.view
        assert OTHER_RUN.id.hex() in alice.refused[BOB.author] and RUN.id.hex() in alice.refused[BOB.author]
        assert RUN.id.hex() in bob.refused[ALICE.author]
        assert alice.strangers() == [], "it is not asked again and again"


@pytest.mark.parametrize("major", [0, PROTOCOL_MAJOR - 1, PROTOCOL_MAJOR + 1])
async def test_nodes_of_different_major_versions_part_politely(tmp_path: Path, major: int) -> None:
    async with node(ALICE, tmp_path) as (alice, me), node(BOB, tmp_path, major=major) as (bob, network):
        alice.hear(await network.addresses())
        assert not await alice.greet(BOB.author)
        todo = "its owner has to upgrade" if major < PROTOCOL_MAJOR else "upgrade ftis-node here"
        assert f"it speaks protocol {major}, this node speaks {PROTOCOL_MAJOR}: {todo}" in alice.refused[BOB.author]
        assert alice.majors == {BOB.author: major}
        bob.view.clear()
        answer = await stub(me, BOB).rpc_handshake(hello(ALICE, major=PROTOCOL_MAJOR + 1), timeout=5)
        assert answer.refusal == f"this node speaks protocol {PROTOCOL_MAJOR}, you speak {PROTOCOL_MAJOR + 1}"
        assert not bob.view and bob.majors[ALICE.author] == PROTOCOL_MAJOR + 1


async def test_an_old_peer_that_greets_is_told_to_upgrade_and_let_in_when_it_has(tmp_path: Path) -> None:
    async with node(ALICE, tmp_path) as (alice, me), node(BOB, tmp_path) as (bob, network):
        await me.connect(BOB.author, await network.addresses())
        answer = await stub(me, BOB).rpc_handshake(hello(ALICE, major=1), timeout=5)
        assert answer.refusal == "this node speaks protocol 2, you speak 1: upgrade ftis-node"
        assert not answer.run_file and not answer.peers and not bob.view
        assert "it speaks protocol 1" in bob.refused[ALICE.author]
        alice.hear(await network.addresses())
        assert await alice.greet(BOB.author)
        assert ALICE.author in bob.view and not bob.refused and not bob.majors


async def test_a_peer_that_is_not_there_is_forgotten_after_three_greetings(tmp_path: Path) -> None:
    async with node(ALICE, tmp_path) as (alice, _):
        alice.hear([f"/ip4/127.0.0.1/tcp/1/p2p/{BOB.peer_id}"])
        for _ in range(GIVE_UP_AFTER):
            assert BOB.author in alice._heard
            assert not await alice.greet(BOB.author)
        assert BOB.author not in alice._heard
        assert alice.hear([address(BOB)]), "somebody mentions it again"


def test_a_later_minor_version_and_unknown_fields_do_no_harm() -> None:
    alice = alone()
    later = ftis_pb2.Handshake.FromString(hello(BOB, minor=9).SerializeToString() + b"\x9a\x06\x03new")
    assert not alice.on_handshake(later, BOB.author).refusal
    assert BOB.author in alice.view


def test_a_refused_peer_that_comes_back_in_the_right_run_is_let_in() -> None:
    alice = alone()
    alice.on_handshake(hello(BOB, run_id=OTHER_RUN.id), BOB.author)
    assert alice.refused and not alice.view
    alice.on_handshake(hello(BOB), BOB.author)
    assert alice.view and not alice.refused


def test_a_peer_that_has_no_run_is_given_ours_and_is_no_member() -> None:
    alice = alone()
    answer = alice.on_handshake(hello(BOB, run_id=b""), BOB.author)
    assert run_file_from_json(answer.run_file).run == RUN
    assert not alice.view and not alice.refused


# --- the view ---------------------------------------------------------------------------------------------------------


def met(alice: Membership, first: int, count: int, *, found: bool, network: str = "10.0.0") -> list[bytes]:
    """So many peers enter the view one after the other."""
    peers = [identity(number) for number in range(first, first + count)]
    for number, who in enumerate(peers):
        place = f"/ip4/{network}.{number % 250}/tcp/4001/p2p/{who.peer_id}"
        alice._admit(who.author, hello(who, addresses=[place]), found=found)
        assert who.author in alice.view
    return [who.author for who in peers]


def test_the_view_is_bounded_and_the_newest_is_in_it() -> None:
    alice = alone()
    for number in range(100, 100 + VIEW_SIZE + 30):
        who = identity(number)
        alice.on_handshake(hello(who), who.author)
        assert who.author in alice.view
    assert len(alice.view) == INBOUND_MAX
    met(alice, 500, VIEW_SIZE, found=True)
    assert len(alice.view) == VIEW_SIZE


def test_row_16_who_comes_by_itself_pushes_nobody_out_whom_this_node_has_found() -> None:
    alice = alone()
    honest = met(alice, 100, VIEW_SIZE - INBOUND_MAX, found=True)
    met(alice, 1000, 300, found=False)
    assert len(alice.view) == VIEW_SIZE and set(honest) <= set(alice.view)


def test_row_16_the_first_that_were_found_stay_and_a_crowd_of_one_network_makes_room() -> None:
    alice = alone()
    honest = [met(alice, 100 + number, 1, found=True, network=f"198.51.{number}")[0] for number in range(30)]
    met(alice, 1000, 500, found=True, network="203.0.113")
    assert set(honest) <= set(alice.view), "each has a network of its own"
    alice = alone()
    first = met(alice, 100, ANCHORS, found=True)
    met(alice, 1000, 500, found=True)
    assert set(first) <= set(alice.view)


def test_row_16_what_one_peer_tells_does_not_push_out_what_others_told() -> None:
    alice = alone()
    told = [address(identity(number)) for number in range(100, 150)]
    alice.hear(told)
    alice.hear([address(identity(number)) for number in range(1000, 1000 + HEARD_SIZE)], MALLORY.author)
    assert len(alice._heard) == 50 + HEARD_SIZE // TELLER_PART
    assert {identity(number).author for number in range(100, 150)} <= set(alice._heard)


ELSEWHERE = (LAN, LOOPBACK, "/ip6/fe80::1", "/ip4/100.64.0.1", "/dns4/router.example")


@pytest.mark.parametrize("place", [*ELSEWHERE, *(f"{at(place, CAROL)}/p2p-circuit" for place in ELSEWHERE)])
def test_row_16_nobody_can_make_a_public_node_dial_into_its_own_network(place: str) -> None:
    """Neither by naming others there, nor by saying that it is there itself, nor in the cache of the last start."""
    alice = alone()
    told = place + f"/p2p/{BOB.peer_id}" if "p2p-circuit" in place else at(place)
    assert not alice.hear([told], MALLORY.author)
    assert not alice.strangers()
    alice.on_handshake(hello(BOB, addresses=[told]), BOB.author)
    assert alice._to_dial(BOB.author) == []
    assert alice.some_addresses(1, CAROL.author) == [told], "others may be at home there"


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
def test_who_is_at_home_in_a_network_dials_whom_others_name_there(own: dict[str, Any], taken: tuple[str, ...]) -> None:
    peers = own.pop("peers", ())
    alice = alone(**own)
    alice.trust(peers)
    alice.hear(peers)
    assert alice._to_dial(BOB.author) == list(peers)
    for place in (LAN, LOOPBACK):
        assert alice.hear([at(place, CAROL)], MALLORY.author) is (place in taken)
        alice._forget(CAROL.author)


async def test_a_node_is_at_home_where_a_host_that_its_owner_named_leads(tmp_path: Path) -> None:
    async with node(ALICE, tmp_path) as (alice, _), node(BOB, tmp_path) as (_, network):
        alice._at_home = Whereabouts("0.0.0.0")
        await network.connect(ALICE.author, alice.own_addresses)
        assert await alice.greet(BOB.author)
        assert not alice._at_home.reach(at(LOOPBACK, CAROL)), "that somebody has come says nothing"
        alice.trust([f"/dns4/localhost/tcp/4001/p2p/{BOB.peer_id}"])
        assert not alice._at_home.reach(at(LOOPBACK, CAROL)), "and a name neither"
        assert await alice.greet(BOB.author)
        assert alice.hear([at(LOOPBACK, CAROL)], MALLORY.author)


async def test_row_16_of_what_one_peer_names_only_so_much_is_dialled(tmp_path: Path) -> None:
    alice = alone()
    alice._dials = Budgets(lambda: 0.0, 1.0, DIALS_AT_ONCE)
    for number in range(100, 150):
        alice.hear([address(identity(number), port) for port in (1, 2)], MALLORY.author)
    alice.hear([address(BOB)], CAROL.author)
    dialled = [text for peer in alice.strangers() for text in alice._to_dial(peer)]
    assert len(dialled) == DIALS_AT_ONCE + 1 and address(BOB) in dialled
    late = next(peer for peer in alice.strangers() if not alice._to_dial(peer))
    assert not await alice.greet(late), "without asking p2pd"
    alice.hear([address(BOB)])
    alice._dials = Budgets(lambda: 0.0, 0.0, 0.0)
    assert alice._to_dial(BOB.author) == [address(BOB)], "the DHT and this node's owner name it too"


def test_peers_of_other_runs_do_not_fill_the_memory() -> None:
    alice = alone()
    for number in range(100, 100 + HEARD_SIZE + 50):
        alice.on_handshake(hello(BOB, run_id=OTHER_RUN.id), identity(number).author)
    assert len(alice.refused) == HEARD_SIZE


def test_three_failures_in_a_row_drop_a_peer_of_whom_nothing_was_heard_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alice = alone()
    alice.on_handshake(hello(BOB), BOB.author)
    for _ in range(GIVE_UP_AFTER):
        alice.failed(BOB.author)
    assert BOB.author in alice.view, "its p2pd may just be starting again"
    monkeypatch.setattr("ftis_node.swarm.membership.GIVE_UP_SECONDS", 0.0)
    alice.answered(BOB.author)
    for _ in range(3):
        alice.failed(BOB.author)
        alice.failed(BOB.author)
        alice.answered(BOB.author)
    assert BOB.author in alice.view
    for _ in range(GIVE_UP_AFTER):
        alice.failed(BOB.author)
    assert BOB.author not in alice.view
    alice.failed(BOB.author)
    alice.answered(CAROL.author)
    assert alice.strangers() == [BOB.author], "it may come back"


def test_a_peer_that_moved_is_known_at_its_new_address_only() -> None:
    alice = alone()
    alice.hear([address(BOB, 1)])
    alice.on_handshake(hello(BOB, addresses=[address(BOB, 2)]), BOB.author)
    alice.on_handshake(hello(BOB, addresses=[address(BOB, 3)]), BOB.author)
    assert alice.view[BOB.author].addresses == [address(BOB, 3)]
    assert alice.some_addresses(8, CAROL.author) == [address(BOB, 3)]
    assert alice.some_addresses(8, BOB.author) == [], "it knows that itself"


@pytest.mark.parametrize(
    "said",
    [
        address(CAROL),
        f"\x1b[2J{BOB.peer_id}",
        "/ip4/192.0.2.7/tcp/1" + "/tcp/1" * 100 + f"/p2p/{BOB.peer_id}",
        BOB.peer_id,
        "x" * 100_000,
    ],
)
def test_what_a_peer_says_of_itself_must_be_its_address(said: str) -> None:
    alice = alone()
    alice.on_handshake(hello(BOB, addresses=[said, address(BOB)]), BOB.author)
    assert alice.view[BOB.author].addresses == [address(BOB)]


def test_a_peers_words_are_short_and_nothing_that_a_terminal_obeys() -> None:
    alice = alone()
    alice.on_handshake(hello(BOB, agent="\x1b[2Jnice\nname" + "x" * 9999), BOB.author)
    agent = alice.view[BOB.author].agent
    assert agent.startswith("?[2Jnice?name") and agent.isprintable() and len(agent) <= 64


# --- who may ask, and how much ----------------------------------------------------------------------------------------


def test_who_left_the_view_to_make_room_may_still_ask() -> None:
    alice = alone()
    peers = [identity(1000 + number) for number in range(VIEW_SIZE + 10)]
    for peer in peers:
        alice.on_handshake(hello(peer, addresses=[]), peer.author)
    assert len(alice.view) == INBOUND_MAX
    assert all(alice.limits(peer.author) == OWN for peer in peers)
    assert alice.limits(CAROL.author) is None


def test_of_those_who_may_ask_the_latest_are_remembered_and_the_view() -> None:
    alice = alone()
    for number in range(MET_SIZE + 50):
        peer = identity(1000 + number)
        alice.on_handshake(hello(peer, addresses=[]), peer.author)
    assert all(alice.limits(peer) for peer in alice.view)
    assert alice.limits(peer.author)
    assert sum(alice.limits(identity(1000 + number).author) is not None for number in range(MET_SIZE + 50)) == MET_SIZE


def test_who_turns_out_to_be_in_another_run_may_ask_no_more() -> None:
    alice = alone()
    alice.on_handshake(hello(BOB), BOB.author)
    answer = alice.on_handshake(hello(BOB, run_id=OTHER_RUN.id, tokenizer=b"x" * 32), BOB.author)
    assert alice.limits(BOB.author) is None and BOB.author not in alice.view
    assert answer.refusal.endswith(", which has another tokenizer")
    answer = alice.on_handshake(hello(BOB, run_id=OTHER_RUN.id, tokenizer=bytes.fromhex(RUN.tokenizer)), BOB.author)
    assert answer.refusal.endswith(OTHER_RUN.id.hex())


def test_a_message_holds_what_both_take() -> None:
    alice = alone()
    told = ftis_pb2.Limits(entries=4, mentions=2**32 - 1)
    assert alice.on_handshake(hello(BOB, limits=told), BOB.author).limits == OWN.message()
    assert alice.limits(BOB.author) == Limits(4, OWN.mentions, OWN.digests)


# --- what is heard ----------------------------------------------------------------------------------------------------


def test_an_address_heard_for_the_first_time_is_news() -> None:
    alice = alone()
    assert alice.hear([address(BOB)])
    assert not alice.hear([address(BOB), address(BOB, 2)])
    assert not alice.hear([address(ALICE)]), "that is this node itself"
    assert alice.strangers() == [BOB.author]


junk = st.one_of(
    st.text(max_size=60),
    st.integers(2, 400).map(lambda number: address(identity(number), number)),
    st.integers(0, 10**6).map(lambda port: address(BOB, port)),
    st.integers(1, 3).map(lambda many: address(BOB) * many),
    st.just("/ip4/192.0.2.7" + "/tcp/1" * 200 + f"/p2p/{BOB.peer_id}"),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(junk, max_size=30))
def test_no_address_that_a_peer_mentions_does_any_harm(addresses: list[str]) -> None:
    alice = alone()
    alice.hear(addresses)
    assert ALICE.author not in alice.strangers()
    assert len(alice._heard) <= HEARD_SIZE
    for known in alice._heard.values():
        assert len(known) <= 8 and all(len(text) <= 256 for text in known)


def test_addresses_without_number_are_kept_to_a_bound() -> None:
    alice = alone()
    for number in range(2, 2 + 2 * HEARD_SIZE):
        alice.hear([address(identity(number))])
    assert len(alice.strangers()) == HEARD_SIZE


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_next_start_hears_of_the_peers_of_this_one(tmp_path: Path) -> None:
    cache = tmp_path / "peers.json"
    first = alone(cache=cache)
    first.save_cache()
    assert not cache.exists(), "an empty view must not overwrite what was known"
    first.on_handshake(hello(BOB), BOB.author)
    first.save_cache()
    second = alone(cache=cache)
    second.load_cache()
    assert second.strangers() == [BOB.author]


def test_the_cache_holds_nothing_that_this_node_would_not_dial(tmp_path: Path) -> None:
    cache = tmp_path / "peers.json"
    first, public = alone(cache=cache, host="192.168.7.7"), alone(cache=tmp_path / "other.json")
    for membership in (first, public):
        membership.on_handshake(hello(BOB, addresses=[at(LAN), at(LOOPBACK)]), BOB.author)
        membership.save_cache()
    assert json.loads(cache.read_text()) == [at(LAN)]
    assert json.loads((tmp_path / "other.json").read_text()) == []


def test_row_43_a_node_that_was_in_a_private_network_once_is_not_at_home_there_for_ever(tmp_path: Path) -> None:
    """Else strangers who claim to be there would renew it with every start."""
    cache = tmp_path / "peers.json"
    first = alone(cache=cache)
    first.trust([at(LAN)])
    first.on_handshake(hello(BOB, addresses=[at(LAN)]), BOB.author)
    first.save_cache()
    second = alone(cache=cache)
    second.load_cache()
    assert second._to_dial(BOB.author) == []
    assert not second.hear([at(LAN, CAROL)], MALLORY.author)
    second.trust([at(LAN, CAROL)])
    assert second._to_dial(BOB.author) == [at(LAN)], "its owner says again that it is there"


@pytest.mark.parametrize("content", ["", "{", "5", "null", "{}", '[5, null, ["x"], "rubbish"]', "\udcff"])
def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    cache = tmp_path / "peers.json"
    cache.write_bytes(content.encode(errors="surrogateescape"))
    alice = alone(cache=cache)
    alice.load_cache()
    assert alice.strangers() == []


def test_the_cache_holds_two_addresses_a_peer(tmp_path: Path) -> None:
    alice = alone(cache=tmp_path / "peers.json")
    alice.on_handshake(hello(BOB, addresses=[address(BOB, port) for port in range(1, 20)]), BOB.author)
    alice.save_cache()
    assert json.loads((tmp_path / "peers.json").read_text()) == [address(BOB, 1), address(BOB, 2)]
