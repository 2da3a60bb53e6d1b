"""Nodes of one local network find each other by mDNS, if their owners want that."""

import asyncio
import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from ipaddress import ip_interface

import pytest
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from ftis_node.cli import runs as runs_command
from ftis_node.cli.runs import NONE_FOUND, by_run, the_run
from ftis_node.errors import UsageError
from ftis_node.swarm.address_book import LAN_MAX
from ftis_node.swarm.handshake import PROTOCOL_MAJOR
from ftis_node.swarm.lan import (
    ADDRESSES_MAX,
    SERVICE,
    TASK_MAX,
    WORD_MAX,
    HiddenNode,
    Lan,
    LanNode,
    MembersOnLan,
    code_of,
    look_around,
    read_node,
)
from tests.support.cli import answer, printed, refused
from tests.support.swarm import OTHER_RUN, RUN, eventually, identity, make_run, member

ANN, BEN, EVE = (identity(number) for number in range(1, 4))
HERE = "127.0.0.1"
LOOPBACK = ip_interface(f"{HERE}/8")
FACTS = {
    b"run": RUN.id.hex().encode(),
    b"task": b"arithmetic",
    b"protocol": str(PROTOCOL_MAJOR).encode(),
}


def node(who=ANN, run=RUN.id, protocol=PROTOCOL_MAJOR):
    return LanNode(who.author, run, "arithmetic", protocol, (f"/ip4/{HERE}/tcp/4001/p2p/{who.peer_id}",))


# --- reading what strangers tell --------------------------------------------------------------------------------------


def read(told, interface=LOOPBACK, *, name=ANN.peer_id, port=4001, **facts):
    """What a node takes of these addresses, told by a record of Ann's, but for what is changed of it."""
    facts = FACTS | {key.encode(): value for key, value in facts.items()}
    return read_node(name, facts, told, port, interface)


def test_row_62_only_addresses_in_the_network_of_the_interface_are_taken():
    told = [HERE, "203.0.113.9", "8.8.8.8", "2001:4860:4860::8888", "224.0.0.251", "127.255.255.255"]
    assert read(told) == node()
    many = read([f"127.0.0.{last}" for last in range(1, 200)])
    assert len(many.addresses) == ADDRESSES_MAX
    told = [HERE, "10.0.1.9", "10.0.0.255", "169.254.169.254", "fe80::1%eth0", "::ffff:10.0.0.9"]
    for own in ("10.0.0.1/24", "169.254.3.4/16", "fe80::7/64"):
        assert read(told, ip_interface(own)).addresses == ()


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("run", (b"abcd", None, b"zz" * 16, "ü".encode() * 16)),
        ("protocol", (b"three", b"9999", None)),
        ("name", ("Ann",)),
        ("port", (80, None, 1 << 16)),
    ],
)
def test_records_names_and_ports_that_are_none_are_refused(what, values):
    for value in values:
        with pytest.raises(ValueError):
            read([HERE], **{what: value})


# --- over the network -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def telling(who=ANN, port=4001):
    lan = Lan(HERE, lambda node: None)
    try:
        await lan.start()
        await lan.tell(RUN, who.author, port, model="tiny-a", name="Ann\x1b" + "😀" * 99)
        yield lan
    finally:
        await lan.close()


async def tell(liar, who, address=HERE, **facts):
    properties = {"run": RUN.id.hex(), "task": "arithmetic", "protocol": str(PROTOCOL_MAJOR)} | facts
    records = {"port": 4001, "properties": properties, "server": f"{address}.local."}
    info = AsyncServiceInfo(SERVICE, f"{who.peer_id}.{SERVICE}", parsed_addresses=[address], **records)
    await (await liar.async_register_service(info, cooperating_responders=True))


async def test_a_node_tells_of_itself_and_takes_that_back():
    async with telling():
        for _ in range(5):  # an answer to the first question may reach another program of this machine
            found = await look_around(HERE, 3.0)
            if found:
                break
        assert found == [replace(node(), model="tiny-a", name="Ann?" + "😀" * (WORD_MAX - 4))]
    assert await look_around(HERE, 1.0) == []


