"""A simulation from its scenario to its figures."""

import asyncio
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ftis_node.host.clocks import Clocks, replaced
from ftis_node.lab.clock import SimulatedLoop
from ftis_node.lab.simulation.network import Meter, Network
from ftis_node.lab.simulation.node import SimulatedNode
from ftis_node.lab.simulation.scenario import Machine, Scenario
from ftis_node.lab.simulation.store import PACKET_BYTES, Reader
from ftis_node.lab.simulation.tally import Presence, Tally, figures

UNIX_START = 1_800_000_000.0  # of the first simulated second
PROGRESS_SECONDS = 2.0  # real ones
COLLECT_SECONDS = 30.0  # simulated ones, after which what only refers to itself is thrown away
TICK_SECONDS = 0.1  # simulated ones, after which it is looked whether to tell of progress

Progress = Callable[[float], None]


class Simulation:
    """A swarm under way. All that is random follows from the scenario's seed. One object runs once.

    nodes: those that are there, by author. first: the machines of the nodes at the start.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.tally = Tally(scenario)
        self.nodes: dict[bytes, SimulatedNode] = {}
        self.first: list[Machine] = []
        self._rng = random.Random(scenario.seed)
        self._reader = Reader()
        self._failed: list[BaseException] = []
        self._leaving: set[asyncio.Task[None]] = set()

    def run(self, progress: Progress = lambda now: None) -> dict[str, Any]:
        """Runs to the end; returns the figures, see `tally.figures`. Meanwhile the whole process has simulated clocks,
        and no garbage collection of its own. docs/network.md says how long it takes.

        Args:
            progress: is told the simulated second every two real seconds or so.

        Raises:
            Exception: what a node raised, which no daemon should.
        """
        loop = SimulatedLoop()
        clocks = Clocks(
            boot=loop.time,
            unix=lambda: UNIX_START + loop.time(),
            thread=lambda: 0.0,
        )
        with _undisturbed(), replaced(clocks), asyncio.Runner(loop_factory=lambda: loop) as runner:
            staying = runner.run(self._run(progress))
        return figures(self.tally, staying, self.first, self.scenario.seconds)

    async def _run(self, progress: Progress) -> list[Presence]:
        """The nodes that are there at the end."""
        scenario = self.scenario
        loop = asyncio.get_running_loop()
        self.network = Network(scenario.latency, self._rng, scenario.packet_bytes / PACKET_BYTES)
        nodes = [self.enter() for _ in range(scenario.nodes)]
        self.first = [node.transport.machine for node in nodes]
        for node in nodes:
            arrival = self._rng.uniform(0.0, scenario.arrival_seconds)
            loop.call_later(arrival, self._start, node, True)
        loop.call_later(scenario.warmup, self._count)
        told = time.monotonic()
        collected = 0.0
        while loop.time() < scenario.seconds:
            left = scenario.seconds - loop.time()
            await asyncio.sleep(min(TICK_SECONDS, left))
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                progress(loop.time())
            if self._failed:
                raise self._failed[0]
            if loop.time() - collected >= COLLECT_SECONDS:
                collected = loop.time()
                gc.collect()
        return [self._presence(node) for node in self.nodes.values()]

    def enter(self) -> SimulatedNode:
        """A fresh node, which is there until its session ends; somebody has to `_start` it."""
        rng = random.Random(self._rng.getrandbits(64))
        node = SimulatedNode(self.network, self._reader, self.tally, rng)
        self.nodes[node.transport.author] = node
        stay = rng.expovariate(1 / self.scenario.session_seconds)
        self.network.loop.call_later(stay, self._leave, node)
        return node

    def _start(self, node: SimulatedNode, midway: bool) -> None:
        """Lets a node begin with some random bootstraps, unless it has left before it came."""
        if node.transport.alive:
            bootstraps = self.network.some_dialable(self.scenario.bootstraps, self._rng)
            node.start(bootstraps, midway=midway).add_done_callback(self._ended)

    def _ended(self, life: asyncio.Task[None]) -> None:
        """Keeps a node's error, which ends the simulation at its next tick."""
        if life.cancelled():
            return
        error = life.exception()
        if error is not None:
            self._failed.append(error)

    def _leave(self, node: SimulatedNode) -> None:
        """Ends a node's session, whose figures stay; a fresh one takes its place at once."""
        del self.nodes[node.transport.author]
        self.tally.gone.append(self._presence(node))
        task = asyncio.create_task(node.leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        self._start(self.enter(), False)

    def _count(self) -> None:
        """Begins to count, once, after the warm-up: nothing before this counts for the figures."""
        self.tally.start()
        for node in self.nodes.values():
            node.transport.meter = Meter(self.network.loop.time())

    def _presence(self, node: SimulatedNode) -> Presence:
        """The node's figures up to now; its meter begins anew. Its calls that end with it, or with the simulation, do
        not count as failed."""
        now = self.network.loop.time()
        meter = node.transport.meter
        node.transport.meter = Meter(now)
        return Presence(node.transport.machine, meter, now)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep Python from collecting cycles by itself: it would go through millions of objects again and again. Objects
    made before the simulation are frozen, so that its own collections go only through its own.

    Thousands of nodes warn of thousands of peers that left; only errors are news.
    """
    logger = logging.getLogger("ftis_node.swarm")
    enabled = gc.isenabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
        logger.setLevel(level)
