"""Nodes that only dial, keys that move, and what the doctor says of the network."""

import asyncio
import contextlib
import socket
import tempfile
from pathlib import Path

import msgspec
import psutil
import pytest
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from ftis_node.config.settings import Settings
from ftis_node.observe.answers import LeftOut, Peers
from ftis_node.preflight.net import look_around, of_a_running_node
from ftis_node.step_report import Health
from ftis_node.store.home import Home
from ftis_node.swarm.duplicate import somebody_else
from ftis_node.swarm.known_addresses import KnownAddresses
from ftis_node.swarm.membership import Reachability
from ftis_node.swarm.wire import p2pd
from ftis_node.swarm.wire.transport import Listening, Unreachable
from tests.support.statuses import answered
from tests.support.swarm import PATIENCE, all_meet, eventually, identity, member, transport

# --- only dialling ----------------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_node_that_only_dials_takes_full_part(tmp_path):
    async with (
        member(1, tmp_path) as open_one,
        member(2, tmp_path, [open_one.address]) as other,
        member(3, tmp_path, [open_one.address], listen=False) as shy,
    ):
        nodes = [open_one, other, shy]
        await all_meet(*nodes)
        assert shy.swarm.membership.reachability() is Reachability.OUTBOUND_ONLY
        assert open_one.swarm.membership.reachability() is Reachability.DIRECT
        assert shy.swarm.membership.own_addresses == []
        made = {node.author: node.make(2) for node in nodes}
        everything = set().union(*made.values())
        for node in nodes:
            wanted = everything - made[node.author]
            await eventually(lambda n=node, w=wanted: set(n.admitted) == w, "each gets what the others made")


@pytest.mark.virtual_time
async def test_who_cannot_be_dialled_names_relayed_addresses(tmp_path, monkeypatch):
    async with member(1, tmp_path) as node:
        direct = (await node.transport.addresses())[0]
        relayed = f"/ip4/8.8.4.4/tcp/1/p2p/{identity(2).peer_id}/p2p-circuit/p2p/{identity(1).peer_id}"

        async def addresses():
            return [direct, relayed]

        async def health():
            return Health(verdict, 1, 0, 0.0, 0)

        verdict = "unknown"
        monkeypatch.setattr(node.transport, "addresses", addresses)
        monkeypatch.setattr(node.transport, "health", health)
        membership = node.swarm.membership
        assert await membership.refresh_addresses() == [relayed], "this machine's own addresses are no use to others"
        assert membership.reachability() is Reachability.DIRECT
        verdict = "private"
        assert await membership.refresh_addresses() == [relayed]
        assert membership.reachability() is Reachability.RELAYED
        relayed = direct
        assert await membership.refresh_addresses() == []
        assert membership.reachability() is Reachability.OUTBOUND_ONLY


async def test_p2pd_tells_how_it_is_and_its_log_what_autonat_finds(tmp_path):
    async with transport(identity(1), tmp_path / "a") as one, transport(identity(2), tmp_path / "b") as two:
        await two.connect(identity(1).author, await one.addresses())
        health = await one.health()
        assert health.connections == 1
        assert health.memory_bytes > 1 << 20
        assert health.open_files > 0
        assert health.reachability == "unknown"
        for line, finding in (
            ('{"logger":"autonat","msg":"NAT status is private"}', "private"),
            ('{"logger":"autonat","msg":"dialback failed: NAT status is public"}', "private"),
            ('{"logger":"swarm2","msg":"NAT status is public"}', "private"),
            ('["NAT status is public"]', "private"),
            ('{"logger":"autonat","msg":"NAT status is public"}', "public"),
            ('{"logger":"autonat","msg":["NAT status is unknown"]}', "public"),
            ('{"logger":"autonat","msg":"NAT status is unknown"}', "unknown"),
        ):
            one.p2p._take(line)
            health = await one.health()
            assert health.reachability == finding, line
        await one.close()
        assert await one.health() is None


# --- what a node does not do for strangers ----------------------------------------------------------------------------

HOP = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE, RESERVED = b"\x02\x08\x00", b"\x08\x02"  # circuit v2: HopMessage of type RESERVE; the answer's type, STATUS


async def reached_through(relay, shy, caller):
    """Whether `caller` gets at `shy` through `relay`, which all that listen may be asked for."""
    where = (await relay.addresses())[0]
    for one in (shy, caller):
        await one.connect(relay.p2p.peer_id.to_bytes(), [where])
    with contextlib.suppress(ControlFailure):  # such a stream is not spoken there
        _, reader, writer = await shy.p2p._client.stream_open(relay.p2p.peer_id, (HOP,))
        writer.write(RESERVE)
        await asyncio.wait_for(reader.readuntil(RESERVED), PATIENCE)  # its length may come in a part of its own
        writer.close()
    try:
        await caller.connect(shy.p2p.peer_id.to_bytes(), [f"{where}/p2p-circuit/p2p/{shy.p2p.peer_id}"])
    except Unreachable:
        return False
    return True


async def test_row_39_others_are_reached_through_a_public_node_only_if_its_owner_asked_for_that(tmp_path, monkeypatch):
    kind = p2pd._private

    def public(sockets, *more):  # AutoNAT does not call a loopback address so
        return kind(sockets, *more, "-forceReachabilityPublic=1")

    monkeypatch.setattr(p2pd, "_private", public)
    async with (
        transport(identity(1), tmp_path / "a", relay_for_others=True) as relay,
        transport(identity(2), tmp_path / "b", listen=False) as shy,
        transport(identity(3), tmp_path / "c") as caller,
        transport(identity(4), tmp_path / "d") as other,
    ):
        assert not await reached_through(other, shy, caller)
        assert await reached_through(relay, shy, caller)


