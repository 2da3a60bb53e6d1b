"""A swarm in memory that reports about itself, and an observer that looks at it."""

import asyncio
import random
from collections.abc import Callable

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.lab.simulation.network import MemoryTransport
from ftis_node.lab.simulation.node import RUN_FILE, SimulatedNode
from ftis_node.lab.simulation.scenario import Scenario, draw_machine
from ftis_node.lab.simulation.simulate import Progress, Simulation
from ftis_node.lab.simulation.store import RUN
from ftis_node.lab.simulation.tally import Presence
from ftis_node.swarm.identity import Identity, author_of
from ftis_node.swarm.overview import Overview, SwarmFacts
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.self_report import TEACHERS_MAX, SelfReport
from ftis_node.swarm.swarm import Swarm

MODELS = (
    ("qwen2.5-0.5b", "c0382117ea32"),
    ("qwen2.5-1.5b", "c0382117ea32"),
    ("llama-3.2-1b", "5e27ac28c2f9"),
)
NAMES = "Ada Ben Cleo Dan Eva Finn Gil Hana Ida Jon Kim Leo Mia Noa Oli Pia Quinn Rosa Sam Tom Uma Vic Wim Xia Yara Zoe"


class WatchedSimulation(Simulation):
    """The nodes' claims grow with the groups that they used: a picture of a swarm, no measurement."""

    facts: SwarmFacts
    observer: Swarm

    def __init__(self, scenario: Scenario, reporting: Callable[[int], bool] = lambda number: True):
        super().__init__(scenario)
        self._entered = 0
        self._reporting = reporting

    def enter(self) -> SimulatedNode:
        node = super().enter()
        number = self._entered
        self._entered += 1
        reports = node.swarm.reports
        reports.telling = self._reporting(number)
        reports.describe = lambda: claims(node, number)
        return node

    async def _run(self, progress: Progress) -> list[Presence]:
        watching = asyncio.create_task(self._watch())
        staying = await super()._run(progress)
        watching.cancel()
        await asyncio.wait({watching})
        self.facts = self.overview.facts()
        return staying

    async def _watch(self):
        await asyncio.sleep(self.scenario.arrival_seconds)
        identity = Identity(bytes(32))
        rng = random.Random(self.scenario.seed)
        transport = MemoryTransport(self.network, identity.author, draw_machine(self.scenario, rng), ())
        self.observer = Swarm(
            transport=transport,
            identity=identity,
            run_file=RUN_FILE,
            reputation=Reputation(boot_seconds),
            max_age=self.scenario.settings.max_age,
            decode=self._reader,
            rng=rng,
        )
        self.observer.idle = 10.0
        self.overview = Overview(self.observer)
        await self.observer.start(self.network.some_dialable(self.scenario.bootstraps, rng))
        await self.overview.run()


def claims(node: SimulatedNode, number: int) -> SelfReport:
    """What a simulated node says of itself; its pass@1 is made up."""
    progress = node.stepper.progress
    names = NAMES.split()
    used = sorted(progress.foreign_groups_used.items(), key=lambda item: -item[1])
    model, tokenizer = MODELS[number % len(MODELS)]
    learned = progress.own_groups_used + sum(groups for _, groups in used)
    begins = 0.15 + 0.02 * (number % 8)
    return SelfReport(
        run_id=RUN.id,
        author=node.transport.author,
        at=int(unix_seconds()),
        name=names[number % len(names)] + ("" if number < len(names) else str(number // len(names) + 1)),
        model=model,
        tokenizer=tokenizer,
        version="0.1.0",
        reach="outbound-only" if node.transport.machine.outbound_only else "direct",
        state="ONLINE",
        step=progress.step,
        pass_at_1=begins + 0.6 * learned / (learned + 1500),
        pass_at_1_before=begins,
        own_used=progress.own_groups_used,
        foreign_used=sum(groups for _, groups in used),
        peers=len(node.swarm.membership.active_view),
        bytes_in=node.swarm.traffic.bytes_in,
        bytes_out=node.swarm.traffic.bytes_out,
        teachers={author_of(author): groups for author, groups in used[:TEACHERS_MAX]},
    )


def watched(scenario: Scenario, reporting: Callable[[int], bool] = lambda number: True) -> WatchedSimulation:
    """The simulation after its end, with what the observer saw."""
    simulation = WatchedSimulation(scenario, reporting)
    simulation.run()
    return simulation


def watched_eight() -> WatchedSimulation:
    """Eight nodes, of which two say nothing of themselves."""
    return watched(Scenario(nodes=8, seconds=420.0), lambda number: number not in (2, 5))
