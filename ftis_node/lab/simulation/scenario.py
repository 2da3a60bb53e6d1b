"""The scenario: how many nodes of what kind, for how long."""

import math
import random
from dataclasses import dataclass, field, replace

from ftis_node.config.run import RUN_DEFAULTS
from ftis_node.config.settings import Settings


@dataclass(frozen=True)
class Scenario:
    """Times in seconds, rates in Mbit/s (10^6 bits). A node draws its speed and its uplink once.

    group_seconds, train_seconds: of the median node, to generate one group and to train one step. Both are multiplied
        by the node's one log-normal factor, of parameter `sigma`.
    uplink_mbit: the ends between which uplinks are drawn, uniform in their logarithm.
    latency: of every message, one way.
    session_seconds: mean of the exponential time after which a node leaves; a fresh one takes its place at once.
    outbound_only: part of the nodes that nobody can dial.
    signal: part of the groups whose rewards differ.
    bootstraps: nodes that a fresh one knows.
    arrival_seconds: within which the first nodes join, each in the middle of a step: a swarm in which everybody starts
        at once is none that would be met.
    settings: of every node; what is not about the network and the step does not matter here.
    """

    nodes: int
    seconds: float = 1800.0
    seed: int = 0
    group_seconds: float = 5.0
    train_seconds: float = 20.0
    sigma: float = 0.8
    uplink_mbit: tuple[float, float] = (5.0, 100.0)
    latency: float = 0.05
    session_seconds: float = 7200.0
    outbound_only: float = 0.2
    packet_bytes: int = 37_000
    signal: float = 0.8
    bootstraps: int = 3
    arrival_seconds: float = 30.0
    settings: Settings = field(default_factory=Settings)

    def with_success(self, chance: float) -> "Scenario":
        """With the dead groups of `RUN_DEFAULTS["group"]` answers, each right with this chance (from 0 to 1)."""
        answers = RUN_DEFAULTS["group"]
        all_right = chance**answers
        all_wrong = (1 - chance) ** answers
        return replace(self, signal=1 - all_right - all_wrong)

    @property
    def warmup(self) -> float:
        """Seconds that no figure counts: views fill, and first steps have nothing to take."""
        return min(300.0, self.seconds / 2)


@dataclass(frozen=True)
class Machine:
    """What a node runs on. Seconds to generate a group and to train a step; the uplink in bytes a second."""

    group_seconds: float
    train_seconds: float
    uplink: float
    outbound_only: bool

    def alone_seconds(self, batch_groups: int) -> float:
        """A step for which the node generates everything itself."""
        return batch_groups * self.group_seconds + self.train_seconds


def draw_machine(scenario: Scenario, rng: random.Random) -> Machine:
    """A machine as the scenario's distributions have it."""
    factor = rng.lognormvariate(0.0, scenario.sigma)
    low, high = map(math.log, scenario.uplink_mbit)
    return Machine(
        group_seconds=scenario.group_seconds * factor,
        train_seconds=scenario.train_seconds * factor,
        uplink=math.exp(rng.uniform(low, high)) * 1e6 / 8,
        outbound_only=rng.random() < scenario.outbound_only,
    )
