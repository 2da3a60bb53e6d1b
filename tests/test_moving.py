"""A machine whose network comes late, and changes: two real nodes in network namespaces, as root."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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


def ip(*line: str) -> None:
    subprocess.run(["ip", *line], check=True)


@contextlib.contextmanager
def node(place: str, number: int, path: Path, host: str, *named: str) -> Iterator[Callable[[str], None]]:
    """A node in a namespace; what is yielded waits until it sees this: addresses of a peer, or failures."""
    (seen := path / str(number)).write_text("")
    line = ["ip", "netns", "exec", place, sys.executable, "-c", NODE, str(number), str(path), host, *named]
    process = subprocess.Popen(line)
    try:
        yield lambda what: until(lambda: what in seen.read_text(), f"{place} sees {what!r}", process)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_nodes_meet_when_an_interface_comes_up_and_again_when_addresses_change(tmp_path: Path) -> None:
    a, b = places = "ftis-moving-a", "ftis-moving-b"
    kept, where = tmp_path / "member-1" / "peers.json", f"/ip4/10.203.9.1/tcp/4001/p2p/{identity(1).peer_id}"
    with contextlib.ExitStack() as stack:
        for place in places:
            ip("netns", "add", place)
            stack.callback(ip, "netns", "del", place)
            ip("-n", place, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for place, number in ((a, 1), (b, 2)):
            ip("-n", place, "addr", "add", f"10.203.9.{number}/24", "dev", "eth0")
        ip("-n", a, "link", "set", "eth0", "up")
        waiting = stack.enter_context(node(b, 2, tmp_path, "0.0.0.0", where))
        with node(a, 1, tmp_path, "10.203.9.1") as there:
            waiting(NEVER_BEFORE)
            ip("-n", b, "link", "set", "eth0", "up")
            waiting("10.203.9.1")
            there("10.203.9.2")
            ip("-n", b, "addr", "del", "10.203.9.2/24", "dev", "eth0")
            ip("-n", b, "addr", "add", "10.203.9.3/24", "dev", "eth0")
            there("10.203.9.3")
            until(lambda: "10.203.9.3" in kept.read_text(), "it is kept for the next start")
        ip("-n", a, "addr", "del", "10.203.9.1/24", "dev", "eth0")
        ip("-n", a, "addr", "add", "10.203.9.7/24", "dev", "eth0")
        with node(a, 1, tmp_path, "10.203.9.7") as moved:
            moved("10.203.9.3")
            waiting("10.203.9.7")
