"""p2pd dies or hangs, and the node is back in the swarm within seconds, where it was."""

import asyncio
import contextlib
import os
import signal
import socket

import psutil
import pytest
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client

from ftis_node.errors import UserError
from ftis_node.swarm.wire import libp2p, p2pd
from tests.support.swarm import all_meet, eventually, member


@contextlib.asynccontextmanager
async def pair(path):
    """Two nodes that have met."""
    async with member(1, path) as one, member(2, path, [one.address]) as two:
        await all_meet(one, two)
        yield one, two


def sockets_of(node):
    return sorted(node.transport.listening.sockets.glob("*.sock"))


async def is_back(node, pid, times=1):
    await eventually(lambda: node.swarm.supervisor.restarts >= times, "another p2pd is there")
    assert node.transport.pid != pid
    assert not psutil.pid_exists(pid)


HARMS = (
    lambda node: os.kill(node.transport.pid, signal.SIGKILL),
    lambda node: os.kill(node.transport.pid, signal.SIGSTOP),
    lambda node: node.transport.p2p._client.control._read_task.cancel(),  # it says that it lives, but no call arrives
)


async def test_a_node_whose_p2pd_is_killed_frozen_or_deaf_is_back_where_it_was_and_goes_on(tmp_path):
    async with pair(tmp_path) as (one, two):
        await eventually(lambda: len(sockets_of(one)) == 2, "all sockets are there")
        addresses = await one.transport.addresses()
        made = set()
        for times, harm in enumerate(HARMS, start=1):
            pid = one.transport.pid
            harm(one)
            await is_back(one, pid, times)
            assert await one.transport.addresses() == addresses, "others find it where it was"
            await eventually(lambda: len(sockets_of(one)) == 2, "its sockets are there, and no others")
            made |= one.make(2) | two.make(2)
            await eventually(lambda made=made: {*one.admitted, *two.admitted} == made, "both get what is made then")
        assert one.met(two)
        assert two.met(one)


async def test_a_p2pd_that_cannot_be_spoken_to_is_ended(tmp_path, monkeypatch):
    async def fails(**_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Client, "create", fails)
    before = set(psutil.Process().children())
    with pytest.raises(UserError, match="Too many open files"):
        async with member(1, tmp_path):
            pass
    assert not {one for one in psutil.Process().children() if one.name() == "p2pd"} - before


async def test_while_ones_own_p2pd_is_slow_no_peer_is_blamed_and_it_has_longer_after_each_restart(
    tmp_path, monkeypatch, caplog
):
    """To start and to answer. On a crowded machine nodes would else do little but start it again."""
    identify = Client.identify
    answered = []
    async with pair(tmp_path) as (one, two):
        ping = one.transport._answers
        pid = one.transport.pid
        addresses = await one.transport.addresses()

        async def slow(client):
            await asyncio.sleep(0.0 if client is two.transport.p2p._client else 0.5)
            return await identify(client)

        async def answers():
            answered.append(await ping())
            return answered[-1]

        monkeypatch.setattr(Client, "identify", slow)
        monkeypatch.setattr(one.transport, "_answers", answers)
        monkeypatch.setattr(p2pd, "START_SECONDS", 0.02)
        monkeypatch.setattr("ftis_node.swarm.supervisor.FIRST_PAUSE", 0.01)
        monkeypatch.setattr(libp2p, "PING_SECONDS", 0.3)
        monkeypatch.setattr(libp2p, "LONGEST_PATIENCE", 1e4)
        await eventually(lambda: not one.transport.up, "it is noticed")
        for _ in range(5):
            one.swarm.membership.failed(two.author)
        assert one.met(two)
        await is_back(one, pid)
        assert "did not start" in caplog.text
        await eventually(lambda: any(answered), "it answers in time")
        assert await one.transport.addresses() == addresses
        await eventually(lambda: not one.transport.up, "while an answer is late, no peer is to blame")
        made = two.make(1)
        await eventually(lambda: set(one.admitted) == made, "it goes on")


async def test_a_port_taken_meanwhile_is_given_up_and_peers_know_the_next(tmp_path, monkeypatch):
    """By its address they find the node, and name it, when the connections have ended."""
    async with pair(tmp_path) as (other, node):
        port = node.transport.port
        kill = p2pd.kill
        view = other.swarm.membership.active_view
        known = node.swarm.membership
        taken = socket.socket()

        async def kill_and_take(p2p, sockets):
            await kill(p2p, sockets)
            taken.bind(("127.0.0.1", port))
            taken.listen()

        monkeypatch.setattr(libp2p, "kill", kill_and_take)
        with taken:
            pid = node.transport.pid
            os.kill(pid, signal.SIGKILL)
            await is_back(node, pid)
            await eventually(lambda: [peer.addresses for peer in view.values()] == [known.own_addresses], "it is known")
            assert f"/tcp/{port}/" not in known.own_addresses[0]
        monkeypatch.undo()
