"""Nodes without models, several in one process: `python -m ftis_node.lab.bench.host`, spoken to in lines of JSON.

Everything on the network's side is real: p2pd, gossip, fetch, admission, store. In place of a model each node has a
generator of packets of a run's size. `bench.swarm` starts such hosts, in the namespaces that it is told.
"""

import asyncio
import json
import math
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, AsyncIterator, TypeAlias  # noqa: UP035 - hivemind recognises a stream by typing's alias only

import numpy as np
import psutil
import uvloop
from hivemind.p2p import P2PContext, PeerID, ServicerBase

from ftis_node.config.run import RunFile
from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.bench.packets import GROUP, make_context, make_packet, make_run, node_identity
from ftis_node.packet import Group, encode, packet_digest
from ftis_node.store.packets import PacketStore
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.admission import AdmissionContext, admit
from ftis_node.swarm.announcement import PacketRef
from ftis_node.swarm.known import Arrival
from ftis_node.swarm.pool import Newcomers, Want
from ftis_node.swarm.pulling import Trade
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.swarm import Swarm
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.p2pd import SENT_AHEAD
from ftis_node.swarm.wire.transport import Listening

Facts: TypeAlias = dict[str, Any]
"""By name, as JSON has them."""
QUOTA_BYTES = 64 << 20
POLL_SECONDS = 0.005
# An announcement between these ages that a node does not know is lost.
LATE_SECONDS = 60.0
OLD_SECONDS = 500.0


class PushedPackets(ServicerBase):  # type: ignore[misc]
    """The rival of announce-and-pull: an author sends its packets to every peer over one stream each."""

    def __init__(self, keep: Callable[[bytes, ftis_pb2.FetchChunk], None]) -> None:
        """
        Args:
            keep: what is done with each packet of an author while `keeps` is set; else only its hash is checked.

        received: packets so far, without those of a wrong hash.
        """
        self.received = 0
        self.keeps = False
        self._keep = keep

    async def rpc_push(
        self, requests: AsyncIterator[ftis_pb2.FetchChunk], context: P2PContext
    ) -> AsyncIterator[ftis_pb2.FetchRequest]:
        """Takes one stream of packets, and answers each with an empty message."""
        async for chunk in requests:
            if self.keeps:
                self._keep(context.remote_id.to_bytes(), chunk)
            if self.keeps or packet_digest(chunk.packet) == chunk.digest:
                self.received += 1
            yield ftis_pb2.FetchRequest()


