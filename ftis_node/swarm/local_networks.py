"""The local networks in which this node listens: where members of its private run may be dialled at their own word."""

import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_address, ip_interface
from pathlib import Path

import psutil

from ftis_node.host.clocks import boot_seconds
from ftis_node.swarm.addresses import FIRST_PORT, IpAddress, host_and_port, peer_at, scope

READ_SECONDS = 2.0  # for so long an answer of the kernel is used again
WIDEST = {4: 24, 6: 64}  # prefixes; of a wider network the part around this machine
NETWORK_DEVICES = Path("/sys/class/net")
# Networks of virtual machines that are no bridges for the kernel, and bridges where /sys shows another namespace.
VIRTUAL = ("docker", "br-", "virbr", "lxcbr", "lxdbr", "cni", "podman", "vboxnet", "vmnet", "veth")

Interface = IPv4Interface | IPv6Interface


@dataclass(frozen=True)
class _Found:
    """What the kernel says. near: /24 or /64, or narrower, of each own address at which the node listens. bridges:
    whole networks of containers and virtual machines. gateways: next hops of routes."""

    near: tuple[Interface, ...] = ()
    bridges: tuple[Interface, ...] = ()
    gateways: frozenset[IpAddress] = frozenset()


class LocalNetworks:
    """What may be dialled in the networks of this machine's interfaces, which may come, change and go."""

    def __init__(self, host: str) -> None:
        """
        Args:
            host: the address that the node listens on, as in the settings.
        """
        self._host = host
        self._read_at = -READ_SECONDS
        self._found = _Found()

    def why_not(self, address: str) -> str:
        """Why this private address is not dialled at its owner's word; "" if it is. The peer in the address is not
        compared with anybody."""
        place, port = host_and_port(address)
        if place is None or scope(address) != "private":
            return "a member may only name a plain address of a private network"
        if port < FIRST_PORT:
            return f"a member may only name a port from {FIRST_PORT} on"
        found = self._read()
        networks = [own.network for own in found.near if place in own.network]
        if not networks:
            return "outside the networks in which this node listens; if it is yours, name it with --peers"
        if any(place in bridge.network for bridge in found.bridges):
            return "in the network of a container bridge of this machine"
        if place in found.gateways:
            return "the gateway of this network"
        if any(place == own.ip for own in found.near):
            return "of this machine itself; if it is yours, name it with --peers"
        if any(network.num_addresses > 2 and place in (network[0], network[-1]) for network in networks):
            return "no host of its network has it"
        return ""

    def has(self, peer: bytes, addresses: Iterable[str]) -> bool:
        """Whether one of these addresses is the peer's, and may be dialled in these networks (`why_not`)."""
        return any(peer_at(text) == peer and not self.why_not(text) for text in addresses)

    def dialled_by_neighbours(self, addresses: Iterable[str]) -> list[str]:
        """Those of this node's addresses that a neighbour may dial: private ones, of interfaces where it listens."""
        places = {own.ip for own in self._read().near}
        return [text for text in addresses if scope(text) == "private" and host_and_port(text)[0] in places]

    def _read(self) -> _Found:
        """What the kernel says, at most two seconds old."""
        now = boot_seconds()
        if now >= self._read_at + READ_SECONDS:
            self._read_at = now
            self._found = _found(self._host)
        return self._found


def own_interfaces() -> list[tuple[str, Interface]]:
    """This machine's addresses with their networks, each with the name of its interface; without those of the link
    that have a zone (IPv6)."""
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            of_ip = one.family in (socket.AF_INET, socket.AF_INET6)
            if of_ip and one.netmask and "%" not in one.address:  # an address of the link has a zone after a %
                width = bin(int(ip_address(one.netmask))).count("1")
                found.append((name, ip_interface(f"{one.address}/{width}")))
    return found


def _found(host: str) -> _Found:
    """Ask the kernel for the networks of a node that listens on `host`; none if that is a name."""
    try:
        listens = ip_address(host)
    except ValueError:  # a name
        return _Found()
    near = list[Interface]()
    bridges = list[Interface]()
    for name, own in own_interfaces():
        if own.is_loopback or own.is_link_local:
            continue
        if _is_virtual(name):
            bridges.append(own)
        elif listens.is_unspecified or listens == own.ip:
            width = max(own.network.prefixlen, WIDEST[own.version])
            near.append(ip_interface(f"{own.ip}/{width}"))
    return _Found(tuple(near), tuple(bridges), frozenset(_gateways()))


def _is_virtual(name: str) -> bool:
    """Whether an interface leads to containers or virtual machines: a bridge without any device below it, or one that
    is named so."""
    if (NETWORK_DEVICES / name / "bridge").exists():
        return not _has_device(name)
    return name.startswith(VIRTUAL)


def _has_device(name: str, depth: int = 4) -> bool:
    """Whether an interface is a device, or has one below it, `depth` steps down at most: a bridge's ports, a VLAN's
    interface."""
    place = NETWORK_DEVICES / name
    if (place / "device").exists():
        return True
    below = [one.name.removeprefix("lower_") for one in place.glob("lower_*")]
    return depth > 0 and any(_has_device(one, depth - 1) for one in below)


def _gateways() -> Iterable[IpAddress]:
    """The next hops of this machine's routes, of IPv4 and then IPv6; 0.0.0.0 and :: too, for routes without one.
    Nothing where there is no /proc."""
    with suppress(OSError, ValueError, IndexError):  # no Linux
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            gateway = line.split()[2]  # hexadecimal, the last byte first
            yield IPv4Address(bytes.fromhex(gateway)[::-1])
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/net/ipv6_route").read_text().splitlines():
            next_hop = line.split()[4]
            yield IPv6Address(bytes.fromhex(next_hop))
