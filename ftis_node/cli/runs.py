"""``ftis-node runs``: the open runs of the local network."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from ftis_node.cli.common import JsonOption, print_answer, waiting
from ftis_node.errors import UsageError, UserError
from ftis_node.swarm.address_book import LAN_MAX
from ftis_node.swarm.addresses import scope
from ftis_node.swarm.handshake import PROTOCOL_MAJOR, other_protocol
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.lan import LanNode, look_around
from ftis_node.text import counted, say

LOOK_SECONDS = 3.0
NONE_FOUND = "No node announces an open run here: it needs --lan, and UDP 5353 past firewalls."


def runs(
    host: Annotated[str, typer.Option(help="The address of the network to look in; 0.0.0.0: all of this machine.")] = (
        "0.0.0.0"
    ),
    seconds: Annotated[float, typer.Option(min=1, help="How long to listen.")] = LOOK_SECONDS,
    json: JsonOption = False,
) -> None:
    """List the open runs of the local network, whose nodes were started with --lan."""
    found = by_run(heard(host, seconds))
    lines = []
    for run, nodes in found.items():
        lines.append(f"{run.hex()}  {nodes_text(nodes)}")
        lines += [f"  {'  '.join(filter(None, (peer_id(node.peer), node.name, node.model)))}" for node in nodes]
        addresses = [address for node in nodes for address in node.addresses]
        # One of this machine alone only where there is no other.
        nearest = min(addresses, key=lambda address: scope(address) == "machine")
        lines.append(f"  ftis-node join --peers {nearest}")
    print_answer({"runs": [_row(*one) for one in found.items()]}, *(lines or [NONE_FOUND]), json=json)


def heard(host: str, seconds: float) -> list[LanNode]:
    """Listen for so many seconds; return the nodes that tell of themselves. Raises UserError without multicast."""
    with waiting("Listening for nodes on the local network"):
        try:
            return asyncio.run(look_around(host, seconds))
        except (OSError, ValueError) as error:
            raise UserError(
                f"The local network cannot be asked from {host}: {error}.",
                "Name an address of this machine with --host, and look whether it has multicast (`ip link`).",
            ) from error


def the_run(host: str) -> tuple[str, ...]:
    """At most 64 addresses of the nodes of the one open run here; none if there is none that speaks our protocol.

    Raises:
        UsageError: there are several.
    """
    nodes = heard(host, LOOK_SECONDS)
    found = by_run([node for node in nodes if node.protocol == PROTOCOL_MAJOR])
    for run, (other, *_) in by_run(nodes).items():
        if run not in found:
            say(f"Run {run.hex()} is here, but {other_protocol(other.protocol)}.", error=True)
    if len(found) > 1:
        listed = "; ".join(f"{run.hex()[:12]} ({nodes_text(nodes)})" for run, nodes in found.items())
        raise UsageError(
            f"There are {len(found)} runs on the local network: {listed}.",
            "Name one by --peers ADDRESS; `ftis-node runs` prints the line that joins each.",
        )
    for run, nodes in found.items():
        say(f"Found run {run.hex()} on the local network: {nodes_text(nodes)}.", error=True)
        return tuple(address for node in nodes for address in node.addresses)[:LAN_MAX]
    begins = "A new run begins."
    if not nodes:
        begins = f"{NONE_FOUND} {begins}"
    say(begins, error=True)
    return ()


def by_run(nodes: Sequence[LanNode]) -> dict[bytes, list[LanNode]]:
    """The nodes that can be dialled, by run id; runs in the order in which they were found."""
    found: dict[bytes, list[LanNode]] = {}
    for node in nodes:
        if node.addresses:
            found.setdefault(node.run, []).append(node)
    return found


def nodes_text(nodes: Sequence[LanNode]) -> str:
    """Task and number of nodes; the task is as its nodes say."""
    return f"{nodes[0].task or 'no task named'}, {counted(len(nodes), 'node')}"


def _row(run: bytes, nodes: Sequence[LanNode]) -> dict[str, object]:
    addresses = [address for node in nodes for address in node.addresses]
    return {"run": run.hex(), "task": nodes[0].task, "protocol": nodes[0].protocol, "addresses": addresses}
