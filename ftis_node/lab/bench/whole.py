"""One node without a network for the benchmarks of whole steps: the daemon's stepper around an engine in this process.

A step is what it is in the daemon: generate, score, encode, admit, store, announce, take what others made, train. Left
out are the pipe between the two processes, checkpoints, evaluation, and the network.
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch.profiler import record_function

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.fit.context import context_of
from ftis_node.fit.plan import MICRO_BATCH_TOKENS
from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.bench.model import TEMPERATURE, Size, random_policy, rewards
from ftis_node.lab.bench.packets import node_identity
from ftis_node.lab.compute import InProcess
from ftis_node.lab.exchange import MemorySwarm, Network, trade_of
from ftis_node.node.means import Means
from ftis_node.node.stepper import Stepper, source_for
from ftis_node.step_report import DeviceSeconds
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.reputation import Reputation
from ftis_node.tasks import Example, Task
from ftis_node.tasks.task import TextCaps
from ftis_node.tokenizer.asking import end_ids
from ftis_node.tokenizer.fingerprint import fingerprint
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import Generated, ScoredPacket
from ftis_node.worker.usage import Usage

ROWS = 512
STORE_BYTES = 64 << 20


class Stopwatch(Usage):
    """Also counts the CPU time of this process by kind of work, and names the kinds in a profiler's trace."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu = Usage(time.process_time)
        self.cpu_seconds = DeviceSeconds()

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        with record_function(part), self.cpu.of(part), super().of(part):
            yield

    def step_ended(self) -> DeviceSeconds:
        """As for every engine; `cpu_seconds` are the same in CPU-seconds."""
        self.cpu_seconds = self.cpu.step_ended()
        return super().step_ended()


class RandomEngine(Engine):
    """An engine whose model has random weights.

    It scores text as ever, and then gives every third completion a reward, because such a model earns none.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.usage: Stopwatch = Stopwatch()
        self._config = config

    def start(self, settings: Settings, size: Size) -> tuple[Run, bytes]:
        """Loads and opens; returns the run of made-up questions and the digests of their prompts."""
        caps: dict[str, Any] = size.caps()
        self.load(settings, "arithmetic", caps=caps)
        self.policy = random_policy(self._config, settings)
        self._context = context_of(self._config)
        rows = tuple(Example(question, "0") for question in questions(size, self.policy.vocabulary))
        task = Task(
            "words",
            train=rows[8:],
            held_out=rows[:8],
            data="0" * 64,
            template="{question}",
            reward="exact",
            completion_tokens=size.completion_tokens,
            prompt_tokens=size.prompt_tokens,
            text=TextCaps.beside(size.prompt_tokens, size.completion_tokens),
        )
        self.task = task
        tokenizer = self.policy.tokenizer
        run = Run(
            **caps,
            task=task.name,
            data=task.data,
            template=task.template,
            reward=task.reward,
            slots=64,
            temperature=TEMPERATURE,
            eos=end_ids(tokenizer),
            tokenizer=fingerprint(tokenizer),
            vocabulary=self.policy.vocabulary,
        )
        return run, self.open(run).prompt_digests

    def generate(self, rows: Sequence[int], *given: Any, **more: Any) -> Generated:
        made = super().generate(rows, *given, **more)
        groups = []
        for group in made.groups:
            groups.append(ScoredPacket(group.packet, rewards(len(group.rewards))))
        return Generated(groups, made.seconds, made.generation_batch)

    def score(self, row: int, packet: bytes) -> list[float]:
        return rewards(len(super().score(row, packet)))


def questions(size: Size, words: int) -> list[str]:
    """Prompts of `size.prompt_tokens` of so many made-up words."""
    drawn = np.random.default_rng(0).integers(1, words, (ROWS, size.prompt_tokens))
    return [" ".join(f"w{word}" for word in row) for row in drawn]


class WholeNode:
    """Takes whole steps of a random model of the given configuration, all on groups of its own."""

    def __init__(self, config: Any, size: Size, folder: Path, *, device: str = "cpu") -> None:
        """
        Args:
            folder: where packets may lie.
            device: on a GPU the model is trained in bf16 and in larger micro-batches.
        """
        dtype = "bfloat16"
        micro_batch = MICRO_BATCH_TOKENS["cuda"]
        if device == "cpu":
            dtype = "float32"
            micro_batch = MICRO_BATCH_TOKENS["cpu"]
        settings = Settings(
            model="tiny-a",  # whose place a random one takes
            device=device,
            dtype=dtype,
            micro_batch_tokens=micro_batch,
            batch_groups=size.groups,
            learning_rate=1e-6,
            wait=0.0,
        )
        self.engine = RandomEngine(config)
        self.run, digests = self.engine.start(settings, size)
        context = AdmissionContext(self.run, digests)
        identity = node_identity(0)
        store = PacketStore(folder / "packets.sqlite", self.run.id, STORE_BYTES)
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
        """Takes a whole step; returns its seconds and CPU-seconds by part."""
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
