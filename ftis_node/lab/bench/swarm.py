"""The traffic of a swarm: everybody sends everything to everybody, beside a plain push; and a long even pace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
import os
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ftis_node.errors import FtisError
from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.bench import Tell, told
from ftis_node.lab.bench.namespaces import bytes_sent, namespaces
from ftis_node.lab.bench.packets import GROUP, make_run, node_identity
from ftis_node.node.stepper import exchange_interval

MEET_SECONDS = 900.0
ANSWER_SECONDS = 60.0
STARTED_AT_ONCE = 8  # processes
LONGEST_ANSWER = 1 << 24  # bytes
VIEW = 64  # peers that a node knows at most
Figures: TypeAlias = dict[str, Any]
"""By name, as JSON has them."""


@dataclass(frozen=True)
class Plan:
    """The nodes, and what each of them sends.

    per_process    how many of the nodes share a process
    groups         packets that a node makes in a round
    tokens         of a completion
    uplink_mbit    if given, each node is in a namespace of its own with an uplink of this speed
    timeout        seconds that one repetition may take
    interval       seconds between two exchanges of a node
    begin          what starts a host, in place of a process
    """

    nodes: int
    per_process: int = 4
    groups: int = 6
    tokens: int = 384
    repetitions: int = 20
    uplink_mbit: float | None = None
    timeout: float = 60.0
    interval: float = 0.2
    begin: Callable[[contextlib.AsyncExitStack, Sequence[str]], Awaitable[Host]] | None = None


class Host:
    """A process with some nodes (`bench.host`)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, stack: contextlib.AsyncExitStack, prefix: Sequence[str] = ()) -> Host:
        """A new process, which ends with the stack.

        Args:
            prefix: what its command is run by, as in a namespace.
        """
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            "ftis_node.lab.bench.host",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_ANSWER,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # as on a machine of its own: Linux shares cores among sessions first
        )
        host = cls(process)
        stack.push_async_callback(host.close)
        return host

    async def do(self, what: str, *, limit: float = ANSWER_SECONDS, **arguments: Any) -> Figures:
        """The answer to a command of `bench.host.Host`. One at a time. Raises FtisError if none comes within `limit`
        seconds; the host cannot be used after that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = {"do": what, **arguments}
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), limit)
        except TimeoutError:
            line = b""
        if not line:
            raise FtisError(f"A process of the benchmark did not answer to {what!r}.")
        answer: Figures = json.loads(line)
        return answer

    async def close(self) -> None:
        """Ends the process by ending its input, or by force."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), ANSWER_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@dataclass
class _Swarm:
    """All hosts; commands go to all of them at once.

    names    the nodes' namespaces; none where they share the machine's loopback
    met      seconds until every node knew all others
    """

    hosts: Sequence[Host]
    names: Sequence[str]
    met: float = 0.0

    async def do(self, what: str, **arguments: Any) -> list[Figures]:
        """The answers of all hosts to one command."""
        return await asyncio.gather(*(host.do(what, **arguments) for host in self.hosts))

    async def wait(self, what: str, count: int, seconds: float) -> float:
        """When the last node had so many, on the machine's clock. Raises FtisError if one has fewer."""
        limit = seconds + ANSWER_SECONDS
        told = await self.do("wait", key=what, count=count, seconds=seconds, limit=limit)
        least = min(answer["least"] for answer in told)
        if least < count:
            raise FtisError(f"After {seconds:.0f} s a node has {least} {what} in place of {count}.")
        return max(float(answer["at"]) for answer in told)

    async def figures(self) -> Figures:
        """The figures of all nodes, CPU-seconds with those of p2pd, and the bytes that the network's interfaces have
        sent so far: take the difference of two."""
        told = await self.do("figures")
        nodes = []
        cpu = 0.0
        for answer in told:
            cpu += answer["cpu"]
            nodes += answer["nodes"]
        for node in nodes:
            cpu += node["p2pd_cpu"]
        return {
            "at": max(answer["at"] for answer in told),
            "cpu": cpu,
            "wire": self._bytes_sent(),
            "nodes": nodes,
        }

    def _bytes_sent(self) -> int:
        """Of all namespaces, or of the machine's whole loopback."""
        if self.names:
            return sum(map(bytes_sent, self.names))
        return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