class BenchNode:
    """The network side of one node: `start`, `join`, then rounds by `make` and `announce` or `push`, or `pace`."""

    def __init__(self, number: int, tokens: int) -> None:
        """
        Args:
            number: its key and its random numbers follow from it.
            tokens: of a completion, at most.
        """
        self.number = number
        self.run = make_run(tokens)
        self.identity = node_identity(number)
        self.random = np.random.default_rng(number)
        self.store = PacketStore(Path(":memory:"), self.run.id, QUOTA_BYTES)
        self.pushed = PushedPackets(self._keep)
        self.admitted = 0
        self.appetite = sys.maxsize  # how many it wants in all
        self.steps = 0
        self.announced: dict[int, float] = {}  # round → when, on the machine's clock
        self._round = 0
        self._made: list[Group] = []  # of that round
        self._p2pd_seconds = 0.0  # of CPU, when it last was there

    async def open(self, stack: AsyncExitStack, setup: Facts) -> None:
        """Starts p2pd, which ends with the stack. setup: see `start`."""
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftis-")))
        self.identity.keep(scratch / "key")
        listening = Listening(
            scratch / "key",
            scratch,
            setup["host"],
            0,
            quic=setup["quic"],
            relays=tuple(setup.get("relays", ())),
            relay_for_others=bool(setup.get("relay_for_others")),
        )
        self.transport = await Libp2p.start(listening)
        stack.push_async_callback(self.transport.close)
        await self.pushed.add_p2p_handlers(self.transport.p2p)

    async def start(self, stack: AsyncExitStack, context: AdmissionContext, setup: Facts) -> str:
        """Opens the transport; returns its address.

        Args:
            setup: host, quic, interval, relays, relay_for_others.
        """
        await self.open(stack, setup)
        self.context = context
        self.swarm = Swarm(
            transport=self.transport,
            identity=self.identity,
            run_file=RunFile(run=self.run),
            max_age=600.0,
            reputation=Reputation(boot_seconds),
            trade=Trade(context, self.store, self._want, self._take),
        )
        self.swarm.interval = setup["interval"]
        return (await self.transport.addresses())[0]

    async def join(self, stack: AsyncExitStack, bootstraps: Sequence[str]) -> None:
        """Joins the swarm, and leaves it with the stack."""
        await self.swarm.start(bootstraps)
        stack.push_async_callback(self.swarm.close)

    def make(self, groups: int) -> int:
        """Makes a round of packets, and stores them; returns their bytes."""
        author = self.identity.author
        self._round = self.store.upcoming_round()
        self.store.take_round(self._round)
        self._made = []
        for slot in range(groups):
            packet = make_packet(self.run, author, self._round, slot, self.random)
            self._made.append(self._admitted(author, encode(packet)))
        self.store.add(self._made, own=True)
        return sum(len(group.data) for group in self._made)

    def announce(self, wanted: int) -> None:
        """Announces what `make` made; from now on the node wants so many more of others' packets. Once a round."""
        self.appetite = self.admitted + wanted
        self.announced[self._round] = boot_seconds()
        refs = []
        for slot, group in enumerate(self._made):
            right = math.ceil(GROUP / 3)  # as `model.rewards` has it
            refs.append(PacketRef(slot, group.digest, len(group.data), right))
        self.swarm.announce(self._round, policy_step=self._round, packets=refs)

    async def push(self, others: Sequence[bytes]) -> None:
        """Sends what `make` made to all others, over a stream each, and waits until they have taken it. others: their
        38-byte peer ids."""
        await asyncio.gather(*map(self._push, others))

    async def _push(self, other: bytes) -> None:
        """See `push`, to one other: a packet is answered before many more are sent."""
        received = asyncio.Event()
        unanswered = asyncio.Semaphore(SENT_AHEAD)  # a stream with more is ended

        async def chunks() -> AsyncIterator[ftis_pb2.FetchChunk]:
            for group in self._made:
                await unanswered.acquire()
                yield ftis_pb2.FetchChunk(digest=group.digest, packet=group.data)
            await received.wait()  # whoever called ends the stream, else p2pd drops what is under way

        receiver = PushedPackets.get_stub(self.transport.p2p, PeerID(other))
        stream = await receiver.rpc_push(chunks())
        try:
            for _ in self._made:
                await anext(stream)
                unanswered.release()
        finally:
            received.set()
            with suppress(Exception):
                await stream.aclose()

    async def pace(self, groups: int, batch: int, seconds: float) -> None:
        """A node's life without its model: every so many seconds a round of its own, and a batch out of the pool. It
        ends when it is cancelled."""
        taken = 0
        self.appetite = self.admitted + batch
        while True:
            self.make(groups)
            self.announce(self.appetite - self.admitted)
            jitter = float(self.random.uniform(0.9, 1.1))
            await asyncio.sleep(seconds * jitter)
            self.steps += 1
            taken += min(batch, self.admitted - taken)
            self.appetite = taken + 2 * batch  # this batch and the next
            self.swarm.wake()

    def _keep(self, author: bytes, chunk: ftis_pb2.FetchChunk) -> None:
        """Admit and store a pushed packet, as a pulled one."""
        group = self._admitted(author, chunk.packet, digest=chunk.digest)
        self.store.add([group], own=False)

    def _admitted(self, author: bytes, packet: bytes, digest: bytes | None = None) -> Group:
        """An author's packet as a group. Raises RuntimeError if admission refuses it."""
        verdict = admit(self.context, author, packet, digest=digest)
        if not isinstance(verdict, Group):
            raise RuntimeError(f"a packet of the benchmark is unsound: {verdict}")
        return verdict

    def _want(self) -> Want:
        """What is left of its appetite; the swarm asks."""
        return Want(self.appetite - self.admitted, Newcomers(), sys.maxsize)

    async def _take(self, arrived: Sequence[Arrival]) -> None:
        """Stores and counts admitted packets of others, which the swarm has pulled."""
        self.store.add([one.group for one in arrived], own=False)
        self.admitted += len(arrived)

    def counts(self) -> dict[str, int]:
        """What may be waited for, see `Host.wait`; each but `peers` only grows."""
        return {
            "admitted": self.admitted,
            "pushed": self.pushed.received,
            "peers": len(self.swarm.membership.active_view),
        }

    def figures(self) -> Facts:
        """Counted since the start. announced: rounds that are old enough for all to know, and not too old; heard:
        author and round of each announcement that it knows now."""
        with suppress(psutil.NoSuchProcess):  # it is being replaced
            times = psutil.Process(self.transport.pid).cpu_times()
            self._p2pd_seconds = times.user + times.system
        now = boot_seconds()
        announced = []
        for number, at in self.announced.items():
            if LATE_SECONDS < now - at < OLD_SECONDS:
                announced.append(number)
        heard = []
        for known in self.swarm.gossip.table:
            heard.append([known.announcement.author.hex(), known.announcement.round])
        return {
            **self.counts(),
            "reachability": self.swarm.membership.reachability(),
            "addresses": self.swarm.membership.own_addresses,
            "bytes_in": self.swarm.traffic.bytes_in,
            "bytes_out": self.swarm.traffic.bytes_out,
            "rejections": dict(self.swarm.pulling.rejections),
            "author": self.identity.author.hex(),
            "announced": announced,
            "heard": heard,
            "steps": self.steps,
            "p2pd_cpu": self._p2pd_seconds,
        }


