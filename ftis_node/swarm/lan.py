"""Finding nodes of one local network by mDNS (RFC 6762, RFC 6763), off by default: `join --lan` and `ftis-node runs`.

Answers are words of strangers. Only addresses in the network of the interface that they came in by are taken.

A node of a private run has a random name there, and tells nothing but a code that its members can read: its key, hidden
under the run's id, which no stranger knows, with an HMAC (RFC 2104).
"""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import logging
import operator
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from ftis_node.config.run import Run
from ftis_node.packet import RUN_ID_BYTES
from ftis_node.swarm.addresses import FIRST_PORT, IpAddress, is_plain
from ftis_node.swarm.handshake import PROTOCOL_MAJOR, plain
from ftis_node.swarm.identity import AUTHOR_BYTES, OfPeer, author_of, peer_id
from ftis_node.swarm.limits import Bounded
from ftis_node.swarm.local_networks import Interface, own_interfaces

SERVICE = "_ftis-node._tcp.local."
ASKED_MAX = 64  # at a time for their records
NODES_MAX = 256
ADDRESSES_MAX = 4  # of one node
TASK_MAX = WORD_MAX = 60  # letters: of four bytes each, with its key, a word fits into the 255 bytes of a text record
ANSWER_SECONDS = 3.0
HIDDEN = b"member"  # of a private run's node: the key of its code
NAME_BYTES = 16  # its random name

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


@dataclass(frozen=True)
class HiddenNode:
    """A node of a private run, of which only members can tell who it is. name: random. code: see `code_of`. places:
    multiaddrs without a peer id, in its network."""

    name: str
    code: bytes
    places: tuple[str, ...]


@dataclass
class Lan:
    """Tells the local network of a node, and hears of others: `start`, then perhaps `tell`, and `close` in any case.

    host: the address to listen on, as in the settings; 0.0.0.0 or ::, all but this machine's own. heard, hidden: called
    in the event loop with each node that is found, of open and of private runs, whatever its run; again if its records
    change; and it may be with this node itself.
    """

    host: str
    heard: Callable[[LanNode], None]
    hidden: Callable[[HiddenNode], None] = lambda node: None

    def __post_init__(self) -> None:
        self._asking = set[asyncio.Task[None]]()
        self._open = list[tuple[AsyncZeroconf, Interface]]()  # one for each interface
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Listen on each interface, and begin to hear. An interface that fails is left out.

        Raises:
            OSError: none is left, as where there is no multicast.
            ValueError: `host` is a name.
        """
        every = ipaddress.ip_address(self.host).is_unspecified
        for name, own in own_interfaces():
            if str(own.ip) == self.host or (every and own.version == 4 and not own.is_loopback):
                with contextlib.suppress(OSError):
                    self._listen(name, own)
        if not self._open:
            raise OSError(f"{self.host} has no network with multicast")

    def _listen(self, name: str, own: Interface) -> None:
        """Open a socket on one interface, and browse its network for nodes, until `close`. name: the interface's; own:
        this machine's address there. Raises OSError."""
        zeroconf = AsyncZeroconf(interfaces=[str(own.ip)])
        self._stack.push_async_callback(zeroconf.async_close)
        engine = zeroconf.zeroconf.engine  # each of its sockets would else hear what comes in by other interfaces
        for one in filter(None, (engine._listen_socket, *engine._respond_sockets)):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[functools.partial(self._noticed, own)])
        self._stack.push_async_callback(browser.async_cancel)
        self._open.append((zeroconf, own))

    async def tell(self, run: Run, author: bytes, port: int, **about: str) -> None:
        """Tell the local network where this node is, and of an open run who and in which; of a private one only its
        members can read who, and others learn that some node is there.

        Call it once, after `start`; the record stands until `close`. It raises whatever zeroconf does.

        Args:
            port: at which p2pd listens, TCP.
            about: `model` and `name`, as far as others may know them; a private run's node tells neither.
        """
        name = peer_id(author)
        told = {"run": run.id.hex(), "task": run.task[:TASK_MAX], "protocol": str(PROTOCOL_MAJOR)}
        told |= {key: word[:WORD_MAX] for key, word in about.items()}
        for zeroconf, own in self._open:
            if run.founder:
                name = os.urandom(NAME_BYTES).hex()
                code = code_of(run.id, name, _place(own.ip, port), author)
                told = {HIDDEN.decode(): code.hex()}
            await _register(zeroconf, own, name, port, told)

    async def close(self) -> None:
        """Take the own record back and end; also if `start` failed."""
        for task in self._asking:
            task.cancel()
        await self._stack.aclose()

    def _noticed(
        self,
        own: Interface,
        *,
        zeroconf: Zeroconf,
        service_type: str,
        name: str,
        state_change: ServiceStateChange,
    ) -> None:
        """Ask a node of which an interface has heard for its records, unless 64 are being asked. zeroconf calls this in
        the event loop, with all by keyword."""
        if state_change is ServiceStateChange.Removed or len(self._asking) >= ASKED_MAX:
            return
        task = asyncio.create_task(self._ask(zeroconf, name, own))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, zeroconf: Zeroconf, name: str, own: Interface) -> None:
        """Ask a node for its records, and wait for three seconds; pass on what they tell. Nothing is raised: nonsense
        and errors go into the log."""
        info = AsyncServiceInfo(SERVICE, name)
        try:
            if not await info.async_request(zeroconf, ANSWER_SECONDS * 1000):
                return
            short = name.removesuffix(f".{SERVICE}")
            addresses = info.parsed_addresses()
            if HIDDEN in info.properties:
                text = info.properties[HIDDEN] or b""
                code = bytes.fromhex(text.decode("ascii"))
                places = _near(addresses, info.port, own)
                self.hidden(HiddenNode(short, code, tuple(places)))
            else:
                self.heard(read_node(short, info.properties, addresses, info.port, own))
        except ValueError as error:
            logger.debug("%s tells nonsense of itself: %s", plain(name, 64), error)
        except Exception as error:  # zeroconf raises anything from a socket error to what its parser raises
            logger.debug("%s cannot be asked: %r", plain(name, 64), error)


