"""Several devices: which request is answered here, which by all of them, and which by each for its part of the rows.

This process is rank 0 and holds the node's socket. Each further device has a compute process, which gets requests as
this one does; within a step the ranks talk to one another (`learner.team`). The node and its peers see one engine.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace

from ftis_node.config.settings import Settings
from ftis_node.errors import NO_ROOM
from ftis_node.evaluate.greedy import merged
from ftis_node.host.interruption import forget
from ftis_node.host.threads import Threads
from ftis_node.text import say
from ftis_node.worker import messages as m
from ftis_node.worker.client import Worker
from ftis_node.worker.engine import Engine

Answer = TypeVar("Answer")


class Ranks:
    """An engine on each device of its settings, which may be one."""

    def __init__(self) -> None:
        self.engine = Engine(self._load_others, Threads(torch.get_num_threads()))
        self._others: list[Worker] = []
        self._load: m.Load
        self._loading: list[Future[m.ModelFacts]] = []
        self._interrupts: list[Future[None]] = []

    @property
    def size(self) -> int:
        """How many processes there are, with this one."""
        return 1 + len(self._others)

    def answer(self, request: m.Request[Any]) -> Any:
        """The answer of all devices.

        Raises:
            FtisError: a rank failed; all have ended what they did.
        """
        match request:
            case m.Load():
                return self._start(request)
            case _ if not self._others:
                return self._here(request)
            case m.Open() | m.Change() | m.Restore() | m.AddEvaluation():
                return self._all([request] * self.size)[0]
            case m.Step():
                return self._all(self._steps(request))[0]
            case m.Generate():
                return self._generate(request)
            case m.Evaluate(also):
                parts = [m.Evaluate(also, rank, self.size) for rank in range(self.size)]
                return merged(self._all(parts))
            case m.Save() | m.Snapshot() if self.engine.learner.in_shards:
                return self._all([request, *[m.Gather()] * len(self._others)])[0]
            case m.Interrupt():
                self._interrupts += [rank.ask(request) for rank in self._others]
        return self._here(request)

    def _start(self, asked: m.Load) -> m.ModelFacts:
        """Load here and in every rank; from then on they have the same weights."""
        devices = asked.settings.devices
        threads = None
        if len(devices) > 1 and devices[0] == "cpu":
            threads = max(1, torch.get_num_threads() // len(devices))
            torch.set_num_threads(threads)
            self.engine.threads = None
        self._load = asked
        self._others = [Worker(_leave) for _ in devices[1:]]
        for rank in self._others:
            rank.start(threads=threads)
        facts: m.ModelFacts = self._here(asked)
        for loading in self._loading:
            loading.result()
        if self._others:
            folder = Path(tempfile.mkdtemp(prefix="ftis-ranks-"))
            given = (self.size, str(folder / "ranks"), bool(facts.settings.sharded))
            self._all([m.InitProcessGroup(rank, *given) for rank in range(self.size)])
            if self.engine.policy.device.type == "cpu":  # nccl may look for the others there again
                shutil.rmtree(folder)
        return facts

    def _load_others(self, settings: Settings) -> None:
        """The ranks load with what was settled here: a plan of their own might be another."""
        told = replace(self._load, must_fit=False)
        for rank, device in zip(self._others, settings.devices[1:], strict=True):
            mine = settings.model_copy(update={"device": device})
            self._loading.append(rank.ask(replace(told, settings=mine)))

    def _generate(self, asked: m.Generate) -> m.Generated:
        """Each rank samples for its part of the rows; all their groups, in the order of the rows."""
        slots = asked.slots or range(len(asked.rows))
        seeds = asked.seeds or self.engine.seeds(len(asked.rows))
        requests = []
        for rank in range(self.size):
            mine = slice(rank, None, self.size)
            request = replace(
                asked,
                rows=asked.rows[mine],
                slots=list(slots[mine]),
                seeds=seeds[mine],
            )
            requests.append(request)
        answers = self._all(requests)
        groups = _in_turn([answer.groups for answer in answers])
        seconds = max(answer.seconds for answer in answers)
        return m.Generated(
            groups,
            seconds,
            min(answer.generation_batch for answer in answers),
        )

    def _steps(self, asked: m.Step) -> list[m.Step]:
        """The same step for all, each with the size of micro-batches that this one has."""
        own = self.engine.own_groups(asked.own_data, lambda rows: self._generate(m.Generate(rows, own=True)))
        groups = [*asked.groups, *own]
        size = asked.micro_batch_tokens
        mine = m.Step(groups, size)
        theirs = m.Step(groups, size or self.engine.learner.room.size)
        return [mine, *[theirs] * len(self._others)]

    def _here(self, request: m.Request[Any]) -> Any:
        return request.answered_by(self.engine)

    def _all(self, requests: Sequence[m.Request[Any]]) -> list[Any]:
        """Each rank's answer to its own of the requests."""
        waits: list[Callable[[], Any]] = [partial(self._here, requests[0])]
        for rank, request in zip(self._others, requests[1:], strict=True):
            waits.append(rank.ask(request).result)
        answers = []
        errors = []
        for wait in waits:
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
        for asked in [rank.ask(m.Forget()) for rank in self._others]:
            asked.result()
        forget()


def _leave(code: int | None) -> None:
    """A rank has died, and what it had is a part of a step: end this process too."""
    say(f"The compute process of one of several devices has ended ({code}).", error=True, flush=True)
    os._exit(NO_ROOM if code == NO_ROOM else 1)


def _in_turn(parts: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The rows of `rows[rank :: ranks]` of each rank, in their order again."""
    ranks = len(parts)
    whole = sum(map(len, parts))
    return [parts[place % ranks][place // ranks] for place in range(whole)]