@contextlib.asynccontextmanager
async def _started(plan: Plan, tell: Tell) -> AsyncIterator[_Swarm]:
    """The nodes of a plan, all of whom have met; all end with the context. Raises FtisError if they do not meet within
    a quarter of an hour."""
    async with contextlib.AsyncExitStack() as stack:
        places = []
        per_process = plan.per_process
        if plan.uplink_mbit:
            places = stack.enter_context(namespaces(plan.nodes, plan.uplink_mbit))
            per_process = 1
        firsts = range(0, plan.nodes, per_process)
        began = boot_seconds()
        tell(f"starting {plan.nodes} nodes in {len(firsts)} processes")
        begin = plan.begin or Host.start
        hosts = []
        starting = []
        for index, first in enumerate(firsts):
            setup = {"host": "127.0.0.1", "quic": False, "interval": plan.interval}
            prefix: Sequence[str] = ()
            if places:
                name, setup["host"] = places[index]
                prefix = ("ip", "netns", "exec", name)
            host = await begin(stack, prefix)
            hosts.append(host)
            end = min(first + per_process, plan.nodes)
            numbers = list(range(first, end))
            answer = host.do("start", numbers=numbers, tokens=plan.tokens, setup=setup, limit=MEET_SECONDS)
            starting.append(answer)
        addresses = []
        for first in range(0, len(starting), STARTED_AT_ONCE):  # a p2pd that starts among too many counts as dead
            some = starting[first : first + STARTED_AT_ONCE]
            for started in await asyncio.gather(*some):
                addresses += started["addresses"]
        swarm = _Swarm(hosts, [name for name, _ in places])
        joined = boot_seconds()
        await swarm.do("join", bootstraps=addresses[:2], limit=MEET_SECONDS)
        others = min(plan.nodes - 1, VIEW)
        met_at = await swarm.wait("peers", others, MEET_SECONDS)
        swarm.met = met_at - joined
        tell(f"every node knows {others} others after {met_at - began:.1f} s")
        yield swarm


