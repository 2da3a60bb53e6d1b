"""An engine on several devices: rows are split for generation and evaluation, a batch for its gradient.

This process is rank 0 and holds the node's socket. Each further device has a compute process, which does what this one
tells it; within a step the ranks talk to one another (`learner.team`). The node and its peers see one engine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.errors import NO_ROOM
from ftis_node.evaluate.evaluation import Evaluation
from ftis_node.evaluate.greedy import merged
from ftis_node.host.interruption import forget
from ftis_node.step_report import StepReport
from ftis_node.text import say
from ftis_node.worker.client import Worker
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import (
    AddEvaluation,
    Change,
    Evaluate,
    Forget,
    Gather,
    Generate,
    Generated,
    InitProcessGroup,
    Interrupt,
    Load,
    ModelFacts,
    OpenedRun,
    Request,
    Restore,
    Step,
    StepGroup,
    TryRows,
)
from ftis_node.worker.messages import Open as OpenRun

Answer = TypeVar("Answer")


class ParallelEngine(Engine):
    """An engine on all devices of its settings, which may be one."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: list[Worker] = []
        self._load: dict[str, Any] = {}
        self._loading: list[Future[ModelFacts]] = []
        self._interrupts: list[Future[None]] = []

    @property
    def ranks(self) -> int:
        """How many processes there are, with this one."""
        return 1 + len(self._ranks)

    def load(self, settings: Settings, task: str, *given: Any, **more: Any) -> ModelFacts:
        """Load the task and the model here and in every rank."""
        devices = settings.devices
        if len(devices) > 1:
            threads = None
            if devices[0] == "cpu":
                threads = max(1, torch.get_num_threads() // len(devices))
                torch.set_num_threads(threads)
            self._ranks = [Worker(_leave) for _ in devices[1:]]
            for rank in self._ranks:
                rank.start(threads=threads)
        self._load = {"task": task, **dict(zip(Load.__struct_fields__[2:], given, strict=False)), **more}
        facts = super().load(settings, task, *given, **more)
        for loading in self._loading:
            loading.result()
        if self._ranks:
            folder = Path(tempfile.mkdtemp(prefix="ftis-ranks-"))
            given = (self.ranks, str(folder / "ranks"), bool(facts.settings.sharded))
            self._all(lambda rank: InitProcessGroup(rank, *given), lambda: self.init_process_group(0, *given))
            if self.policy.device.type == "cpu":  # nccl may look for the others there again
                shutil.rmtree(folder)
        return facts

    def _planned(self) -> None:
        """The ranks load with what was settled here: a plan of their own might be another."""
        for rank, device in zip(self._ranks, self._settings.devices[1:], strict=True):
            settings = self._settings.model_copy(update={"device": device})
            told = {**self._load, "remembered": None, "must_fit": False, "sizes": self._sizes}
            self._loading.append(rank.ask(Load(settings=settings, **told)))

    def open(self, run: Run) -> OpenedRun:
        """Open a run in every rank."""
        return self._all(lambda _: OpenRun(run), lambda: super(ParallelEngine, self).open(run))[0]

    def change(self, settings: Settings) -> None:
        """Take over the constants of the objective in every rank."""
        self._all(lambda _: Change(settings), lambda: super(ParallelEngine, self).change(settings))

    def restore(self, directory: str, steps: int) -> None:
        """Restore a checkpoint in every rank."""
        self._all(lambda _: Restore(directory, steps), lambda: super(ParallelEngine, self).restore(directory, steps))

    def add_evaluation(self, name: str, task: str, data: str | None, prompts: int | None) -> int:
        """Load another task for evaluation in every rank."""
        given = (name, task, data, prompts)
        return self._all(lambda _: AddEvaluation(*given), lambda: super(ParallelEngine, self).add_evaluation(*given))[0]

    def generate(self, rows: Sequence[int], *given: Any, **more: Any) -> Generated:
        """Each rank samples for its part of the rows."""
        asked = Generate(rows, *given, **more)
        slots, seeds = asked.slots or range(len(rows)), asked.seeds or self.seeds(len(rows))

        def part(rank: int) -> Generate:
            mine = slice(rank, None, self.ranks)
            return msgspec.structs.replace(asked, rows=rows[mine], slots=list(slots[mine]), seeds=seeds[mine])

        answers = self._all(part, lambda: super(ParallelEngine, self).generate(**part(0).arguments()))
        groups = _in_turn([answer.groups for answer in answers])
        seconds = max(answer.seconds for answer in answers)
        return Generated(groups, seconds, min(answer.generation_batch for answer in answers))

    def try_rows(self, rows: Sequence[int]) -> list[bool]:
        """Each rank answers its part of the rows."""
        parts = [list(rows[rank :: self.ranks]) for rank in range(self.ranks)]
        mine = super().try_rows
        answers: list[list[bool]] = self._all(lambda rank: TryRows(parts[rank]), lambda: mine(parts[0]))
        return _in_turn(answers)

    def evaluate(self, also: str | None = None, part: int = 0, parts: int = 1) -> Evaluation:
        """Each rank answers its part of the questions."""
        if not self._ranks:
            return super().evaluate(also, part, parts)
        mine = super().evaluate
        return merged(self._all(lambda rank: Evaluate(also, rank, self.ranks), lambda: mine(also, 0, self.ranks)))

    def _step(self, groups: Sequence[StepGroup]) -> StepReport:
        """Every rank takes the same step."""
        mine = super()._step
        return self._all(lambda _: Step(groups, self.learner.micro_batch_tokens), lambda: mine(groups))[0]

    def save(self, directory: str) -> None:
        """Write a checkpoint here, of all ranks' shards if there are any."""
        self._gathering(lambda: super(ParallelEngine, self).save(directory))

    def snapshot(self, directory: str) -> None:
        """Copy a checkpoint into main memory, likewise."""
        self._gathering(lambda: super(ParallelEngine, self).snapshot(directory))

    def _gathering(self, mine: Callable[[], None]) -> None:
        if self._shards is None:
            mine()
        else:
            self._all(lambda _: Gather(), mine)

    def interrupt(self) -> None:
        """Interrupt what all ranks do."""
        self._interrupts += [rank.ask(Interrupt()) for rank in self._ranks]
        super().interrupt()

    def end(self) -> None:
        """End the other ranks."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []

    def _all(self, request: Callable[[int], Request[Answer]], mine: Callable[[], Answer]) -> list[Answer]:
        """Ask every other rank, by its number, and do this one's part; the answers in the order of the ranks.

        Raises:
            FtisError: a rank failed; all have ended what they did.
        """
        asked = [rank.ask(request(number)) for number, rank in enumerate(self._ranks, 1)]
        answers: list[Answer] = []
        errors: list[Exception] = []
        for wait in (mine, *(one.result for one in asked)):
            try:
                answers.append(wait())
            except Exception as error:
                errors.append(error)
        if errors:
            self._forget()
            raise errors[0]
        return answers

    def _forget(self) -> None:
        """Let no rank take an interrupt of what has ended for one of what comes next."""
        while self._interrupts:
            self._interrupts.pop().result()
        for asked in [rank.ask(Forget()) for rank in self._ranks]:
            asked.result()
        if self._ranks:
            forget()


def _leave(code: int | None) -> None:
    """A rank has died, and what it had is a part of a step: end this process too."""
    say(f"The compute process of one of several devices has ended ({code}).", error=True, flush=True)
    os._exit(NO_ROOM if code == NO_ROOM else 1)


def _in_turn(parts: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The rows of `rows[rank :: ranks]` of each rank, in their order again."""
    whole = sum(map(len, parts))
    return [parts[place % len(parts)][place // len(parts)] for place in range(whole)]