class Host:
    """The commands, each for all nodes of this process. `serve` calls them by name with arguments from JSON, and one at
    a time; `start` comes first, then `join`. `bench.swarm` and `bench.many` send them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._nodes: list[BenchNode] = []
        self._paced: list[asyncio.Task[None]] = []

    def make_node(self, number: int, tokens: int) -> BenchNode:
        """For `start`; `bench.many` makes others."""
        return BenchNode(number, tokens)

    async def start(self, numbers: list[int], tokens: int, setup: Facts) -> Facts:
        """Starts nodes of these numbers; returns their addresses. tokens, setup: see `BenchNode`."""
        self._nodes = [self.make_node(number, tokens) for number in numbers]
        context = make_context(self._nodes[0].run)
        addresses = []
        for node in self._nodes:
            addresses.append(await node.start(self._stack, context, setup))
        return {"addresses": addresses}

    async def join(self, bootstraps: list[str]) -> None:
        """Lets all nodes join, at once."""
        joining = [node.join(self._stack, bootstraps) for node in self._nodes]
        await asyncio.gather(*joining)

    async def make(self, groups: int) -> Facts:
        """Each node makes a round of so many packets; returns the bytes of all."""
        made = [node.make(groups) for node in self._nodes]
        return {"bytes": sum(made)}

    async def announce(self, wanted: int = sys.maxsize) -> None:
        """See `BenchNode.announce`."""
        for node in self._nodes:
            node.announce(wanted)

    async def push(self, others: list[str]) -> None:
        """Each node pushes its round to all of these but itself, until they have it. others: peer ids in hex."""
        peers = [bytes.fromhex(other) for other in others]
        pushes = []
        for node in self._nodes:
            but_itself = [peer for peer in peers if peer != node.identity.author]
            pushes.append(node.push(but_itself))
        await asyncio.gather(*pushes)

    async def keep(self, pushed: bool) -> None:
        """Whether packets that are pushed from now on are admitted and stored, as pulled ones are."""
        for node in self._nodes:
            node.pushed.keeps = pushed

    async def wait(self, key: str, count: int, seconds: float) -> Facts:
        """Wait until each node has `count` of `key` (`admitted`, `pushed` or `peers`), at most so many seconds.

        Returns `least`, the number of the node that has fewest, which is below `count` if time ran out; and `at`, when
        that was, on the machine's clock (seconds since it started).
        """
        deadline = boot_seconds() + seconds
        while True:
            least = min(node.counts()[key] for node in self._nodes)
            now = boot_seconds()
            if least >= count or now >= deadline:
                return {"least": least, "at": now}
            await asyncio.sleep(POLL_SECONDS)

    async def pace(self, groups: int, batch: int, seconds: float) -> None:
        """Begins `BenchNode.pace` of all nodes, and returns at once; `stop_pacing` ends it."""
        for node in self._nodes:
            task = asyncio.create_task(node.pace(groups, batch, seconds))
            self._paced.append(task)

    def stop_pacing(self) -> None:
        """Ends what `pace` began."""
        for task in self._paced:
            task.cancel()

    async def figures(self) -> Facts:
        """cpu: seconds of this process, without p2pd; at: when, on the machine's clock; nodes: each one's figures."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "cpu": usage.ru_utime + usage.ru_stime,
            "at": boot_seconds(),
            "nodes": [node.figures() for node in self._nodes],
        }


async def serve() -> None:
    """Obeys one command a line until its input ends."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        host = Host(stack)
        line = await loop.run_in_executor(None, sys.stdin.readline)
        while line:
            arguments = json.loads(line)
            command = getattr(host, arguments.pop("do"))
            answer = await command(**arguments)
            print(json.dumps(answer or {}), flush=True)
            line = await loop.run_in_executor(None, sys.stdin.readline)
        host.stop_pacing()


if __name__ == "__main__":
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    uvloop.run(serve())
