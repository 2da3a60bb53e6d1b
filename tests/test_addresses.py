"""Which address is tried first, and where a node listens."""

import itertools
import socket

import pytest

from ftis_node.errors import UserError
from ftis_node.swarm import addresses

ID = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"
PUBLIC = f"/ip4/8.8.4.4/tcp/4001/p2p/{ID}"
PUBLIC_QUIC = f"/ip4/8.8.4.4/udp/4001/quic-v1/p2p/{ID}"
NAMED = f"/dns4/node.example/tcp/4001/p2p/{ID}"
RELAYED = f"/ip4/8.8.4.4/tcp/4001/p2p/{ID}/p2p-circuit/p2p/{ID}"
PRIVATE = f"/ip4/192.168.1.7/tcp/4001/p2p/{ID}"
LOCAL6 = f"/ip6/fd00::7/tcp/4001/p2p/{ID}"
MACHINE = f"/ip4/127.0.0.1/tcp/4001/p2p/{ID}"
LINK = f"/ip6/fe80::1/tcp/4001/p2p/{ID}"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((address, "public") for address in (PUBLIC, PUBLIC_QUIC, NAMED)),
        (RELAYED, "relayed"),
        *((address, "private") for address in (PRIVATE, LOCAL6)),
        *((address, "machine") for address in (MACHINE, LINK, f"/ip6/::1/tcp/1/p2p/{ID}")),
        (f"/ip4/not-an-ip/tcp/1/p2p/{ID}", "public"),
    ],
)
def test_from_where_an_address_can_be_dialled(address, expected):
    assert addresses.scope(address) == expected


def test_the_ones_that_most_can_dial_come_first_and_this_machines_own_only_alone():
    mixed = [MACHINE, PRIVATE, RELAYED, PUBLIC_QUIC, LINK, PUBLIC, PRIVATE]
    assert addresses.ranked(mixed) == [PUBLIC, PUBLIC_QUIC, RELAYED, PRIVATE]
    assert addresses.ranked([MACHINE]) == [MACHINE]
    assert addresses.ranked([]) == []


def at(host, rest="tcp/4001"):
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/{rest}/p2p/{ID}"


NOBODY = (
    "0.0.0.0",
    "0.1.2.3",
    "224.0.0.251",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.2.7",
    "198.51.100.7",
    "203.0.113.7",
    "::",
    "ff02::fb",
    "ff0e::1",
    "2001:db8::1",
    "3fff::1",
    "::ffff:224.0.0.251",
    "64:ff9b::e000:fb",
    "2002:e000:fb::1",
)
NOT_PUBLIC = (
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.7",
    "100.64.0.1",
    "198.18.0.1",
    "192.88.99.1",
    "192.0.0.9",
    "fd00::7",
    "fec0::1",
    "100::1",
    "4000::1",
    "5f00::1",
    "2001:2::1",
    "2001:20::1",
    "::ffff:8.8.4.4",
    "::8.8.4.4",
    "64:ff9b::808:404",
    "64:ff9b:1::808:404",
    "2002:808:404::1",
    "::ffff:192.168.1.7",
    "64:ff9b::c0a8:107",
    "2002:c0a8:107::1",
    "2001:0:808:404::3f57:fef8",
)
MACHINES = ("127.0.0.1", "::1", "169.254.169.254", "fe80::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1")


def test_row_43_public_are_global_unicast_addresses_and_nothing_else():
    for host in ("8.8.4.4", "2a00:1450:4001::1", "2606:4700::1"):
        assert addresses.scope(at(host)) == "public"
        assert not addresses.NetworkScope("0.0.0.0").why_not(at(host))
    for host in (*NOBODY, *NOT_PUBLIC, *MACHINES):
        assert addresses.scope(at(host)) != "public", host
        assert addresses.NetworkScope("0.0.0.0").why_not(at(host)), host
    for host in MACHINES:
        assert addresses.scope(at(host)) == "machine", host
        assert addresses.NetworkScope("192.168.1.1").why_not(at(host)), host
        refused = bool(addresses.NetworkScope("127.0.0.1").why_not(at(host)))
        assert refused is host.startswith(("169.254", "fe80")), host
    for host in NOT_PUBLIC:
        assert not addresses.NetworkScope("192.168.1.1").why_not(at(host)), host


