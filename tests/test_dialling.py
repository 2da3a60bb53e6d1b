"""Which addresses are dialled hangs on who named them; and what others sent is never taken for the owner's own word."""

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftis_node.config.run import load_run_file
from ftis_node.errors import UsageError
from ftis_node.node.options import JoinOptions
from ftis_node.node.run_source import agreed, remember_files
from ftis_node.store.home import Home
from ftis_node.swarm.address_book import AddressBook
from ftis_node.swarm.invitation import invite, read_line
from ftis_node.swarm.places import CHECKS_AT_ONCE, KEPT_MAX, Place, Places
from ftis_node.swarm.sessions import Sessions
from ftis_node.swarm.wire import libp2p
from ftis_node.swarm.wire.transport import Listening, Unreachable
from ftis_node.text import called
from tests.support.alone import Alone, address, at, greets, hello
from tests.support.cli import refused
from tests.support.daemons import run_cli
from tests.support.swarm import RUN, identity, make_run, member, transport
from tests.support.talkers import ALICE, BOB

EVE = identity(9)


async def watched(inviter, home, name=""):
    """What `ftis-node watch` prints on stderr, with an invitation of this member."""
    made = invite(inviter.identity, inviter.run.id, [inviter.address], now=time.time(), seconds=600, name=name)
    line = ("watch", made.text, "--home", home, "--for", "4", "--set", "http_port=0")
    ended = await asyncio.to_thread(run_cli, *line)
    sessions = inviter.swarm.membership.sessions.values()
    assert ended.returncode == 0, ended.stderr
    assert any(one.observer for one in sessions), ended.stderr
    return ended.stderr


