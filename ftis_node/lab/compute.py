"""The compute of a trial's node, an engine in this process or a process of its own, and its cost."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ftis_node.config.run import Run
from ftis_node.lab.clock import SimulatedLoop
from ftis_node.lab.experiment import Clock
from ftis_node.lab.payloads import Watch
from ftis_node.packet import AnyPacket, decode
from ftis_node.worker.client import Worker
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import Answer, Generate, Generated, Request, Step


class InProcess:
    """An engine right here: `call` holds up the event loop, and so simulated time, until it is done. It raises the
    engine's own errors, where a `Worker` raises WorkerFault."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Engine()

    async def start(self) -> None:
        pass

    async def call(self, request: Request[Answer]) -> Answer:
        answer: Answer = request.answered_by(self.engine)
        return answer

    async def stop(self) -> None:
        pass


class OwnProcess:
    """The daemon's own compute process. While it works simulated time stands still, for all nodes of the trial. Only
    under a `SimulatedLoop`; for errors see `Worker.call`."""

    def __init__(self) -> None:
        self._worker = Worker()

    async def start(self) -> None:
        self._worker.start()

    async def call(self, request: Request[Answer]) -> Answer:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        with loop.working():
            return await self._worker.call(request)

    async def stop(self) -> None:
        await self._worker.stop()


Compute: TypeAlias = InProcess | OwnProcess
"""As the daemon's worker."""


@dataclass
class Metered:
    """A node's compute, which takes simulated time for what it samples or trains on, and counts the completions.

    Scoring and evaluating are free: a daemon scores beside its steps, and evaluates for people only.

    speed      how many times as fast as the clock says
    run        None as long as nothing counts: until the trial has opened it
    watch      counts payloads in what is sampled; None: nobody asked for that
    generated  own completions so far; trained: samples trained on, own and foreign. A trial that goes on sets both
    """

    compute: Compute
    clock: Clock
    speed: float
    run: Run | None = None
    watch: Watch | None = None
    generated: int = 0
    trained: int = 0

    async def call(self, request: Request[Answer]) -> Answer:
        """The compute's answer, after the simulated time that the work takes. Groups on a node's own rows take none."""
        result = await self.compute.call(request)
        if self.run is None:
            return result
        if isinstance(request, Generate) and isinstance(result, Generated):
            self.generated += len(request.rows) * self.run.completions
            packets = [decode(group.packet) for group in result.groups]
            if self.watch is not None:
                self.watch.see(request.rows, packets)
            await self._take(self.clock.generate, packets, self.run.group)
        elif isinstance(request, Step):
            packets = []
            for group in request.groups:
                packets += [decode(part.packet) for part in group.parts]
            self.trained += sum(len(packet.lengths) for packet in packets)
            await self._take(self.clock.train, packets, self.run.group)
        return result

    async def _take(self, seconds: float, packets: Sequence[AnyPacket], group: int) -> None:
        """Lets the time of these packets' completions pass.

        Args:
            seconds: of each group, or each token, as `Clock.per` says, at speed 1.
            group: how many completions count as a group.
        """
        lengths = [length for packet in packets for length in packet.lengths]
        amount = len(lengths) / group
        if self.clock.per == "token":
            amount = sum(lengths)
        await asyncio.sleep(seconds * amount / self.speed)
