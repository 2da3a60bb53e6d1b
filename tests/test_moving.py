"""Machines whose network comes late, and changes; friends in one room: real nodes in network namespaces, as root."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from ftis_node.lab.bench.namespaces import namespaces
from tests.support.daemons import until
from tests.support.swarm import identity

NODE = """
import asyncio, sys
from pathlib import Path
from tests.support.swarm import member

async def main(number, path, host, *named):
    async with member(int(number), Path(path), list(named), cache=True, host=host, port=4001) as node:
        while True:
            view, tried = node.swarm.membership.active_view.values(), node.swarm.membership.addresses._passive_view
            failures = sum(one.failures for one in tried.values())
            Path(path, number).write_text(f"{[peer.addresses for peer in view]} {'in vain ' * failures}")
            await asyncio.sleep(0.5)

asyncio.run(main(*sys.argv[1:]))
"""
NEVER_BEFORE = "in vain in vain in vain"


def ip(*line):
    subprocess.run(["ip", *line], check=True)


def moves(place, before, after):
    ip("-n", place, "addr", "del", f"{before}/24", "dev", "eth0")
    ip("-n", place, "addr", "add", f"{after}/24", "dev", "eth0")


@contextlib.contextmanager
def running(program, place, number, path, *words):
    """A program in a namespace; what it sees it writes into the file of its number."""
    (path / str(number)).unlink(missing_ok=True)
    line = ["ip", "netns", "exec", place, sys.executable, "-c", program, str(number), str(path), *words]
    with subprocess.Popen(line) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def node(place, number, path, host, *named):
    """A node; what is yielded waits until it sees this: addresses of a peer, or failures."""
    seen = path / str(number)
    with running(NODE, place, number, path, host, *named) as process:
        yield lambda what: until(lambda: seen.exists() and what in seen.read_text(), f"{place} sees {what!r}", process)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_nodes_meet_when_an_interface_comes_up_and_again_when_addresses_change(tmp_path):
    kept = tmp_path / "member-1" / "peers.json"
    with namespaces(2, None, "ftis-m") as ((a, first), (b, second)):
        ip("-n", b, "link", "set", "eth0", "down")
        where = f"/ip4/{first}/tcp/4001/p2p/{identity(1).peer_id}"
        with node(b, 2, tmp_path, "0.0.0.0", where) as waiting:
            with node(a, 1, tmp_path, first) as there:
                waiting(NEVER_BEFORE)
                ip("-n", b, "link", "set", "eth0", "up")
                waiting(first)
                there(second)
                moves(b, second, "10.203.0.73")
                there("10.203.0.73")
                until(lambda: "10.203.0.73" in kept.read_text(), "it is kept for the next start")
            moves(a, first, "10.203.0.77")
            with node(a, 1, tmp_path, "10.203.0.77") as moved:
                moved("10.203.0.73")
                waiting("10.203.0.77")


FRIEND = """
import asyncio, json, sys
from pathlib import Path
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.invitation import read_line
from tests.test_private import private_member, ticket_of

async def main(number, path, host):
    path, line = Path(path), Path(path, f"ticket-{number}")
    ticket = read_line(line.read_text(), 0.0) if line.exists() else None
    async with private_member(int(number), path, ticket, cache=True, host=host, port=4001) as (node, _):
        for other in (2, 3) if number == "1" and not line.exists() else ():
            Path(path, f"ticket-{other}").write_text(ticket_of(node).text)
        while True:
            view = [peer_id(peer) for peer in node.swarm.membership.active_view]
            Path(path, number).write_text(json.dumps([view, len(node.admitted)]))
            node.make(1)
            await asyncio.sleep(0.5)

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def friend(place, number, path, host="0.0.0.0"):
    """A member of a private run; what is yielded waits until it has met all of these, and got more groups."""
    seen = path / str(number)

    def now():
        try:
            view, groups = json.loads(seen.read_text())
        except (OSError, ValueError):
            return [], 0
        return view, groups

    with running(FRIEND, place, number, path, host) as process:

        def meets(*others):
            wanted = {identity(other).peer_id for other in others}
            before = now()[1]
            until(lambda: wanted <= set(now()[0]), f"{number} meets {others}", process)
            until(lambda: now()[1] > before, f"{number} gets groups", process)

        yield meets


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_row_78_friends_of_one_inviter_meet_and_go_on_without_it(tmp_path):
    with namespaces(3, None, "ftis-r") as ((a, own), (b, _), (c, _)):
        with contextlib.ExitStack() as room:
            with friend(a, 1, tmp_path, own) as founder:
                until(lambda: (tmp_path / "ticket-3").exists(), "invitations")
                ann = room.enter_context(friend(b, 2, tmp_path))
                ben = room.enter_context(friend(c, 3, tmp_path))
                ann(1, 3)
                ben(1, 2)
                founder(2, 3)
            ann(3)
            ben(2)
        moves(a, own, "10.203.0.77")
        with friend(a, 1, tmp_path, "10.203.0.77") as founder, friend(b, 2, tmp_path) as ann:
            founder(2)
            ann(1)
            with friend(c, 3, tmp_path) as ben:
                ben(1, 2)
