"""Machines in one machine: Linux network namespaces on a bridge, each with an uplink of limited speed. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence

from ftis_node.errors import UserError

_BRIDGE, _OTHER_BRIDGE = "ftis-bridge", "ftis-other"
_NETWORK = "10.203.0"


@contextlib.contextmanager
def namespaces(count: int, uplink_mbit: float | None) -> Iterator[list[tuple[str, str]]]:
    """(name, IPv4 address) of each namespace; all are gone afterwards.

    Segments are as small as on a real network (offloading is off), so that counted bytes are those of a real network.

    Raises:
        UserError: no root, no `ip` or `tc`, or the kernel lacks what they ask for.
    """
    if os.geteuid() != 0:
        raise UserError("Network namespaces need root.", "Run as root, or leave out --uplink.")
    with contextlib.ExitStack() as stack:
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        found = []
        for number in range(count):
            name, inside, outside = f"ftis-{number}", "eth0", f"ftis-v{number}"
            address = f"{_NETWORK}.{number + 1}"
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            _run("ip", "link", "set", outside, "master", _BRIDGE, "up")
            within = ("ip", "netns", "exec", name)
            _run(*within, "ip", "addr", "add", f"{address}/24", "dev", inside)
            _run(*within, "ip", "link", "set", inside, "up")
            _run(*within, "ip", "link", "set", "lo", "up")
            offloading = ("tso", "off", "gso", "off", "gro", "off")
            _run(*within, "ethtool", "-K", inside, *offloading)
            _run("ethtool", "-K", outside, *offloading)
            if uplink_mbit is not None:
                limit = ("rate", f"{uplink_mbit}mbit", "burst", "32kbit", "latency", "100ms")
                _run(*within, "tc", "qdisc", "add", "dev", inside, "root", "tbf", *limit)
            found.append((name, address))
        yield found


@contextlib.contextmanager
def partition(numbers: Sequence[int]) -> Iterator[None]:
    """Cuts these namespaces off from all others, though not from one another."""
    _run("ip", "link", "add", _OTHER_BRIDGE, "type", "bridge")
    try:
        _run("ip", "link", "set", _OTHER_BRIDGE, "up")
        for number in numbers:
            _run("ip", "link", "set", f"ftis-v{number}", "master", _OTHER_BRIDGE)
        yield
        for number in numbers:
            _run("ip", "link", "set", f"ftis-v{number}", "master", _BRIDGE)
    finally:
        _run("ip", "link", "del", _OTHER_BRIDGE)


def bytes_sent(name: str) -> int:
    """Bytes that a namespace's interface has sent, headers included."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(subprocess.run(["ip", "netns", "exec", name, "cat", path], capture_output=True, check=True).stdout)


def _run(*line: str) -> None:
    try:
        subprocess.run(line, check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else f"no {line[0]} here"
        fix = "It takes Linux with iproute2 and ethtool, and the right to make namespaces."
        raise UserError(f"`{' '.join(line)}` failed: {why}.", fix) from error
