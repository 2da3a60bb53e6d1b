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
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from ftis_node.lab.bench.swarm import Host

PUBLIC, PRIVATE = "45.33.7", "192.168.7"  # nothing leaves the namespaces; AutoNAT only believes in public addresses
NODES = ("ftis-p0", "ftis-p1", "ftis-p2", "ftis-p3", "ftis-private", "ftis-newcomer")
ROUTER = "ftis-router"
BRIDGE = "ftis-world"
GROUPS = 6
SETUP = {"quic": True, "interval": 1.0}


def _ip(*arguments: str):
    subprocess.run(["ip", *arguments], check=True)


def _within(name: str, *line: str):
    subprocess.run(["ip", "netns", "exec", name, *line], check=True)


@contextlib.contextmanager
def world() -> Iterator[None]:
    """The namespaces; all are gone afterwards."""
    with contextlib.ExitStack() as stack:
        _ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(_ip, "link", "del", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for number, name in enumerate((*NODES, ROUTER)):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _within(name, "ip", "link", "set", "lo", "up")
            if name == "ftis-private":
                continue
            _ip("link", "add", f"ftis-w{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            stack.callback(_ip, "link", "del", f"ftis-w{number}")  # else it is gone at the kernel's leisure
            _ip("link", "set", f"ftis-w{number}", "master", BRIDGE, "up")
            _within(name, "ip", "addr", "add", f"{PUBLIC}.{number + 1}/24", "dev", "eth0")
            _within(name, "ip", "link", "set", "eth0", "up")
        _ip("link", "add", "eth1", "netns", ROUTER, "type", "veth", "peer", "name", "eth0", "netns", "ftis-private")
        for name, device, address in ((ROUTER, "eth1", 1), ("ftis-private", "eth0", 2)):
            _within(name, "ip", "addr", "add", f"{PRIVATE}.{address}/24", "dev", device)
            _within(name, "ip", "link", "set", device, "up")
        _within("ftis-private", "ip", "route", "add", "default", "via", f"{PRIVATE}.1")
        _within(ROUTER, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        masquerade = ("-t", "nat", "-A", "POSTROUTING", "-s", f"{PRIVATE}.0/24", "-o", "eth0", "-j", "MASQUERADE")
        _within(ROUTER, "iptables", *masquerade)
        state = ("-m", "state", "--state", "NEW", "-j", "DROP")
        _within(ROUTER, "iptables", "-A", "FORWARD", "-i", "eth0", "-o", "eth1", *state)
        yield


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
    with world():
        async with contextlib.AsyncExitStack() as stack:
            hosts = [await Host.start(stack, ("ip", "netns", "exec", name)) for name in NODES]
            public = hosts[:4]
            private = hosts[4]
            newcomer = hosts[5]
            addresses = []
            for number, host in enumerate(public):
                setup = SETUP | {"host": f"{PUBLIC}.{number + 1}", "relay_for_others": relays}
                addresses += (await host.do("start", numbers=[number], tokens=384, setup=setup))["addresses"]
            setup = SETUP | {"host": "0.0.0.0", "relays": addresses if relays else []}
            await private.do("start", numbers=[4], tokens=384, setup=setup)
            for host in (*public, private):
                await host.do("join", bootstraps=addresses[:1])
            seconds, figures = await _reached(private, "relayed" if relays else "outbound-only", 120)
            found = {"reachability": figures["reachability"], "seconds": seconds, "addresses": figures["addresses"]}
            members = [*public, private]
            if relays:
                setup = SETUP | {"host": f"{PUBLIC}.6"}
                await newcomer.do("start", numbers=[5], tokens=384, setup=setup)
                await newcomer.do("join", bootstraps=figures["addresses"])
                members.append(newcomer)
                peers = await newcomer.do("wait", key="peers", count=5, seconds=30)
                found["newcomer_peers"] = peers["least"]
            for command in ({"what": "make", "groups": GROUPS}, {"what": "announce"}):
                for host in members:
                    await host.do(**command)
            count = GROUPS * (len(members) - 1)
            told = [await host.do("wait", key="admitted", count=count, seconds=30) for host in members]
            found["missing"] = sum(count - answer["least"] for answer in told)
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
    if missing := [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]:
        sys.exit(f"{', '.join(missing)} cannot be found: install the packages iproute2 and iptables.")
    asyncio.run(main())
