"""The compute of a trial's node, an engine in this process or a process of its own, and its cost."""

import asyncio
import time
from collections.abc import Sequence
from typing import TypeAlias

import psutil

from ftis_node.config.run import Run
from ftis_node.lab.clock import SimulatedLoop
from ftis_node.lab.experiment import Clock
from ftis_node.lab.payloads import Watch
from ftis_node.packet import decode
from ftis_node.worker.client import Worker
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import Answer, Generate, Generated, Request, Step


class InProcess:
    """An engine right here."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Engine()
        self.cpu = 0.0

    async def start(self) -> None:
        pass

    async def call(self, request: Request[Answer]) -> Answer:
        began = time.process_time()
        result: Answer = request.answered_by(self.engine)
        self.cpu += time.process_time() - began
        return result

    async def stop(self) -> None:
        pass


class OwnProcess:
    """The daemon's own compute process. While it works simulated time stands still."""

    def __init__(self) -> None:
        self.cpu = 0.0
        self._worker = Worker()

    async def start(self) -> None:
        self._worker.start()
        assert self._worker.pid is not None
        self._process = psutil.Process(self._worker.pid)

    async def call(self, request: Request[Answer]) -> Answer:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        began = self._process.cpu_times()
        with loop.working():
            result = await self._worker.call(request)
        ended = self._process.cpu_times()
        self.cpu += ended.user + ended.system - began.user - began.system
        return result

    async def stop(self) -> None:
        await self._worker.stop()


Compute: TypeAlias = InProcess | OwnProcess
"""As the daemon's worker, and it knows the CPU seconds that it used."""


class Metered:
    """A node's compute, which takes simulated time for what it samples or trains on, and counts the completions.

    Scoring and evaluating are free: a daemon scores beside its steps, and evaluates for people only.
    """

    def __init__(self, compute: Compute, clock: Clock, speed: float) -> None:
        self.generated = self.trained = 0
        self.run: Run | None = None
        self.watch: Watch | None = None  # looks at what is sampled
        self._compute = compute
        self._clock = clock
        self._speed = speed

    async def call(self, request: Request[Answer]) -> Answer:
        result = await self._compute.call(request)
        if self.run is not None and isinstance(request, Generate) and isinstance(result, Generated):
            self.generated += len(request.rows) * self.run.completions
            packets = [decode(group.packet) for group in result.groups]
            if self.watch is not None:
                self.watch.see(request.rows, packets)
            await self._take(self._clock.generate, [length for packet in packets for length in packet.lengths])
        elif self.run is not None and isinstance(request, Step):
            parts = (part for group in request.groups for part in group.parts)
            lengths = [length for part in parts for length in decode(part.packet).lengths]
            self.trained += len(lengths)
            await self._take(self._clock.train, lengths)
        return result

    async def _take(self, seconds: float, lengths: Sequence[int]) -> None:
        """Lets the time of completions of these lengths pass, at so many seconds a group or a token."""
        assert self.run is not None
        amount = len(lengths) / self.run.group
        if self._clock.per == "token":
            amount = sum(lengths)
        await asyncio.sleep(seconds * amount / self._speed)
