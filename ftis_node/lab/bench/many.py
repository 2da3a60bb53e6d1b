"""Many real network processes on one machine, beside what the simulated network says of the same nodes: `make many`.

    python -m ftis_node.lab.bench.many --nodes 32 --seconds 240

Each node is a process of its own with a p2pd (`lab.bench.host`). In place of a model it makes a round of six packets of
a run's size a step, and takes a batch of eighteen. The prediction is of the same nodes at the same pace, on
`lab.simulation.network`. Exit code 1: announcements were lost, or the prediction is far off.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from ftis_node.host.clocks import Clocks, replaced
from ftis_node.lab.bench import host
from ftis_node.lab.bench.swarm import Figures, Host, Plan, steady
from ftis_node.lab.clock import SimulatedLoop
from ftis_node.lab.simulation.directory import directory_figures
from ftis_node.lab.simulation.network import MemoryTransport, Network
from ftis_node.lab.simulation.scenario import Machine, Scenario
from ftis_node.swarm.wire.dht_limits import RECORD_LIFETIME
from ftis_node.swarm.wire.records import OwnerSigned, pack_answer
from ftis_node.text import say

GROUPS = 6
BATCH = 18
LATENCY = 0.001  # of a loopback: seconds one way
UPLINK = 1e9  # bytes a second
FAR = 1.5  # times as much as predicted, or the reverse
JUDGED = ("overhead_bytes_per_s", "bytes_in_per_s", "groups_per_step")


class MemoryNode(host.BenchNode):
    """A node of the benchmark on a simulated network."""

    def __init__(self, network: Network, number: int, tokens: int) -> None:
        super().__init__(number, tokens)
        self._network = network

    async def open(self, stack: contextlib.AsyncExitStack, setup: Figures) -> None:
        """Takes a place in the simulated network; nothing is started."""
        machine = Machine(group_seconds=1.0, train_seconds=1.0, uplink=UPLINK, outbound_only=False)
        transport: Any = MemoryTransport(self._network, self.identity.author, machine, _addresses(self))
        transport.pid = os.getpid()  # whose CPU time is read as p2pd's, and not told
        self.transport = transport


class MemoryHost(host.Host):
    """Does in this process what others do in their own: all nodes, on a network of their own."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        super().__init__(stack)
        self._network = Network(LATENCY, random.Random(0))
        stack.callback(self.stop_pacing)

    def make_node(self, number: int, tokens: int) -> host.BenchNode:
        return MemoryNode(self._network, number, tokens)

    async def do(self, what: str, *, limit: float = 0.0, **arguments: Any) -> Figures:
        """As `swarm.Host.do`."""
        command = getattr(self, what)
        return await command(**arguments) or {}


async def in_memory(stack: contextlib.AsyncExitStack, prefix: Sequence[str] = ()) -> Host:
    """As `swarm.Host.start`, for a plan whose nodes are all in one process."""
    return cast(Host, MemoryHost(stack))


def _addresses(node: host.BenchNode) -> list[str]:
    """One address, as long as a real one here."""
    return [f"/ip4/127.0.0.1/tcp/{50_000 + node.number}/p2p/{node.identity.peer_id}"]


def _record_bytes(tokens: int) -> int:
    """The size of a node's record in the DHT."""
    node = host.BenchNode(0, tokens)
    owner = OwnerSigned(node.identity, node.run.id)
    record = owner.sign("", _addresses(node), RECORD_LIFETIME)
    return len(pack_answer([record]))


def predicted(plan: Plan, **pace: Any) -> Figures:
    """The figures of `steady` on a simulated network, and the bytes of the DHT's answers. pace: as `steady` has it."""
    loop = SimulatedLoop()
    began = time.time()  # stores number their rounds by the machine's clock
    clocks = Clocks(
        boot=loop.time,
        unix=lambda: began + loop.time(),
        thread=lambda: 0.0,
    )
    in_one = replace(plan, per_process=plan.nodes, begin=in_memory)
    with replaced(clocks), asyncio.Runner(loop_factory=lambda: loop) as runner:
        found = runner.run(steady(in_one, **pace))
    answers = directory_figures(
        Scenario(nodes=plan.nodes, session_seconds=1e9),
        warmup=found["meet_seconds"] + 2 * pace["step_seconds"],
        seconds=pace["seconds"],
        fresh=True,
        record_bytes=_record_bytes(plan.tokens),
    )
    for name in ("cpu_per_s", "wire_bytes_per_s"):
        del found[name]  # of the simulation, not of a node
    found["dht_bytes_out_per_s"] = answers["directory_bytes_out_per_node_s"]
    return found


def main() -> None:
    """Measures, predicts and prints both; exits with 1 as the file's docstring says."""
    about = (__doc__ or "").split(":")[0]
    parser = argparse.ArgumentParser(prog="python -m ftis_node.lab.bench.many", description=about)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=240.0, help="that are counted, after two steps")
    parser.add_argument("--step", type=float, default=60.0, help="seconds of a step")
    asked = parser.parse_args()
    pace = {"step_seconds": asked.step, "batch": BATCH, "seconds": asked.seconds}
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    plan = Plan(asked.nodes, per_process=1, groups=GROUPS)
    real = asyncio.run(steady(plan, **pace, tell=partial(say, error=True, flush=True)))
    real["dht_bytes_out_per_s"] = real["bytes_out_per_s"] - real["bytes_in_per_s"]  # its answers count where they leave
    foreseen = predicted(plan, **pace)
    problems = []
    lost = real["announcements_lost"]
    if lost:
        problems.append(f"{lost} announcements were lost")
    for name in JUDGED:
        times = real[name] / foreseen[name]
        if not 1 / FAR < times < FAR:
            problems.append(f"{name} is {real[name]:.1f}, predicted {foreseen[name]:.1f}")
    say(f"rejections: {real.pop('rejections')}")
    for name, value in real.items():
        told = f"{name}: {value:.6g}"
        if name in foreseen:
            told += f", predicted {foreseen[name]:.6g}"
        say(told)
    say(*problems)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