@pytest.mark.parametrize("home", ["127.0.0.1", "192.168.1.1", "0.0.0.0"])
def test_row_43_nobody_dials_at_anothers_word_what_is_no_host_or_no_form_of_a_nodes_address(home):
    forms = [
        *map(at, NOBODY),
        *(at("8.8.4.4", f"tcp/{port}") for port in (0, 22, 25, 53, 80, 1023)),
        *(at("8.8.4.4", f"udp/{port}/quic-v1") for port in (0, 53, 123)),
        *(at("8.8.4.4", f"tcp/4001/{rest}") for rest in ("ws", "tls/ws", "wss", "tls", "ip4/192.168.1.7/tcp/4001")),
        *(at("8.8.4.4", rest) for rest in ("udp/4001", "udp/4001/quic", "tcp/4001/tcp/4001")),
        at("8.8.4.4", f"tcp/4001/p2p/{ID}/p2p-circuit/ip4/192.168.1.7/tcp/4001"),
        at("224.0.0.251", f"tcp/4001/p2p/{ID}/p2p-circuit"),
        f"/dnsaddr/node.example/p2p/{ID}",
        f"/dnsaddr/node.example/tcp/4001/p2p/{ID}",
        f"/p2p/{ID}/p2p-circuit/p2p/{ID}",
        f"/tcp/4001/ip4/8.8.4.4/p2p/{ID}",
        f"/p2p/{ID}",
        NAMED,  # a name may lead anywhere
    ]
    for address in forms:
        assert addresses.is_multiaddr(address), f"{address} says nothing here"
        assert addresses.NetworkScope(home).why_not(address), address


def test_row_43_of_a_nodes_addresses_one_of_each_family_and_scope_is_told_first():
    four = at("8.8.4.4")
    six = at("2a00:1450:4001::1")
    lan = at("192.168.1.7")
    four_quic = at("8.8.4.4", "udp/4001/quic-v1")
    six_quic = at("2a00:1450:4001::1", "udp/4001/quic-v1")
    for order in itertools.permutations([four, four_quic, six, six_quic, lan]):
        told = addresses.varied(addresses.ranked(order), 2)
        assert {address.split("/")[1] for address in told} == {"ip4", "ip6"}
        assert all("/tcp/" in address for address in told)
        assert addresses.varied(addresses.ranked(order), 3) == [*told, lan]
        assert sorted(addresses.varied(addresses.ranked(order), 8)) == sorted(order)
    assert addresses.varied([four, four_quic, lan], 2) == [four, lan], "one for the world, one for its own network"
    assert addresses.varied([], 2) == []


def test_where_to_listen():
    assert addresses.listen_addresses("127.0.0.1", 7, quic=True) == [
        "/ip4/127.0.0.1/tcp/7",
        "/ip4/127.0.0.1/udp/7/quic-v1",
    ]
    assert addresses.listen_addresses("::1", 7, quic=False) == ["/ip6/::1/tcp/7"]
    everywhere = addresses.listen_addresses("0.0.0.0", 7, quic=False)
    assert everywhere[0] == "/ip4/0.0.0.0/tcp/7"
    assert everywhere[1:] in ([], ["/ip6/::/tcp/7"])
    scopes = [addresses.scope_of_host(host) for host in ("127.0.0.1", "::1", "0.0.0.0", "::", "192.168.1.7")]
    assert scopes == ["machine", "machine", "public", "public", "private"]


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_is_taken_if_tcp_or_udp_is(kind):
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        with pytest.raises(UserError, match="is taken"):
            addresses.check_port("127.0.0.1", taken.getsockname()[1])
    addresses.check_port("127.0.0.1", addresses.free_port("127.0.0.1"))
