"""A simulation from its scenario to its figures."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ftis_node.lab.simulation.network import Network
from ftis_node.lab.simulation.node import SimulatedNode
from ftis_node.lab.simulation.scenario import Scenario
from ftis_node.lab.simulation.scheduler import Scheduler
from ftis_node.lab.simulation.tally import Tally, figures
from ftis_node.lab.simulation.wire import Reader
from ftis_node.swarm.identity import Identity


class Simulation:
    """A swarm under way. All that is random follows from the scenario's seed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.scheduler = Scheduler()
        self._rng = random.Random(scenario.seed)
        self.network = Network(scenario, self.scheduler, self._rng)
        self.tally = Tally(scenario)
        self._reader = Reader()
        nodes = [self._enter() for _ in range(scenario.nodes)]
        self.first = [node.line.machine for node in nodes]
        for node in nodes:
            self.scheduler.after(self._rng.uniform(0.0, scenario.arrival_seconds), self._start, node, True)
        self.scheduler.after(scenario.warmup, self._count)

    def run(self, progress: Callable[[float], None] = lambda now: None) -> dict[str, Any]:
        """Runs to the end; returns the figures. `progress` is told the simulated second now and then."""
        with _no_collector():
            self.scheduler.run(self.scenario.seconds, progress)
        lines = [node.line for node in self.network.nodes.values()]
        return figures(self.tally, lines, self.first, self.scheduler.now)

    def _enter(self) -> SimulatedNode:
        rng = random.Random(self._rng.getrandbits(64))
        identity = Identity(rng.randbytes(32))
        node = SimulatedNode(self.scenario, self.network, self._reader, self.tally, identity, rng)
        self.network.enter(node)
        self.scheduler.after(rng.expovariate(1 / self.scenario.session_seconds), self._leave, node)
        return node

    def _start(self, node: SimulatedNode, midway: bool) -> None:
        if node.line.alive:
            node.start(self.network.some_dialable(self.scenario.bootstraps), midway=midway)

    def _leave(self, node: SimulatedNode) -> None:
        self.network.leave(node)
        self.tally.leave(node.line, self.scheduler.now)
        self._start(self._enter(), False)

    def _count(self) -> None:
        self.tally.start((node.line for node in self.network.nodes.values()), self.scheduler.now)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without the cyclic garbage collector, which would go through millions of objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def simulate(scenario: Scenario, progress: Callable[[float], None] = lambda now: None) -> dict[str, Any]:
    """Simulates a scenario. `progress` is told the simulated second about every two real seconds."""
    return Simulation(scenario).run(progress)