TWO_NETWORKS = "for n in 1 2; do ip link add d$n type veth peer name e$n; ip addr add 10.$n.0.1/24 dev d$n; "
TWO_NETWORKS += "ip link set d$n up; ip link set e$n up; done"


async def across():
    """In two networks: prints what a node takes of what somebody in the first of them tells."""
    heard = []
    listener = Lan("0.0.0.0", heard.append)
    liar = AsyncZeroconf(interfaces=["10.1.0.1"])
    await listener.start()
    for who, place in (
        (ANN, "10.1.0.9"),
        (BEN, "10.2.0.9"),
        (EVE, HERE),
    ):
        await tell(liar, who, place)
    await eventually(lambda: len(heard) >= 3, "all are heard")
    await asyncio.sleep(1.0)
    print(*(address.split("/")[2] for one in heard for address in one.addresses))


NETWORKS = not subprocess.run(["unshare", "-n", "sh", "-ec", TWO_NETWORKS], capture_output=True).returncode


@pytest.mark.skipif(not NETWORKS, reason="needs root and ip")
def test_row_62_one_network_does_not_name_what_is_in_another():
    code = "import asyncio; from tests.test_lan import across; asyncio.run(across())"
    line = ["unshare", "-n", "sh", "-ec", f'{TWO_NETWORKS}; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.stdout == "10.1.0.9\n", done.stderr


def test_row_62_a_dead_node_on_the_local_network_keeps_no_start_from_beginning(join, tmp_path):
    async def begin():
        async with telling():
            line = ("join", "--dry-run", "--lan", "--host", HERE, "--model", "tiny-a", "--home", tmp_path / "b")
            await asyncio.to_thread(printed, *line)
            daemon = join("a", "--lan", "--set", "patience=1")
            await asyncio.to_thread(daemon.wait, lambda status: status.get("step"), "a step")
            assert "Found run" in daemon.log()
            assert "a new run begins" in daemon.log()
            own = bytes.fromhex(daemon.status()["run"])
            assert own != RUN.id
            while own not in {one.run for one in await look_around(HERE, 1.0)}:  # it tells of itself
                pass

    asyncio.run(begin())


async def listen_in(found):
    """All that a stranger can read of the services here."""
    listener = AsyncZeroconf(interfaces=[HERE])

    async def ask(service):
        info = AsyncServiceInfo(SERVICE, service)
        if await info.async_request(listener.zeroconf, 3000):
            found.extend((key, word, f"{service} {info.server}") for key, word in info.properties.items())

    asking = []

    def noticed(*, name, **_):
        asking.append(asyncio.ensure_future(ask(name)))

    browser = AsyncServiceBrowser(listener.zeroconf, SERVICE, handlers=[noticed])
    try:
        await eventually(lambda: bool(found), "it is heard")
    finally:
        await browser.async_cancel()
        await asyncio.gather(*asking)
        await listener.async_close()


async def test_row_78_members_find_each_other_on_the_local_network_and_nobody_else_learns_of_them():
    private = make_run(founder=ANN.peer_id)
    known = []
    met = []
    strangers = []
    inside = MembersOnLan(private.id, known.__contains__, met.append)
    outside = MembersOnLan(RUN.id, lambda _: True, lambda *_: pytest.fail("another run's id"))
    listener = Lan(HERE, strangers.append, strangers.append)
    lan = Lan(HERE, strangers.append)
    try:
        await listener.start()
        await lan.start()
        await lan.tell(private, ANN.author, 4001, name="Ann")
        await eventually(lambda: bool(strangers), "a node without a name")
        (there,) = strangers
        inside.hear(there)
        outside.hear(there)
        assert not met, "not a member as far as is known"
        known += [BEN.author, ANN.author]
        inside.look()
        assert met == [[f"/ip4/{HERE}/tcp/4001/p2p/{ANN.peer_id}"]]
        inside.hear(replace(there, places=("/ip4/127.0.0.9/tcp/4001",)))
        inside.hear(replace(there, name="0" * 32))
        inside.look()
        assert len(met) == 1, "what a member told leads nowhere else"
        records = []
        await listen_in(records)
        assert [key for key, *_ in records] == [b"member"]
        assert there.name in records[0][2]
        for secret in (private.id.hex(), ANN.peer_id, private.task):
            assert secret not in str(records)
        assert private.id not in {one.run for one in await look_around(HERE, 1.0)}
    finally:
        for one in (lan, listener):
            await one.close()


def test_row_78_made_up_codes_lead_nowhere_and_keep_no_members_from_being_read():
    met = []
    inside = MembersOnLan(RUN.id, [BEN.author].__contains__, met.append)
    place = f"/ip4/{HERE}/tcp/4001"
    for number in range(200):
        inside.hear(HiddenNode(str(number), os.urandom(number % 99), (place,)))
    inside.look()
    assert not met
    inside.hear(HiddenNode("x", code_of(RUN.id, "x", place, BEN.author), (place,)))
    assert met == [[f"{place}/p2p/{BEN.peer_id}"]]


async def test_a_hostile_responder_changes_nothing(tmp_path):
    """False addresses, a run of another id, control characters, and more nodes than anybody needs."""
    heard = []
    listener = Lan(HERE, heard.append)
    liar = AsyncZeroconf(interfaces=[HERE])
    await listener.start()
    try:
        async with member(9, tmp_path) as ann:
            crowd = [identity(number) for number in range(100, 100 + LAN_MAX + 20)]
            await asyncio.gather(
                tell(liar, EVE, "198.51.100.1"),
                tell(liar, BEN, run="00" * 16, task="\x1b[2J" + "x" * 150),
                *(tell(liar, who) for who in crowd),
            )
            await eventually(lambda: len({one.peer for one in heard}) > LAN_MAX, "the flood")
            for one in heard:
                ann.swarm.hear_on_lan(one.addresses)
            assert any(one.addresses for one in heard)
            for one in heard:
                assert all(address.startswith(f"/ip4/{HERE}/") for address in one.addresses)
                assert one.task.isprintable()
                assert len(one.task) <= TASK_MAX
            assert len(ann.swarm.membership.addresses.strangers()) <= LAN_MAX
    finally:
        await liar.async_close()
        await listener.close()


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def around(monkeypatch) -> list[LanNode]:
    """The nodes that commands hear of."""
    nodes = []
    monkeypatch.setattr(runs_command, "heard", lambda host, seconds: nodes)
    return nodes


def test_where_there_is_no_run_the_command_says_so():
    line = ("runs", "--host", HERE, "--seconds", "1")
    assert NONE_FOUND in printed(*line)
    assert answer(*line) == {"runs": []}
    assert "cannot be asked" in refused("runs", "--host", "192.0.2.1").what


def test_runs_lists_what_there_is(around):
    around += [node(), node(BEN), node(EVE, OTHER_RUN.id)]
    shown = printed("runs")
    for words in (RUN.id.hex(), "arithmetic, 2 nodes", f"join --peers {node().addresses[0]}"):
        assert words in shown
    listed = answer("runs")["runs"]
    assert [row["run"] for row in listed] == [RUN.id.hex(), OTHER_RUN.id.hex()]


def test_join_takes_the_only_run_and_asks_for_a_choice_among_several(around):
    assert the_run(HERE) == ()
    around.append(node(BEN, OTHER_RUN.id, protocol=1))
    assert the_run(HERE) == (), "nor one of an old version"
    around.append(node())
    assert the_run(HERE) == node().addresses
    around.append(node(EVE, OTHER_RUN.id))
    with pytest.raises(UsageError, match="2 runs"):
        the_run(HERE)
    assert by_run([LanNode(ANN.author, RUN.id, "", 3, ())]) == {}, "nobody can dial it"


@pytest.mark.slow
def test_two_daemons_find_each_other_and_learn(join):
    first = join("a", "--lan")
    first.wait(lambda status: status.get("step"), "a step")
    second = join("b", "--lan", "--model", "tiny-b")
    second.wait(lambda status: status.get("foreign_groups_used"), "foreign groups")
    assert "Found run" in second.log()
    assert second.status()["run"] == first.status()["run"]