class _Phase:
    """One way of giving everybody everything: seconds, CPU-seconds and bytes on the wire of each repetition."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.wire: list[float] = []

    def add(self, before: Figures, after: Figures, seconds: float) -> None:
        """A repetition, by the figures of all nodes around it."""
        self.seconds.append(seconds)
        self.cpu.append(after["cpu"] - before["cpu"])
        self.wire.append(after["wire"] - before["wire"])

    def medians(self, name: str, tokens: int) -> dict[str, float]:
        """Figures whose names begin with `name`. tokens: of a repetition."""
        return {
            f"{name}seconds": statistics.median(self.seconds),
            f"{name}cpu_seconds": statistics.median(self.cpu),
            f"{name}wire_bytes_per_token": statistics.median(self.wire) / tokens,
        }


async def all_gather(plan: Plan, tell: Tell = told) -> Figures:
    """Each node makes `groups` packets and every node wants all of them. Then the same packets by a plain push, whose
    receivers look at nothing but the hash; then others by a push whose receivers admit and store them, as pullers do.

    Returns seconds (median) until all have all, CPU-seconds of all processes, p2pd included, `amplification` (payload
    of all RPCs over that of the packets alone), `wire_bytes_per_token` (of the network's interfaces, which on a
    machine's loopback count whatever else is sent there), and the same of the pushes. Raises FtisError if a node lacks
    one packet when a repetition's time is over.
    """
    authors = [node_identity(number).author.hex() for number in range(plan.nodes)]
    async with _started(plan, tell) as swarm:
        everything = (plan.nodes - 1) * plan.groups
        pulled = _Phase()
        pushes = {"stream_push_": _Phase(), "stored_push_": _Phase()}
        payload = 0.0
        ideal = 0
        pushed = 0
        for repetition in range(1, plan.repetitions + 1):
            made = await swarm.do("make", groups=plan.groups)
            size = sum(answer["bytes"] for answer in made)
            ideal += size * (plan.nodes - 1)
            before = await swarm.figures()
            began = boot_seconds()
            await swarm.do("announce", wanted=everything)
            at = await swarm.wait("admitted", repetition * everything, plan.timeout)
            after = await swarm.figures()
            pulled.add(before, after, at - began)
            payload += _total(after, "bytes_in") - _total(before, "bytes_in")
            tell(f"{repetition} of {plan.repetitions}: {at - began:.2f} s")
            for name, phase in pushes.items():
                stored = name == "stored_push_"
                await swarm.do("keep", pushed=stored)
                if stored:
                    await swarm.do("make", groups=plan.groups)  # others, which are in no store yet
                before = await swarm.figures()
                pushed += everything
                began = boot_seconds()
                await swarm.do("push", others=authors, limit=plan.timeout + ANSWER_SECONDS)
                at = await swarm.wait("pushed", pushed, plan.timeout)
                phase.add(before, await swarm.figures(), at - began)
        tokens = plan.nodes * everything * GROUP * plan.tokens
        result = {
            "nodes": plan.nodes,
            "repetitions": plan.repetitions,
            "packet_bytes": size // (plan.nodes * plan.groups),
            **pulled.medians("", tokens),
            "seconds_spread": [min(pulled.seconds), max(pulled.seconds)],
            "amplification": payload / ideal,
            "rejections": _merged(after),
        }
        for name, phase in pushes.items():
            ratios = map(operator.truediv, pulled.seconds, phase.seconds)
            result |= phase.medians(name, tokens)
            result[f"{name}ratio"] = statistics.median(ratios)
        if plan.uplink_mbit is not None:
            bits_of_a_node = 8 * size / plan.nodes * (plan.nodes - 1)
            line_seconds = bits_of_a_node / 1e6 / plan.uplink_mbit
            result["line_seconds"] = line_seconds
            result["line_ratio"] = result["seconds"] / line_seconds
        return result


async def steady(
    plan: Plan,
    *,
    step_seconds: float,
    batch: int,
    seconds: float,
    tell: Tell = lambda line: None,
) -> Figures:
    """Each node makes `groups` packets a step and takes a batch; what that costs a node, after two steps.

    Args:
        batch: groups that a node takes in a step.
        seconds: that are measured.
    """
    plan = replace(plan, interval=exchange_interval(step_seconds))
    async with _started(plan, tell) as swarm:
        await swarm.do("pace", groups=plan.groups, batch=batch, seconds=step_seconds)
        await asyncio.sleep(2 * step_seconds)
        before = await swarm.figures()
        tell(f"measuring for {seconds:.0f} s")
        await asyncio.sleep(seconds)
        after = await swarm.figures()
        elapsed: float = after["at"] - before["at"]
        node_seconds = elapsed * plan.nodes

        def more(key: str) -> float:
            """What was added to a figure of all nodes."""
            return _total(after, key) - _total(before, key)

        admitted = more("admitted")
        groups = None
        steps = more("steps")
        if steps:
            groups = admitted / steps
        announced = set()
        for node in after["nodes"]:
            for number in node["announced"]:
                announced.add((node["author"], number))
        heard = 0
        for node in after["nodes"]:
            heard += len(announced.intersection(map(tuple, node["heard"])))
        bytes_in = more("bytes_in")
        packet_bytes = make_run(plan.tokens).packet_bytes_max - 80
        return {
            "nodes": plan.nodes,
            "seconds": elapsed,
            "meet_seconds": swarm.met,
            "announcements": len(announced),
            "announcements_lost": len(announced) * plan.nodes - heard,
            "bytes_in_per_s": bytes_in / node_seconds,
            "bytes_out_per_s": more("bytes_out") / node_seconds,
            "wire_bytes_per_s": (after["wire"] - before["wire"]) / node_seconds,
            "overhead_bytes_per_s": (bytes_in - admitted * packet_bytes) / node_seconds,
            "cpu_per_s": (after["cpu"] - before["cpu"]) / node_seconds,
            "groups_per_step": groups,
            "rejections": _merged(after),
        }


def _total(figures: Figures, key: str) -> float:
    """A figure of all nodes together."""
    return sum(float(node[key]) for node in figures["nodes"])


def _merged(figures: Figures) -> dict[str, int]:
    """How many rejections all nodes have since their start, by reason."""
    merged = Counter[str]()
    for node in figures["nodes"]:
        merged.update(node["rejections"])
    return dict(merged)
