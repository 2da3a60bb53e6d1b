"""Which address is tried first, and where a node listens."""

from __future__ import annotations

import socket

import pytest

from ftis_node.errors import UserError
from ftis_node.swarm.addresses import check_port, free_port, is_loopback, listen_addresses, ranked, scope

ID = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"
PUBLIC, PUBLIC_QUIC = f"/ip4/8.8.4.4/tcp/4001/p2p/{ID}", f"/ip4/8.8.4.4/udp/4001/quic-v1/p2p/{ID}"
NAMED = f"/dns4/node.example/tcp/4001/p2p/{ID}"
RELAYED = f"/ip4/8.8.4.4/tcp/4001/p2p/{ID}/p2p-circuit/p2p/{ID}"
PRIVATE, LOCAL6 = f"/ip4/192.168.1.7/tcp/4001/p2p/{ID}", f"/ip6/fd00::7/tcp/4001/p2p/{ID}"
MACHINE, LINK = f"/ip4/127.0.0.1/tcp/4001/p2p/{ID}", f"/ip6/fe80::1/tcp/4001/p2p/{ID}"


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
def test_from_where_an_address_can_be_dialled(address: str, expected: str) -> None:
    assert scope(address) == expected


def test_the_ones_that_most_can_dial_come_first_and_this_machines_own_only_alone() -> None:
    mixed = [MACHINE, PRIVATE, RELAYED, PUBLIC_QUIC, LINK, PUBLIC, PRIVATE]
    assert ranked(mixed) == [PUBLIC, PUBLIC_QUIC, RELAYED, PRIVATE]
    assert ranked([MACHINE]) == [MACHINE]
    assert ranked([]) == []


def test_where_to_listen() -> None:
    assert listen_addresses("127.0.0.1", 7, quic=True) == ["/ip4/127.0.0.1/tcp/7", "/ip4/127.0.0.1/udp/7/quic-v1"]
    assert listen_addresses("::1", 7, quic=False) == ["/ip6/::1/tcp/7"]
    everywhere = listen_addresses("0.0.0.0", 7, quic=False)
    assert everywhere[0] == "/ip4/0.0.0.0/tcp/7" and everywhere[1:] in ([], ["/ip6/::/tcp/7"])
    assert is_loopback("127.0.0.1") and is_loopback("::1")
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.7")))


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_is_taken_if_tcp_or_udp_is(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        with pytest.raises(UserError, match="is taken"):
            check_port("127.0.0.1", taken.getsockname()[1])
    check_port("127.0.0.1", free_port("127.0.0.1"))
