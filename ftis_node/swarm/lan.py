"""Finding nodes of one local network by mDNS (RFC 6762, RFC 6763), off by default: `join --lan` and `ftis-node runs`.

Answers are words of strangers. Only addresses in the network of the interface that they came in by are taken.
"""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from ftis_node.config.run import Run
from ftis_node.packet import RUN_ID_BYTES
from ftis_node.swarm.addresses import FIRST_PORT, is_plain
from ftis_node.swarm.handshake import PROTOCOL_MAJOR, plain
from ftis_node.swarm.identity import author_of, peer_id
from ftis_node.swarm.local_networks import Interface, own_interfaces

SERVICE = "_ftis-node._tcp.local."
ASKED_MAX = 64  # at a time for their records
NODES_MAX = 256
ADDRESSES_MAX = 4  # of one node
TASK_MAX = WORD_MAX = 64
ANSWER_SECONDS = 3.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanNode:
    """A node as it tells of itself. peer: 38-byte peer id. run: 16 bytes. addresses: multiaddrs in its network.

    model, name: none where its owner wants no self-reports.
    """

    peer: bytes
    run: bytes
    task: str
    protocol: int
    addresses: tuple[str, ...]
    model: str = ""
    name: str = ""


class Lan:
    """Tells the local network of an open run's node, and hears of others."""

    def __init__(self, host: str, heard: Callable[[LanNode], None]) -> None:
        """
        Args:
            host: the address to listen on, as in the settings; 0.0.0.0 or ::, all but this machine's own.
            heard: called with each node that is found.
        """
        self._host, self._heard = host, heard
        self._asking: set[asyncio.Task[None]] = set()
        self._open: list[tuple[AsyncZeroconf, Interface]] = []  # one for each interface
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Listen. Raises OSError if this machine has no multicast."""
        every = ipaddress.ip_address(self._host).is_unspecified
        for name, own in own_interfaces():
            if str(own.ip) == self._host or (every and own.version == 4 and not own.is_loopback):
                with contextlib.suppress(OSError):
                    self._listen(name, own)
        if not self._open:
            raise OSError(f"{self._host} has no network with multicast")

    def _listen(self, name: str, own: Interface) -> None:
        zeroconf = AsyncZeroconf(interfaces=[str(own.ip)])
        self._stack.push_async_callback(zeroconf.async_close)
        engine = zeroconf.zeroconf.engine  # each of its sockets would else hear what comes in by other interfaces
        for one in filter(None, (engine._listen_socket, *engine._respond_sockets)):
            if hasattr(socket, "SO_BINDTODEVICE"):  # Linux
                one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[functools.partial(self._noticed, own)])
        self._stack.push_async_callback(browser.async_cancel)
        self._open.append((zeroconf, own))

    async def tell(self, run: Run, author: bytes, port: int, **about: str) -> None:
        """Name this node and its run to the local network; the run of members only is never named.

        Args:
            about: `model` and `name`, as far as others may know them.
        """
        if run.founder:
            raise ValueError("a private run is not for the local network to know")
        peer = peer_id(author)
        told = {"run": run.id.hex(), "task": run.task[:TASK_MAX], "protocol": str(PROTOCOL_MAJOR)}
        told |= {key: word[:WORD_MAX] for key, word in about.items()}
        for zeroconf, own in self._open:
            place: dict[str, Any] = {"parsed_addresses": [str(own.ip)], "port": port, "server": f"{peer}.local."}
            info = AsyncServiceInfo(SERVICE, f"{peer}.{SERVICE}", properties=told, **place)
            # Two interfaces in one network tell the same, and nobody else's word keeps this node from telling.
            await (await zeroconf.async_register_service(info, cooperating_responders=True))

    async def close(self) -> None:
        """Take the own record back and end."""
        for task in self._asking:
            task.cancel()
        await self._stack.aclose()

    def _noticed(
        self, own: Interface, *, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if state_change is ServiceStateChange.Removed or len(self._asking) >= ASKED_MAX:
            return
        task = asyncio.create_task(self._ask(zeroconf, name, own))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, zeroconf: Zeroconf, name: str, own: Interface) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        try:
            if not await info.async_request(zeroconf, ANSWER_SECONDS * 1000):
                return
            peer = name.removesuffix(f".{SERVICE}")
            found = read_node(peer, info.properties, info.parsed_addresses(), info.port, own)
        except ValueError as error:
            logger.debug("%s tells nonsense of itself: %s", plain(name, 64), error)
        except Exception as error:  # zeroconf raises anything from a socket error to what its parser raises
            logger.debug("%s cannot be asked: %r", plain(name, 64), error)
        else:
            self._heard(found)


def read_node(
    peer: str, properties: Mapping[bytes, bytes | None], addresses: Iterable[str], port: int | None, own: Interface
) -> LanNode:
    """A node of its service's records, heard by an interface. Raises ValueError if they are not of this form."""
    author = author_of(peer)
    run = bytes.fromhex((properties.get(b"run") or b"").decode("ascii"))
    protocol = (properties.get(b"protocol") or b"").decode("ascii")
    if len(run) != RUN_ID_BYTES or not (protocol.isdigit() and len(protocol) < 4):
        raise ValueError("no run id, or no protocol")
    if port is None or not FIRST_PORT <= port < 1 << 16:
        raise ValueError(f"port {port}")
    near = []
    for place in map(ipaddress.ip_address, addresses):
        text = f"/ip{place.version}/{place}/tcp/{port}/p2p/{peer}"
        if place in own.network and place != own.network.broadcast_address and "%" not in text and is_plain(text):
            near.append(text)
    task, model, name = (
        plain((properties.get(key) or b"").decode(errors="replace"), WORD_MAX) for key in (b"task", b"model", b"name")
    )
    return LanNode(author, run, task, int(protocol), tuple(near[:ADDRESSES_MAX]), model, name)


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