async def test_row_40_p2pd_listens_for_peers_and_for_nobody_else_and_tells_what_is_announced(tmp_path):
    async with transport(identity(1), tmp_path, quic=True, announce=("/ip4/8.8.4.4/tcp/4001",)) as network:
        assert await network.addresses() == [f"/ip4/8.8.4.4/tcp/4001/p2p/{identity(1).peer_id}"]
        held = psutil.Process(network.pid).net_connections("inet")
        assert {one.laddr.port for one in held if one.status == psutil.CONN_LISTEN} == {network.port}
        assert {one.laddr.port for one in held if one.type == socket.SOCK_DGRAM} <= {network.port}


# --- one key, one node ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listening(who):
    with tempfile.TemporaryDirectory(prefix="ftis-") as scratch:
        who.keep(Path(scratch) / "key")
        yield Listening(Path(scratch) / "key", Path(scratch), "127.0.0.1")


async def test_a_second_node_of_a_key_is_found_anywhere(tmp_path, monkeypatch):
    alive = identity(2)
    free = identity(3)
    async with member(1, tmp_path) as bootstrap, member(2, tmp_path, [bootstrap.address]) as twin:
        await eventually(lambda: bootstrap.met(twin), "they meet")
        async with listening(alive) as how:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                nobody = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{identity(4).peer_id}"
                monkeypatch.setattr("ftis_node.swarm.wire.libp2p.DIAL_SECONDS", PATIENCE)
                assert await somebody_else(how, alive.author, [nobody, bootstrap.address], PATIENCE)
            assert not await somebody_else(how, free.author, [bootstrap.address], 5.0)
            assert list(how.sockets.glob("*.sock")) == []
    async with listening(alive) as how:
        assert not await somebody_else(how, alive.author, [bootstrap.address], 2.0), "there is nobody to ask"


# --- the doctor -------------------------------------------------------------------------------------------------------


async def found_by(peers, home=Path("/nowhere"), **settings):
    chosen = Settings(**{"host": "127.0.0.1", "quic": False, **settings})
    return {finding.subject: finding async for finding in look_around(chosen, Home(home), peers, 0.0)}


async def test_the_doctor_dials_peers_and_says_what_it_saw(tmp_path):
    async with member(1, tmp_path) as node:
        found = await found_by([node.address])
        assert {subject: finding.verdict for subject, finding in found.items()} == {
            "p2pd": "ok",
            "addresses": "warn",
            "peer": "ok",
            "clock": "ok",
            "reachability": "warn",
        }
        assert node.swarm.membership.active_view == {}, "it is no member"
    found = await found_by([node.address])
    assert found["peer"].verdict == "fail"
    assert "reachability" not in found
    assert "listens nowhere" in (await found_by([], listen=False))["addresses"].text.replace("This node ", "")


async def test_without_a_name_the_doctor_dials_what_the_home_knows_as_a_start_would(tmp_path):
    home = tmp_path / "home"
    dead = f"/ip4/127.0.0.1/tcp/1025/p2p/{identity(9).peer_id}"
    name = dead.replace("ip4/127.0.0.1", "dns4/node.example")
    home.mkdir()
    async with member(1, tmp_path) as node:
        KnownAddresses(given=[dead], met=[node.address, dead, name]).write(Home(home).peers)
        found = [one async for one in look_around(Settings(host="127.0.0.1", quic=False), Home(home), [], 0.0)]
        assert [one.verdict for one in found if one.subject == "peer"] == ["warn", "warn", "ok"]
        assert f"{name} is not dialled: only this node's owner" in found[2].text
        assert dead in found[3].text
        assert "peers" not in {one.subject for one in found}
    found_alone = await found_by([], home)
    assert found_alone["peer"].verdict == "warn"
    assert found_alone["peers"].verdict == "warn"


@pytest.mark.parametrize(
    ("network", "peers", "verdicts"),
    [
        (("direct", "public", 0), 3, {"peers": "ok", "reachability": "ok"}),
        (("direct", "unknown", 0), 3, {"peers": "ok", "reachability": "warn"}),
        (("outbound-only", "private", 2), 0, {"p2pd": "warn", "peers": "warn", "reachability": "warn"}),
        (("relayed", "private", 0), 1, {"peers": "ok", "reachability": "ok"}),
    ],
)
def test_the_doctor_reads_a_nodes_status(network, peers, verdicts):
    how, autonat, restarts = network
    told = msgspec.to_builtins(Health(autonat, 0, 0, 0.0, 0))
    status = {
        "addresses": ["/ip4/8.8.4.4/tcp/1/p2p/x"],
        "peers": peers,
        "network": {"reachability": how, "p2pd_restarts": restarts, "p2pd": told},
    }
    found = {finding.subject: finding.verdict for finding in of_a_running_node(answered(**status))}
    assert found == {"addresses": "ok", **verdicts}
    left_out = Peers(peers=[], left_out=[LeftOut("x", "it is not dialled")])
    assert any(
        "x is left out: it is not dialled" in one.text for one in of_a_running_node(answered(**status), left_out)
    )
    assert [*of_a_running_node(answered(reason="Loading."))][-1].verdict == "warn"
