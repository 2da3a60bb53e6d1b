"""Finding nodes of one local network by mDNS (RFC 6762, RFC 6763), off by default: `join --lan` and `ftis-node runs`.

Answers are words of strangers. Only addresses within this machine's own networks are taken from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
from zeroconf import InterfaceChoice, IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from ftis_node.config.run import Run
from ftis_node.packet import RUN_ID_BYTES
from ftis_node.swarm.addresses import FIRST_PORT
from ftis_node.swarm.handshake import PROTOCOL_MAJOR, plain
from ftis_node.swarm.identity import author_of, peer_id

SERVICE = "_ftis-node._tcp.local."
ASKED_MAX = 64  # at a time for their records
NODES_MAX = 256
ADDRESSES_MAX = 4  # of one node
TASK_MAX = 64
ANSWER_SECONDS = 3.0

logger = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class LanNode:
    """A node as it tells of itself. peer: 38-byte peer id. run: 16 bytes. addresses: multiaddrs in own networks."""

    peer: bytes
    run: bytes
    task: str
    protocol: int
    addresses: tuple[str, ...]


class Lan:
    """Tells the local network of an open run's node, and hears of others."""

    def __init__(self, host: str, heard: Callable[[LanNode], None]) -> None:
        """
        Args:
            host: the address to listen on, as in the settings.
            heard: called with each node that is found.
        """
        self._host, self._heard = host, heard
        self._asking: set[asyncio.Task[None]] = set()
        self._networks = own_networks()
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Listen. Raises OSError if this machine has no multicast."""
        every = ipaddress.ip_address(self._host).is_unspecified
        interfaces: Any = InterfaceChoice.All if every else [self._host]
        version = IPVersion.V6Only if ":" in self._host and not every else IPVersion.V4Only
        self._zeroconf = AsyncZeroconf(interfaces=interfaces, ip_version=version)
        self._stack.push_async_callback(self._zeroconf.async_close)
        browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._noticed])
        self._stack.push_async_callback(browser.async_cancel)

    async def tell(self, run: Run, author: bytes, port: int) -> None:
        """Name this node and its run to the local network; the run of members only is never named."""
        if run.founder:
            raise ValueError("a private run is not for the local network to know")
        own = (address for address, _ in own_addresses() if self._host in ("0.0.0.0", "::", str(address)))
        info = AsyncServiceInfo(
            SERVICE,
            f"{peer_id(author)}.{SERVICE}",
            parsed_addresses=[str(address) for address in own if address.version == 4][:ADDRESSES_MAX],
            port=port,
            properties={"run": run.id.hex(), "task": run.task[:TASK_MAX], "protocol": str(PROTOCOL_MAJOR)},
            server=f"{peer_id(author)}.local.",
        )
        await (await self._zeroconf.async_register_service(info))

    async def close(self) -> None:
        """Take the own record back and end."""
        for task in self._asking:
            task.cancel()
        await self._stack.aclose()

    def _noticed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed or len(self._asking) >= ASKED_MAX:
            return
        task = asyncio.create_task(self._ask(zeroconf, name))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        try:
            if not await info.async_request(zeroconf, ANSWER_SECONDS * 1000):
                return
            found = read_node(
                name.removesuffix(f".{SERVICE}"), info.properties, info.parsed_addresses(), info.port, self._networks
            )
        except ValueError as error:
            logger.debug("%s tells nonsense of itself: %s", plain(name, 64), error)
        except Exception as error:  # zeroconf raises anything from a socket error to what its parser raises
            logger.debug("%s cannot be asked: %r", plain(name, 64), error)
        else:
            self._heard(found)


def read_node(
    peer: str,
    properties: Mapping[bytes, bytes | None],
    addresses: Iterable[str],
    port: int | None,
    networks: Iterable[Network],
) -> LanNode:
    """A node of its service's records. Raises ValueError if they are not of this form."""
    author = author_of(peer)
    run = bytes.fromhex((properties.get(b"run") or b"").decode("ascii"))
    protocol = (properties.get(b"protocol") or b"").decode("ascii")
    if len(run) != RUN_ID_BYTES or not (protocol.isdigit() and len(protocol) < 4):
        raise ValueError("no run id, or no protocol")
    if port is None or not FIRST_PORT <= port < 1 << 16:
        raise ValueError(f"port {port}")
    near, own = [], list(networks)
    for text in addresses:
        address = ipaddress.ip_address(text)
        if any(address in network for network in own) and getattr(address, "scope_id", None) is None:
            near.append(f"/ip{address.version}/{address}/tcp/{port}/p2p/{peer}")
    task = plain((properties.get(b"task") or b"").decode(errors="replace"), TASK_MAX)
    return LanNode(author, run, task, int(protocol), tuple(near[:ADDRESSES_MAX]))


async def look_around(host: str, seconds: float) -> list[LanNode]:
    """The nodes that tell of themselves on the local network, heard within some seconds; at most `NODES_MAX` of them.

    Raises:
        OSError: this machine has no multicast.
    """
    found: dict[bytes, LanNode] = {}
    lan = Lan(host, lambda node: found.update({node.peer: node} if len(found) < NODES_MAX else {}))
    try:
        await lan.start()
        await asyncio.sleep(seconds)
    finally:
        await lan.close()
    return sorted(found.values(), key=lambda node: (node.run, node.peer))


def own_addresses() -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, Network]]:
    """This machine's addresses, each with its network."""
    found = []
    for interface in psutil.net_if_addrs().values():
        for one in interface:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.netmask and "%" not in one.address:
                width = bin(int(ipaddress.ip_address(one.netmask))).count("1")
                address = ipaddress.ip_interface(f"{one.address}/{width}")
                found.append((address.ip, address.network))
    return found


def own_networks() -> list[Network]:
    """The networks that this machine is in."""
    return [network for _, network in own_addresses()]
