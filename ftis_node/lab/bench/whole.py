"""One node without a network for the benchmarks of whole steps: the daemon's stepper around an engine in this process.

A step is what it is in the daemon: generate, score, encode, admit, store, announce, take what others made, train. Left
out are the pipe between the two processes, checkpoints, evaluation, and the network.
"""

import asyncio
import contextlib
import math
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from torch.profiler import record_function

from ftis_node.config.run import run_for
from ftis_node.config.settings import Settings, collect
from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.bench.model import TEMPERATURE, Size, rewards, small_config, written
from ftis_node.lab.bench.packets import node_identity
from ftis_node.lab.compute import InProcess
from ftis_node.lab.exchange import MemorySwarm, Network, trade_of
from ftis_node.node.means import Means
from ftis_node.node.stepper import Stepper, source_for
from ftis_node.step_report import DeviceSeconds
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.reputation import Reputation
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import Generated, ScoredPacket
from ftis_node.worker.usage import Usage

STORE_BYTES = 64 << 20


class Stopwatch(Usage):
    """Also counts the CPU time of this process by kind of work, and names the kinds in a profiler's trace. cpu_seconds:
    of the latest step that ended, 0 before."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu = Usage(time.process_time)
        self.cpu_seconds = DeviceSeconds()

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """See `Usage.of`."""
        with record_function(part), self.cpu.of(part), super().of(part):
            yield

    def step_ended(self) -> DeviceSeconds:
        """As for every engine; `cpu_seconds` are the same in CPU-seconds."""
        self.cpu_seconds = self.cpu.step_ended()
        return super().step_ended()


class BenchEngine(Engine):
    """An engine that scores text as ever, and then gives every third completion a reward: random weights earn none. So
    the scoring costs what it costs, and every step trains."""

    def __init__(self) -> None:
        super().__init__()
        self.usage: Stopwatch = Stopwatch()

    def start(self, settings: Settings, size: Size, task: Mapping[str, str]) -> bytes:
        """Load, and open a run in groups of this size; return the digests of its prompts. task: see `written`."""
        caps = {"group": size.group, "completion_tokens": size.completion_tokens}
        facts = self.load(settings, **task, caps=caps)
        run = run_for(facts.shared() | caps, group=size.group, temperature=TEMPERATURE)
        return self.open(run).prompt_digests

    @property
    def settings(self) -> Settings:
        """The settings as the plan completed them, after `start`."""
        return self._settings

    def generate(self, rows: Sequence[int], *given: Any, **more: Any) -> Generated:
        """As `Engine.generate`, with made-up rewards in place of those found."""
        made = super().generate(rows, *given, **more)
        groups = []
        for group in made.groups:
            groups.append(ScoredPacket(group.packet, rewards(len(group.rewards))))
        return Generated(groups, made.seconds, made.generation_batch)

    def score(self, row: int, packet: bytes) -> list[float]:
        """As `Engine.score`, with made-up rewards in place of those found."""
        return rewards(len(super().score(row, packet)))


def asked(
    model: str | None, data: Path | None, given: Mapping[str, str], size: Size, folder: Path
) -> tuple[Settings, Mapping[str, str]]:
    """The settings of a benchmark, and what `Load` calls its task.

    Args:
        model: its name or folder; None: one of random weights is made, and asked in made-up words.
        data: a file of GSM8K's rows, which the named one is asked; None: arithmetic.
        given: further settings of a person.
        folder: where the random model may lie.
    """
    task = {"task": "arithmetic"}
    if data is not None:
        task = {"task": "gsm8k", "data": str(data), "eval_data": str(data)}
    if model is None:
        model, task = written(folder, small_config(), size)
    values = {"lora": False, "dtype": "float32", "learning_rate": 1e-6, "device": "cpu", **given}
    values |= {"model": model, "batch_groups": size.groups, "wait": 0.0}
    settings, _ = collect(task="", flags=values, environment={})
    return settings, task


@contextlib.contextmanager
def engine_of(
    model: str | None, data: Path | None, given: Mapping[str, str], size: Size
) -> Iterator[tuple[BenchEngine, Size]]:
    """An engine of what is `asked`, with an open run, and the size with its longest prompt; closed afterwards."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(BenchEngine()) as engine:
        settings, task = asked(model, data, given, size, Path(folder))
        engine.start(settings, size, task)
        longest = max(map(len, engine.prompts[: size.groups]))
        yield engine, replace(size, prompt_tokens=longest)


class WholeNode:
    """Takes whole steps of a model, all on groups of its own."""

    def __init__(self, settings: Settings, size: Size, task: Mapping[str, str], folder: Path) -> None:
        """
        Args:
            task: see `written`.
            folder: where packets may lie.
        """
        self.engine = BenchEngine()
        digests = self.engine.start(settings, size, task)
        context = AdmissionContext(self.engine.run, digests)
        identity = node_identity(0)
        store = PacketStore(folder / "packets.sqlite", self.engine.run.id, STORE_BYTES)
        trade = trade_of(context, store, lambda: self.stepper)
        swarm = MemorySwarm(
            Network(),
            identity.author,
            trade,
            boot_seconds,
            max_age=math.inf,
            rng=random.Random(0),
            on_demand=True,
        )
        means = Means(
            context=context,
            own_only=False,
            author=identity.author,
            settings=settings,
            store=store,
            worker=InProcess(self.engine),
            reputation=Reputation(boot_seconds, ()),
            swarm=swarm,
        )
        self.stepper = Stepper(means, source_for(means))

    async def step(self) -> dict[str, float]:
        """Takes a whole step; returns its seconds by part (`step_total`, `step_idle` and those of `DeviceSeconds`), and
        CPU-seconds as `cpu_…`. Raises RuntimeError if the step took no update."""
        last = await self.stepper.step(asyncio.Event())
        if last is None or last.report.skipped:
            raise RuntimeError(f"the step took no update: {last}")
        seconds: dict[str, float] = msgspec.structs.asdict(last.report.device)
        total = last.seconds.total
        seconds["step_total"] = total
        seconds["step_idle"] = max(0.0, total - seconds["generate"] - seconds["train"])
        cpu = msgspec.structs.asdict(self.engine.usage.cpu_seconds)
        for part, spent in cpu.items():
            seconds[f"cpu_{part}"] = spent
        return seconds

    def close(self) -> None:
        self.engine.close()
