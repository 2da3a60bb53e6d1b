"""Multiaddrs: parsing, scopes, the order in which to dial them, and the ones to listen on."""

import itertools
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Literal, get_args

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.swarm.identity import author_of

Scope = Literal["public", "relayed", "private", "machine"]
IpAddress = IPv4Address | IPv6Address

MAX_ADDRESS_LENGTH = 256
REMEMBERED = 4096  # size of the caches of parsed addresses and hosts
SCOPES = get_args(Scope)  # in the order in which a node dials them


def _networks(texts: str) -> list[IPv4Network | IPv6Network]:
    """The networks in a text, with white space between them."""
    return [ip_network(text) for text in texts.split()]


# Python's versions differ in which addresses they call global, so the networks are listed here. Sources: the IANA
# registries of special-purpose IPv4 and IPv6 addresses, and RFC 4291 for 2000::/3.
_GLOBAL6 = IPv6Network("2000::/3")
# Addresses that no host has: any host, multicast, reserved or broadcast, documentation; and those of the link alone, at
# which clouds keep their metadata.
_NOBODY = _networks(
    "0.0.0.0/8 169.254.0.0/16 192.0.2.0/24 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 "
    "::/128 fe80::/10 ff00::/8 2001:db8::/32 3fff::/20"
)
_NOT_GLOBAL = _NOBODY + _networks(
    "10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 172.16.0.0/12 192.0.0.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 "
    "2001::/23 2002::/16"
)
# Networks whose last 32 bits are an IPv4 address: compatible, mapped, translated (RFC 2765), NAT64 (RFC 6052, 8215).
_LAST_IS_IP4 = _networks("::/96 ::ffff:0:0/96 ::ffff:0:0:0/96 64:ff9b::/96 64:ff9b:1::/48")
_HOST_AND_PORT = re.compile(
    r"/(?:ip[46]|dns|dns4|dns6)/[^/]+/(?:tcp/([0-9]+)|udp/([0-9]+)/quic-v1)(?:/p2p/[^/]+/p2p-circuit)?/p2p/[^/]+"
)
FIRST_PORT = 1024
HTTPS_PORT = 443
_KINDS = {"4": IPv4Address, "6": IPv6Address}
_IP = re.compile(r"/ip[46]/([^/]+)")
_PORT_TRIES = 20
_PEER = "(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{44}"  # an Ed25519 key itself, or the hash of an RSA key
_PORT = "(?:[0-5]?[0-9]{1,4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = rf"(?=[^/]{{1,253}}(?:/|$)){_LABEL}(?:\.{_LABEL})*"
_MULTIADDR = re.compile(
    rf"(?:/(?:ip[46]/[0-9a-fA-F:.]+|(?:dns[46]?|dnsaddr)/{_NAME}|(?:tcp|udp)/{_PORT}|p2p/{_PEER}"
    "|quic|quic-v1|tls|ws|wss|p2p-circuit))+"
)


def parse_address(text: str) -> bytes:
    """The 38-byte peer id in an address like ``/ip4/192.0.2.7/tcp/4001/p2p/12D3Koo…``.

    Raises:
        UsageError: the text is no multiaddr, or does not end in ``/p2p/`` and an Ed25519 peer id.
    """
    fix = "Copy it from the other node's `ftis-node id`; it looks like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"
    _, ends, peer = text.rpartition("/p2p/")  # the last: in a relayed address the first is the relay
    if not ends or not is_multiaddr(text):
        raise UsageError(f"The peer address {text!r} is not a multiaddr that ends in /p2p/ID.", fix)
    try:
        return author_of(peer)
    except ValueError as error:
        raise UsageError(f"The peer address {text!r} has a bad peer id: {error}", fix) from None


def is_multiaddr(text: str) -> bool:
    """Whether this is a multiaddr (https://multiformats.io/multiaddr) that libp2p's daemon can dial or announce. It
    need not end in a peer id.

    hivemind's own parser accepts more protocols, and its import takes two seconds.
    """
    try:
        for kind, host in re.findall("/ip([46])/([^/]+)", text):
            _KINDS[kind](host)
    except ValueError:
        return False
    return _MULTIADDR.fullmatch(text) is not None


def listening_mistakes(settings: Settings) -> list[UserError]:
    """All errors in the addresses of the settings `relays` and `announce`. They are returned and not raised, so that a
    person sees all of them at once."""
    found = list[UserError]()
    for text in settings.relays:
        try:
            parse_address(text)
        except UsageError as error:
            found.append(error)
    found += [
        UsageError(f"The address to announce {text!r} is no multiaddr.", "Write it like /ip4/192.0.2.7/tcp/4001.")
        for text in settings.announce
        if not is_multiaddr(text)
    ]
    if settings.announce and settings.port == 0:
        found.append(UsageError("An announced address names a port, but this node takes any.", "Give --port too."))
    return found


def is_relayed(address: str) -> bool:
    """Whether the address leads through a relay."""
    return "/p2p-circuit" in address