def read_node(
    peer: str,
    properties: Mapping[bytes, bytes | None],
    addresses: Iterable[str],
    port: int | None,
    own: Interface,
) -> LanNode:
    """What a node of an open run tells of itself, from the records of its service.

    Args:
        peer: its peer id in base58, the name of the service.
        port: of its service; None if that names none, which is an error too.
        own: the interface that heard it; addresses outside of its network are left out, so there may be none.

    Raises:
        ValueError: the records are not of this form.
    """
    author = author_of(peer)
    told = {key: (value or b"").decode(errors="replace") for key, value in properties.items()}
    run = bytes.fromhex(told.get(b"run", ""))
    protocol = told.get(b"protocol", "")
    has_protocol = protocol.isdigit() and len(protocol) < 4
    if len(run) != RUN_ID_BYTES or not has_protocol:
        raise ValueError("no run id, or no protocol")
    near = [f"{place}/p2p/{peer}" for place in _near(addresses, port, own)]
    words = {key: plain(told.get(key.encode(), ""), WORD_MAX) for key in ("task", "model", "name")}
    return LanNode(
        author,
        run,
        protocol=int(protocol),
        addresses=tuple(near),
        **words,
    )


def code_of(run_id: bytes, name: str, place: str, author: bytes) -> bytes:
    """The code that tells members of a run which of them is at a place: 64 bytes, the key of the member (38 bytes)
    hidden by XOR, then an HMAC (26). With the hidden key in place of `author`, its first 38 bytes are the key itself.

    Args:
        name: the random name of the node. place: a multiaddr without a peer id. author: 38-byte peer id.

    Place and name are in it, so that nobody who does not know the run's id can lead members elsewhere with it. To read
    one takes two hashes, however many members there are: made-up ones cost nothing.
    """
    context = f"ftis/lan/1 {name} {place}".encode()
    key = hmac.digest(run_id, context, "sha512")
    hidden = bytes(map(operator.xor, author, key))
    mac = hmac.digest(key, author, "sha256")
    return hidden + mac[: len(key) - len(author)]


@dataclass
class MembersOnLan:
    """Finds the members of a private run among nodes that hide who they are.

    admits: whether a key is a member's. found: called with a member's addresses, each time that it is heard; it may be
    this node itself.
    """

    run_id: bytes
    admits: OfPeer
    found: Callable[[Sequence[str]], None]

    def __post_init__(self) -> None:
        self._unknown = Bounded[bytes, list[str]](ASKED_MAX)  # addresses of keys that are no members yet

    def hear(self, node: HiddenNode) -> None:
        """Take a node if its code is of this run, else ignore it. The latest 64 that are no members yet are kept for
        `look`."""
        for place in node.places:
            hidden = node.code[:AUTHOR_BYTES]
            author = code_of(self.run_id, node.name, place, hidden)[:AUTHOR_BYTES]  # hidden twice, it is shown
            if code_of(self.run_id, node.name, place, author) == node.code:
                self._unknown[author] = [f"{place}/p2p/{peer_id(author)}"]
                self.look()

    def look(self) -> None:
        """Pass on those that have become members since they were heard. The node calls it every 15 s."""
        for member in filter(self.admits, list(self._unknown)):
            self.found(self._unknown.pop(member))


def _near(addresses: Iterable[str], port: int | None, own: Interface) -> list[str]:
    """The multiaddrs (TCP) of these IP addresses that are in an interface's network, without a peer id; at most four.
    Raises ValueError if a node may not have this port, or an address is none."""
    if port is None or not FIRST_PORT <= port < 1 << 16:
        raise ValueError(f"port {port}")
    near = []
    for place in map(ipaddress.ip_address, addresses):
        text = _place(place, port)
        if place in own.network and place != own.network.broadcast_address and "%" not in text:
            near.append(text)
    return [text for text in near if is_plain(f"{text}/p2p/peer")][:ADDRESSES_MAX]


def _place(host: IpAddress, port: int) -> str:
    """The multiaddr of a host, without a peer id, by TCP."""
    return f"/ip{host.version}/{host}/tcp/{port}"


async def _register(
    zeroconf: AsyncZeroconf,
    own: Interface,
    name: str,
    port: int,
    told: dict[str, str],
) -> None:
    """Tell the network of an interface that this node is there, until its zeroconf is closed. told: the properties of
    the record."""
    info = AsyncServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=port,
        properties=told,
        server=f"{name}.local.",
        parsed_addresses=[str(own.ip)],
    )
    # Two interfaces in one network tell the same, and nobody else's word keeps this node from telling.
    announced = await zeroconf.async_register_service(info, cooperating_responders=True)
    await announced


async def look_around(host: str, seconds: float) -> list[LanNode]:
    """The nodes of open runs that tell of themselves on the local network, heard within some seconds; at most 256 of
    them, sorted by run and then by peer. It waits for all of these seconds, and tells nothing of this node.

    Raises:
        OSError: this machine has no multicast.
    """
    found: dict[bytes, LanNode] = {}

    def heard(node: LanNode) -> None:
        if len(found) < NODES_MAX:
            found[node.peer] = node

    lan = Lan(host, heard)
    try:
        await lan.start()
        await asyncio.sleep(seconds)
    finally:
        await lan.close()
    return sorted(found.values(), key=lambda node: (node.run, node.peer))
