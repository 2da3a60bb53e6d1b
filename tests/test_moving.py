"""A machine whose network comes late, and changes: two real nodes in network namespaces, as root."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemons import until
from tests.support.swarm import PATIENCE, identity

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]

_NODE = """
import asyncio, json, sys
from pathlib import Path
from tests.support.swarm import member

async def main(number, path, host, *named):
    async with member(int(number), Path(path), list(named), cache=True, host=host, port=4001) as node:
        while True:
            view = node.swarm.membership.active_view
            print(json.dumps({peer.hex(): one.addresses for peer, one in view.items()}), flush=True)
            await asyncio.sleep(0.5)

asyncio.run(main(*sys.argv[1:]))
"""


def ip(*line: str) -> None:
    subprocess.run(["ip", *line], check=True)


@contextlib.contextmanager
def node(place: str, number: int, path: Path, host: str, *named: str) -> Iterator[Callable[[str], None]]:
    """A node in a namespace; what is yielded waits until its view holds one peer with this address, or nobody."""
    line = ["ip", "netns", "exec", place, sys.executable, "-c", _NODE, str(number), str(path), host, *named]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:

        def sees(address: str) -> None:
            assert process.stdout is not None
            deadline, view = time.monotonic() + PATIENCE, {}
            while time.monotonic() < deadline and (said := process.stdout.readline()):
                view = json.loads(said)
                if [text for texts in view.values() for text in texts if address in text] or (not view and not address):
                    return
            raise AssertionError(f"{place} sees {view}, not {address!r}")

        try:
            yield sees
        finally:
            process.kill()


@pytest.fixture
def places() -> Iterator[tuple[str, str]]:
    """Two namespaces, in which only loopback is up."""
    names = "ftis-moving-a", "ftis-moving-b"
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def test_nodes_meet_when_an_interface_comes_up_and_again_when_addresses_change(
    tmp_path: Path, places: tuple[str, str]
) -> None:
    a, b = places
    ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
    for place, number in ((a, 1), (b, 2)):
        ip("-n", place, "addr", "add", f"10.203.9.{number}/24", "dev", "eth0")
    ip("-n", a, "link", "set", "eth0", "up")
    where = f"/ip4/10.203.9.1/tcp/4001/p2p/{identity(1).peer_id}"
    with node(b, 2, tmp_path, "0.0.0.0", where) as waiting:
        with node(a, 1, tmp_path, "10.203.9.1") as there:
            for _ in range(10):
                waiting("")
            ip("-n", b, "link", "set", "eth0", "up")
            waiting("10.203.9.1")
            there("10.203.9.2")
            ip("-n", b, "addr", "del", "10.203.9.2/24", "dev", "eth0")
            ip("-n", b, "addr", "add", "10.203.9.3/24", "dev", "eth0")
            there("10.203.9.3")
            kept = tmp_path / "member-1" / "peers.json"
            until(lambda: "10.203.9.3" in kept.read_text(), "it is kept for the next start")
        waiting("")
        ip("-n", a, "addr", "del", "10.203.9.1/24", "dev", "eth0")
        ip("-n", a, "addr", "add", "10.203.9.7/24", "dev", "eth0")
        with node(a, 1, tmp_path, "10.203.9.7") as moved:
            moved("10.203.9.3")
            waiting("10.203.9.7")