def scope(address: str) -> Scope:
    """The range from which an address can be dialled: anywhere, by relay, a private network, or this machine. A name
    counts as public."""
    if is_relayed(address):
        return "relayed"
    found = _IP.search(address)
    if found is None:
        return "public"  # a name
    return _scope_of(found[1])


@lru_cache(maxsize=REMEMBERED)
def is_plain(address: str) -> bool:
    """Whether the address has the form that nodes listen on: a host, TCP or QUIC, an optional relay, and a peer id.

    Others than its owner may name only such addresses to this node. libp2p would also dial WebSockets, and resolve
    ``/dnsaddr`` names to any number of addresses. Ports below 1024 belong to other services, except HTTPS. No host has
    a multicast, reserved, unspecified or documentation address, and those of the link are not for strangers to name. A
    name can be plain, and so can an address of a private network or this machine.
    """
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None:
        return False
    port = int(found[1] or found[2])
    if port < FIRST_PORT and port != HTTPS_PORT:
        return False
    host = _IP.match(address)
    return host is None or not _is_nobody(host[1])


def host_and_port(address: str) -> tuple[IpAddress | None, int]:
    """The host and the port of a plain address; (None, 0) for any other, and for a name."""
    found = _HOST_AND_PORT.fullmatch(address)
    host = _IP.match(address)
    if found is None or host is None or not is_plain(address):
        return None, 0
    return _place(host[1]), int(found[1] or found[2])


def host_of(address: str) -> str:
    """The host in a multiaddr: an IP address, or a name; "" if there is none."""
    return (*address.split("/"), "", "")[2]


def varied(addresses: Iterable[str], most: int) -> list[str]:
    """Pick at most `most` of these addresses, the best of which come first, taking turns between scopes and families
    (IPv4, IPv6). So peers with one family only, or in the same private network, can dial one of them too."""
    groups = dict[tuple[Scope, str], list[str]]()
    for address in addresses:
        family = address.partition("/")[2].partition("/")[0]
        groups.setdefault((scope(address), family), []).append(address)
    turns = itertools.zip_longest(*groups.values())  # None where a group has ended
    return [address for turn in turns for address in turn if address is not None][:most]


class NetworkScope:
    """What a node may dial, by who named it. It only ever grows.

    Its owner's addresses, and with them the home networks: the narrowest scope in these, and every wider one. What its
    owner was given (an invitation, a run file): exactly that, if it is plain. What peers name: plain addresses within
    the home networks; no name, for it may lead to any host.
    """

    def __init__(self, host: str, addresses: Iterable[str] = (), given: Iterable[str] = ()) -> None:
        """
        Args:
            host: the address that the node listens on.
            addresses: those that its owner named.
            given: those that its owner was given.

        The attribute `exact` has the addresses that are dialled in whatever network they are.
        """
        self._narrowest = SCOPES.index(scope_of_host(host))  # the home networks: this scope, and all before it
        self.exact: frozenset[str] = frozenset()
        self.trust(addresses, given)

    def trust(self, owners: Iterable[str], given: Iterable[str] = ()) -> None:
        """Add addresses that the owner named, and others that the owner was given."""
        owners = frozenset(owners)
        self.exact |= owners.union(filter(is_plain, given))
        self.widen(owners)

    def widen(self, addresses: Iterable[str]) -> None:
        """Extend the home networks to the scopes of the owner's addresses; names do not count. Called too with the
        addresses to which the owner's names turned out to lead."""
        for host in map(_IP.match, addresses):
            if host is not None:
                self._narrowest = max(self._narrowest, SCOPES.index(_scope_of(host[1])))

    def why_not(self, address: str) -> str:
        """Why this address is not dialled whoever names it; "" if it is."""
        host = _IP.match(address)
        if address in self.exact:
            return ""
        if host is None or not is_plain(address):
            return "only this node's owner may name a host so"
        if SCOPES.index(_scope_of(host[1])) > self._narrowest:
            return "outside the networks in which this node's owner named a peer; if it is yours, name it with --peers"
        return ""


def network_of(addresses: Iterable[str]) -> str:
    """The network of the first address: its /24 for IPv4, its /48 for IPv6, else its name; "" without any."""
    for address in addresses:
        found = _IP.search(address)
        if found is None:
            return host_of(address)
        return _network_of_host(found[1])
    return ""


@lru_cache(maxsize=REMEMBERED)
def _network_of_host(host: str) -> str:
    """The network of a host, as a text like ``192.0.2.0/24``; a name is its own."""
    place = _place(host)
    if place is None:
        return host
    width = 48
    if place.version == 4:
        width = 24
    return str(ip_network((place, width), strict=False))


def ranked(addresses: Iterable[str]) -> list[str]:
    """Sort by scope, widest first: public, relayed, private, this machine; TCP before QUIC.

    Each comes once, and equal ones keep their order. Addresses of this machine only are left out if there are others.
    """
    best_first = sorted(dict.fromkeys(addresses), key=lambda text: (SCOPES.index(scope(text)), "/tcp/" not in text))
    for_others = [text for text in best_first if scope(text) != "machine"]
    return for_others or best_first