async def test_row_62_an_inviter_sends_nobody_elsewhere(tmp_path, monkeypatch):
    """Its own address, on loopback, is dialled as it is written; what it names there afterwards is not."""
    callers = []
    server = await asyncio.start_server(lambda _, writer: callers.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    inside = ("/ip4/127.0.0.1", "/ip6/::ffff:127.0.0.1", "/dns4/localhost", "/ip6/64:ff9b::7f00:1", "/ip4/0.0.0.0")
    lies = [f"{place}/tcp/{port}/p2p/{identity(100 + n).peer_id}" for n, place in enumerate(inside)]
    async with server, member(1, tmp_path) as inviter:
        monkeypatch.setattr(inviter.swarm.membership, "introduce", lambda answer, *_: answer.peers.extend(lies))
        told = await watched(inviter, tmp_path / "home", f"Ann ({EVE.peer_id})")
    assert not callers
    assert f"by {inviter.identity.peer_id}." in told
    assert EVE.peer_id not in told, "a name is no id"
    assert f"This invitation names: {inviter.address.partition('/p2p/')[0]}." in told


@pytest.mark.parametrize("place", ["/ip4/169.254.169.254/tcp/443", "/ip4/10.0.0.1/tcp/22", "/dnsaddr/vault.corp"])
def test_row_62_an_invitation_that_names_what_only_an_owner_may_is_refused_before_a_dial(place):
    own = f"/p2p/{EVE.peer_id}"
    honest = invite(EVE, bytes(16), [f"{place}{own}", f"/ip4/10.0.0.1/tcp/4001{own}"], now=0.0, seconds=60)
    assert honest.dial == ("/ip4/10.0.0.1/tcp/4001",)
    hostile = type(honest)(
        run_id=bytes(16),
        inviter=EVE.author,
        issued_at=0,
        expires=60,
        dial=(place,),
    )
    with pytest.raises(UsageError, match="only this node's owner"):
        read_line(hostile.signed_by(EVE).text, 1.0)


async def test_row_62_a_name_that_leads_to_the_link_or_to_no_host_is_not_dialled(tmp_path, monkeypatch):
    def leading(host):
        async def leads(*_, **__):
            return [(2, 1, 6, "", (host, 0))]

        return leads

    dialled = []
    knock = libp2p._knock
    async with transport(EVE, tmp_path) as network:
        monkeypatch.setattr(network, "knock", lambda place: dialled.append(place) or knock(place))
        for host, why in (
            ("169.254.169.254", "no addresses"),
            ("0.0.0.0", "no addresses"),
            ("127.0.0.1", "nothing listens"),
        ):
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", leading(host))
            with pytest.raises(Unreachable, match=why):
                await network.connect(identity(1).author, [f"/dns4/node.example/tcp/1025/p2p/{identity(1).peer_id}"])
    assert dialled == ["/ip4/127.0.0.1/tcp/1025"]


def test_row_62_a_name_that_looks_like_an_id_is_not_shown():
    who = EVE.peer_id
    for name in (who, f"Ann ({who})", who[:12], "１２D3KooW", "Qm" + "a" * 44, "x" * 41):
        assert called(who, {who: name}) == who
    assert called(who, {who: "Ann of 12 D"}) == f"Ann of 12 D ({who})"


async def test_row_64_a_run_that_an_observer_keeps_is_not_the_owners_choice(tmp_path):
    place = Home(tmp_path / "home")
    run = make_run(task="hf:somebody/rows:train", reward="tests")
    line = ("join", "--dry-run", "--device", "cpu", "--model", "tiny-a", "--home", place.path)
    async with member(1, tmp_path, run=run) as inviter:
        await watched(inviter, place.path)
    assert load_run_file(place.run_file).run == run
    assert "downloaded from a hub" in refused(*line).what
    assert "by the rule 'tests'" in refused(*line, "--task", run.task).what
    assert not agreed(place, run.id)
    remember_files(JoinOptions(place), run.task, run.id)
    assert agreed(place, run.id)
    assert not agreed(place, bytes(16)), "consent is for one run"
    place.task_files.unlink()
    place.store.touch()
    assert agreed(place, run.id), "a node of an earlier version"


ROOM = """
mount -t sysfs sysfs /sys
ip link set lo up; ip link add d1 type veth peer name e1; ip link set e1 up; ip addr add 10.1.0.1/16 dev d1
ip -6 addr add fd00:1::1/64 dev d1 nodad; ip link set d1 up; ip route add default via 10.1.0.254
for n in docker0 cluster; do ip link add $n type bridge; ip link set $n up; done
ip addr add 172.17.0.1/16 dev docker0; ip addr add 10.1.0.65/28 dev cluster
"""
NEAR = ["/ip4/10.1.0.9/tcp/4001", "/ip4/10.1.0.9/udp/1024/quic-v1", "/ip6/fd00:1::9/tcp/4001"]
FAR = {
    "outside the networks": [
        "/ip4/10.1.1.9/tcp/4001",
        "/ip4/192.168.1.9/tcp/4001",
        "/ip6/fd00:2::9/tcp/4001",
        "/ip6/64:ff9b::a01:9/tcp/4001",
    ],
    "container bridge": ["/ip4/10.1.0.70/tcp/4001"],
    "gateway": ["/ip4/10.1.0.254/tcp/4001"],
    "this machine itself": ["/ip4/10.1.0.1/tcp/4001", "/ip6/fd00:1::1/tcp/4001"],
    "a port from 1024": ["/ip4/10.1.0.9/tcp/443"],
    "no host": ["/ip4/10.1.0.255/tcp/4001"],
    "plain address": [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/169.254.169.254/tcp/4001",
        "/ip4/10.1.0.9/tcp/22",
        "/dns4/router.lan/tcp/4001",
        f"/ip4/10.1.0.9/tcp/4001/p2p/{identity(1).peer_id}/p2p-circuit",
    ],
}


def weigh():
    """In a room: prints each address that is not dialled as it should be."""
    peer = identity(2)
    other = identity(3)
    for private, referrer, near in (
        (True, peer.author, True),
        (True, other.author, False),
        (False, peer.author, False),
    ):
        sessions = Sessions({})
        book = AddressBook(EVE.author, Listening(Path(), Path()), {}, sessions, random.Random(1), None, private)
        for text in NEAR:
            if book.may_dial(f"{text}/p2p/{peer.peer_id}", referrer) is not near:
                print(private, text, near)
        for why, texts in FAR.items():
            for text in texts:
                book.hear([f"{text}/p2p/{peer.peer_id}"], referrer)
                told = book.skipped().get(peer.author, "")
                if book.to_dial(peer.author) or (near and f"{text.partition('/p2p/')[0]} is not dialled: " not in told):
                    print(private, text, told)
                elif near and why not in told:
                    print(text, told)


LINE = ["unshare", "-n", "-m", "sh", "-ec", ROOM]


@pytest.mark.skipif(subprocess.run(LINE, capture_output=True).returncode != 0, reason="needs root and ip")
def test_row_78_a_members_own_word_leads_into_the_local_networks_and_nowhere_else():
    program = "from tests.test_dialling import weigh; weigh()"
    line = [*LINE[:-1], f'{ROOM}exec "$@"', "sh", sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.virtual_time
async def test_row_78_what_a_stranger_makes_up_by_mdns_pushes_out_no_members_own_word(tmp_path):
    """It knows the run's id from an invitation, so its codes hold."""
    async with member(1, tmp_path) as ann:
        place = f"/ip4/127.0.0.1/tcp/%d/p2p/{EVE.peer_id}"
        ann.swarm.membership.addresses.hear([place % 4001], EVE.author)
        for port in range(5000, 5040):
            ann.swarm.hear_member_on_lan([place % port])
        assert place % 4001 in (ann.swarm.membership.addresses.to_dial(EVE.author) or ())


def test_row_78_only_a_members_own_newest_word_says_where_it_is():
    ann = identity(1)
    ben = identity(2)
    stranger = identity(3)
    run = make_run()
    members = SimpleNamespace(private=True, admits=(ann.author, ben.author).__contains__)
    places = Places(run.id, EVE, members, {ann.author})

    def place(who, at, signer=None, dial="10.1.0.9", **other):
        fields = {
            "run_id": run.id,
            "member": who.author,
            "issued_at": at,
            "dial": (f"/ip4/{dial}/tcp/4001",),
        } | other
        return Place(**fields).signed_by(signer or who).encoded

    def heard(data, peer=ben):
        return [text for found in places.hear([data], 1, peer.author) for text in found.addresses]

    assert heard(place(ann, 5)) == [f"/ip4/10.1.0.9/tcp/4001/p2p/{ann.peer_id}"]
    forged = place(ann, 9, ben)
    older = place(ann, 4, dial="10.1.0.7")
    again = place(ann, 5)
    of_strangers = place(stranger, 9), place(ann, 9, run_id=bytes(16)), place(EVE, 9), b"nonsense", bytes(5000)
    assert not any(map(heard, (forged, older, again, *of_strangers)))
    assert heard(older, ann)
    assert heard(place(ann, 6, dial="10.1.0.8")), "its own clock may have been set back"
    assert Place(
        run_id=run.id,
        member=ann.author,
        issued_at=6,
        dial=("/ip4/10.1.0.8/tcp/4001",),
    ).signed_by(ann) == places.of(ann.author)
    for number in range(KEPT_MAX):
        member = identity(1000 + number)
        members.admits = (ann.author, ben.author, member.author).__contains__
        heard(place(member, 5), member)
    assert places.of(ann.author)
    assert not places.of(identity(1000).author), "the view's places make room for nobody's"
    for _ in range(2 * int(CHECKS_AT_ONCE)):
        heard(place(ann, 99, ben), stranger)
    assert not heard(place(ann, 7), stranger)
    assert heard(place(ann, 7), ben), "the liar's budget is used up, no other's"


def test_row_78_a_members_word_about_itself_is_kept_and_told_only_where_it_is_an_address():
    alice = Alone()
    alice._places = Places(RUN.id, ALICE, SimpleNamespace(private=True, admits=bool), alice.active_view)
    greets(alice, BOB)
    wild = ("\x1b[2J\nDONE", "/p2p-circuit", "/dnsaddr/evil.example")
    own = {"run_id": RUN.id, "member": BOB.author, "issued_at": 5}
    place = Place(**own, dial=(*wild, "/ip4/10.1.0.9/tcp/4001")).signed_by(BOB)
    alice.hear_of_peers(hello(BOB, places=[place.encoded]), 1, BOB.author)
    assert alice.active_view[BOB.author].addresses == [address(BOB), at("/ip4/10.1.0.9")]
