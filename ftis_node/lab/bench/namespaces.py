"""Machines in one machine: Linux network namespaces on a bridge, each with an uplink of limited speed. Needs root."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

from ftis_node.errors import UserError

_NETWORK = "10.203.0"


@contextlib.contextmanager
def namespaces(
    count: int,
    uplink_mbit: float | None,
    prefix: str = "ftis",
) -> Iterator[list[tuple[str, str]]]:
    """(name, IPv4 address) of each namespace; all are gone afterwards. uplink_mbit: 10^6 bits a second; None: no limit.

    With an uplink segments are as small as on a real network (offloading is off), and so are counted bytes.

    Args:
        prefix: of the names of namespaces and interfaces, short: Linux takes 15 characters.

    Raises:
        UserError: no root, no `ip` or `tc`, or the kernel lacks what they ask for.
    """
    if os.geteuid() != 0:
        raise UserError("Network namespaces need root.", "Run as root, or leave out --uplink.")
    with contextlib.ExitStack() as stack:
        bridge = f"{prefix}-bridge"
        run_tool("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(run_tool, "ip", "link", "del", bridge)
        run_tool("ip", "link", "set", bridge, "up")
        found = []
        for number in range(count):
            name = f"{prefix}-{number}"
            inside = "eth0"
            outside = f"{prefix}-v{number}"
            address = f"{_NETWORK}.{number + 1}"
            run_tool("ip", "netns", "add", name)
            stack.callback(run_tool, "ip", "netns", "del", name)
            run_tool("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            run_tool("ip", "link", "set", outside, "master", bridge, "up")
            within = ("ip", "netns", "exec", name)
            run_tool(*within, "ip", "addr", "add", f"{address}/24", "dev", inside)
            run_tool(*within, "ip", "link", "set", inside, "up")
            run_tool(*within, "ip", "link", "set", "lo", "up")
            if uplink_mbit is not None:
                offloading = ("tso", "off", "gso", "off", "gro", "off")
                run_tool(*within, "ethtool", "-K", inside, *offloading)
                run_tool("ethtool", "-K", outside, *offloading)
                limit = ("rate", f"{uplink_mbit}mbit", "burst", "32kbit", "latency", "100ms")
                run_tool(*within, "tc", "qdisc", "add", "dev", inside, "root", "tbf", *limit)
            found.append((name, address))
        yield found


def bytes_sent(name: str) -> int:
    """Bytes that a namespace's interface has sent, headers included."""
    line = ["ip", "netns", "exec", name, "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    told = subprocess.run(line, capture_output=True, check=True)
    return int(told.stdout)


def run_tool(*line: str) -> None:
    """Run `ip`, `tc` or `ethtool`. Raises UserError if it fails, or is not here."""
    try:
        subprocess.run(line, check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = f"no {line[0]} here"
        if isinstance(error, subprocess.CalledProcessError):
            why = error.stderr.strip()
        fix = "It takes Linux with iproute2 and ethtool, and the right to make namespaces."
        raise UserError(f"`{' '.join(line)}` failed: {why}.", fix) from error