def scope_of_host(host: str) -> Scope:
    """The scope of a node that listens on `host`: public if that is 0.0.0.0 or ::, every address."""
    if host in ("0.0.0.0", "::"):
        return "public"
    return _scope_of(host)


@lru_cache(maxsize=REMEMBERED)
def _scope_of(host: str) -> Scope:
    """The scope of a host. Names and global unicast addresses are public. One that embeds an IPv4 address is private,
    or the machine's if that one is."""
    place = _place(host)
    if place is None:
        return "public"
    within = [place, *_embedded(place)]
    if any(one.is_loopback or one.is_link_local or one.is_unspecified for one in within):
        return "machine"
    if len(within) == 1 and _is_global(place):
        return "public"
    return "private"


def _is_global(place: IpAddress) -> bool:
    """Whether the address itself is global unicast, whatever it embeds."""
    if place.version == 6 and place not in _GLOBAL6:
        return False
    return not any(place in network for network in _NOT_GLOBAL)


def _is_nobody(host: str) -> bool:
    """Whether no host can have this address, or one that it embeds; False for a name."""
    place = _place(host)
    if place is None:
        return False
    places = (place, *_embedded(place))
    return any(one in network for one in places for network in _NOBODY)


def _place(host: str) -> IpAddress | None:
    """The IP address in a host, without its zone (what follows a %); None for a name."""
    try:
        return ip_address(host.split("%")[0])
    except ValueError:
        return None


def _embedded(place: IpAddress) -> list[IPv4Address]:
    """The IPv4 addresses within an IPv6 one: 6to4, Teredo (server and client) and NAT64."""
    if place.version == 4 or place.is_loopback or place.is_unspecified:
        return []
    found = [place.sixtofour, *(place.teredo or ())]
    if any(place in network for network in _LAST_IS_IP4):
        found.append(IPv4Address(int(place) & 0xFFFFFFFF))
    return [one for one in found if one is not None]


def listen_addresses(host: str, port: int, *, quic: bool) -> list[str]:
    """Multiaddrs to listen on, TCP and QUIC on the same port. 0.0.0.0 means every address, IPv6 included."""
    hosts = [host]
    if host == "0.0.0.0" and _has_ip6():
        hosts.append("::")
    found = []
    for one in hosts:
        family = "ip4"
        if ":" in one:
            family = "ip6"
        found.append(f"/{family}/{one}/tcp/{port}")
        if quic:
            found.append(f"/{family}/{one}/udp/{port}/quic-v1")
    return found


def check_port(host: str, port: int) -> None:
    """Raise UserError if a port is taken for TCP or UDP, or the host is none of this machine's. The port is free again
    when this returns: call it just before p2pd starts.

    libp2p listens with SO_REUSEPORT and would share the port with another node. Each node would then get half the
    calls.
    """
    free_port(host)  # raises if the host is wrong
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            bind(host, port, kind).close()
        except OSError as error:
            raise port_error(host, port) from error


def free_port(host: str) -> int:
    """Find a port that is free for TCP and UDP at the moment; it is not kept free. Raises UserError if this host has
    none, or is none of this machine's."""
    for _ in range(_PORT_TRIES):
        try:
            tcp = bind(host, 0, socket.SOCK_STREAM)
        except OSError as error:  # an unknown name, or not an address of this machine
            raise UserError(
                f"This machine cannot listen on {host}: {error.strerror}.",
                "Name an address that it has with --host, or 0.0.0.0 for all.",
            ) from error
        with tcp:
            port = int(tcp.getsockname()[1])
            try:
                bind(host, port, socket.SOCK_DGRAM).close()
            except OSError:
                continue
            return port
    raise UserError(f"There is no free port on {host}.", "Name one with --port.")


class PortTaken(UserError):
    """Somebody else has the port; another port may do."""


def port_error(host: str, port: int) -> UserError:
    """The error for a port on which this machine cannot listen; the caller raises it."""
    return PortTaken(f"The port {port} on {host} is taken or cannot be listened on.", "Choose another --port (0: any).")


def bind(host: str, port: int, kind: socket.SocketKind) -> socket.socket:
    """A socket on this port, which the caller closes. kind: SOCK_STREAM or SOCK_DGRAM. Raises OSError."""
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    probe = socket.socket(family, kind)
    try:
        if kind == socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe


def _has_ip6() -> bool:
    """Whether this machine can listen on its own IPv6 address."""
    with suppress(OSError), bind("::1", 0, socket.SOCK_STREAM):
        return True
    return False


def peer_at(address: str) -> bytes:
    """The 38-byte peer id in an address from anybody; empty if the address is too long or invalid."""
    if len(address) > MAX_ADDRESS_LENGTH:  # or the cache would keep what a stranger sends, whatever its size
        return b""
    return parsed_peer(address)


@lru_cache(maxsize=REMEMBERED)
def parsed_peer(address: str) -> bytes:
    """`peer_at` of an address that is short enough to be remembered."""
    try:
        return parse_address(address)
    except UsageError:
        return b""
