"""A node behind a router that lets nobody in, among nodes with public addresses: `make nat`, as root.

All in network namespaces: four public nodes, a router that translates addresses, a private node behind it, and a
newcomer who knows the private node by its relayed address alone. What is found is one JSON object on stdout; the exit
code is 1 if anything is not as it must be.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from ftis_node.lab.bench.namespaces import namespaces, run_tool
from ftis_node.lab.bench.swarm import Host

PUBLIC = "45.33.7"  # nothing leaves the namespaces; AutoNAT only believes in public addresses
PRIVATE = "192.168.7"
OUTSIDE = 4  # public nodes that are there from the beginning
GROUPS = 6
SETUP = {"quic": True, "interval": 1.0}


def _within(name: str, *line: str):
    run_tool("ip", "netns", "exec", name, *line)


@contextlib.contextmanager
def world() -> Iterator[list[str]]:
    """The names of the nodes' namespaces: public ones, the newcomer's, the private one's. All are gone afterwards."""
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(namespaces(OUTSIDE + 2, None, "ftis-nat"))
        names = [name for name, _ in found]
        for number, name in enumerate(names):
            _within(name, "ip", "addr", "flush", "dev", "eth0")
            _within(name, "ip", "addr", "add", f"{PUBLIC}.{number + 1}/24", "dev", "eth0")
        *nodes, router = names
        private = "ftis-nat-in"
        run_tool("ip", "netns", "add", private)
        stack.callback(run_tool, "ip", "netns", "del", private)
        run_tool("ip", "link", "add", "eth1", "netns", router, "type", "veth", "peer", "name", "eth0", "netns", private)
        for name, device, address in ((router, "eth1", 1), (private, "eth0", 2)):
            _within(name, "ip", "addr", "add", f"{PRIVATE}.{address}/24", "dev", device)
            _within(name, "ip", "link", "set", device, "up")
        _within(private, "ip", "link", "set", "lo", "up")
        _within(private, "ip", "route", "add", "default", "via", f"{PRIVATE}.1")
        _within(router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        masquerade = ("-t", "nat", "-A", "POSTROUTING", "-s", f"{PRIVATE}.0/24", "-o", "eth0", "-j", "MASQUERADE")
        _within(router, "iptables", *masquerade)
        state = ("-m", "state", "--state", "NEW", "-j", "DROP")
        _within(router, "iptables", "-A", "FORWARD", "-i", "eth0", "-o", "eth1", *state)
        yield [*nodes, private]


async def _reached(node: Host, wanted: str, seconds: float) -> tuple[float, dict[str, Any]]:
    """(after how long it is reached as wanted, its figures then)"""
    began = time.monotonic()
    while True:
        figures = (await node.do("figures"))["nodes"][0]
        elapsed = time.monotonic() - began
        if figures["reachability"] == wanted or elapsed > seconds:
            return elapsed, figures
        await asyncio.sleep(0.5)


async def private_node(*, relays: bool) -> dict[str, Any]:
    """How a private node fares, with relays or without."""
    async with contextlib.AsyncExitStack() as stack:
        names = stack.enter_context(world())
        *public, newcomer, private = [await Host.start(stack, ("ip", "netns", "exec", name)) for name in names]
        addresses = []
        for number, host in enumerate(public):
            setup = SETUP | {"host": f"{PUBLIC}.{number + 1}", "relay_for_others": relays}
            addresses += (await host.do("start", numbers=[number], tokens=384, setup=setup))["addresses"]
        setup = SETUP | {"host": "0.0.0.0", "relays": addresses if relays else []}
        await private.do("start", numbers=[OUTSIDE], tokens=384, setup=setup)
        members = [*public, private]
        for host in members:
            await host.do("join", bootstraps=addresses[:1])
        seconds, figures = await _reached(private, "relayed" if relays else "outbound-only", 120)
        found = {
            "reachability": figures["reachability"],
            "seconds": seconds,
            "addresses": figures["addresses"],
        }
        if relays:
            setup = SETUP | {"host": f"{PUBLIC}.{OUTSIDE + 1}"}
            await newcomer.do("start", numbers=[OUTSIDE + 1], tokens=384, setup=setup)
            await newcomer.do("join", bootstraps=figures["addresses"])
            members.append(newcomer)
            peers = await newcomer.do("wait", key="peers", count=OUTSIDE + 1, seconds=30)
            found["newcomer_peers"] = peers["least"]
        for host in members:
            await host.do("make", groups=GROUPS)
        for host in members:
            await host.do("announce")
        count = GROUPS * (len(members) - 1)
        found["missing"] = 0
        for host in members:
            told = await host.do("wait", key="admitted", count=count, seconds=30)
            found["missing"] += count - told["least"]
        return found


async def main():
    with_relays = await private_node(relays=True)
    without = await private_node(relays=False)
    problems = []
    if with_relays["reachability"] != "relayed" or with_relays["newcomer_peers"] < 5 or with_relays["missing"]:
        problems.append("with relays")
    if without["reachability"] != "outbound-only" or without["addresses"] or without["missing"]:
        problems.append("without relays")
    print(json.dumps({"problems": problems, "with_relays": with_relays, "without_relays": without}, indent=1))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("Network namespaces need root: run this as root.")
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} cannot be found: install the packages iproute2 and iptables.")
    asyncio.run(main())
