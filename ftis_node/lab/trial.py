"""One trial: its nodes side by side, in lock step or each at its own pace, written down line by line.

A trial's directory holds `trial.json` (what it is), `events.jsonl` (a line a step, evaluation and gradient probe; the
last is the event `end`) and `checkpoints/`. In lock step it goes on from its last checkpoint after an interruption, to
the same numbers; at a free pace it begins anew, for what was under way is lost with the process.
"""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from ftis_node.host.files import replace_text
from ftis_node.lab.clock import SimulatedLoop
from ftis_node.lab.compute import Compute, InProcess, OwnProcess
from ftis_node.lab.events import Duration, Event, StepEvent, mapped
from ftis_node.lab.exchange import Network
from ftis_node.lab.experiment import NodeSpec
from ftis_node.lab.federation import Federation, average, check_alike
from ftis_node.lab.participant import Participant, kept, number, run_of
from ftis_node.lab.scripts import Recorded, Scripted
from ftis_node.lab.spec import TrialSpec
from ftis_node.lab.starts import model_of
from ftis_node.learner import Learner
from ftis_node.node.step_batch import StepBatch
from ftis_node.observe.provenance import commit, versions

# Real seconds between two checkpoints of a trial in lock step; with large models as many times what writing one takes.
CHECKPOINT_SECONDS = 120.0
SAVING_SHARE = 20


_Facts: TypeAlias = dict[str, Any]
"""Where to go on with a trial, as JSON has it; see `Trial._beginning`."""


class Interrupted(Exception):
    """The trial was asked to stop, and can go on later."""


class Trial:
    """Runs one trial in its directory, which must be no other process's meanwhile. One object runs it once."""

    def __init__(
        self,
        spec: TrialSpec,
        directory: Path,
        models: Path,
        *,
        processes: bool = False,
        stopping: Callable[[], bool] = lambda: False,
        progressed: Callable[[int], None] = lambda steps: None,
    ) -> None:
        """
        Args:
            models: where the warm-ups lie; those that the trial needs must be there.
            processes: each node has a compute process of its own.
            progressed: told the steps that all nodes together have taken, after every step.
            stopping: asked after every step; true ends the trial with `Interrupted`, in lock step with a checkpoint.
        """
        self.spec = spec
        self.directory = directory
        self._processes = processes
        self._stopping = stopping
        self._progressed = progressed
        self._models = models
        self._nodes: list[Participant] = []
        self._learners: list[Participant] = []  # those of them that train
        self._saved_at = time.monotonic()
        self._done = 0
        self._evaluated: dict[str, int] = {}  # node/set → the step of its last evaluation
        self._arrived: set[str] = set()  # nodes that were seen at the pass@1 that ends the trial
        self._at: dict[str, float] = {}  # when each node had taken its last step
        self._federation: Federation | None = None
        if spec.average is not None:
            self._federation = Federation(spec.average)
        self._save_seconds = 0.0  # how long the last checkpoint took to write

    def run(self) -> None:
        """Runs it to its end, from where it was. It starts an event loop of its own, with simulated time.

        Raises:
            Interrupted: `stopping` said so.
            FtisError: a model cannot be loaded, or a node broke down.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        made_by = {"commit": commit(), "versions": versions()}
        facts = {"id": self.spec.id, "made_by": made_by, **self.spec.facts()}
        replace_text(self.directory / "trial.json", json.dumps(facts, indent=1))
        resume = self._resume_point()
        with asyncio.Runner(loop_factory=lambda: SimulatedLoop(resume["time"])) as runner:
            runner.run(self._run(resume))

    def _resume_point(self) -> _Facts:
        """Where to go on, as `_save_all` has written it; the beginning where a checkpoint is missing.

        Cuts the events file to what it was then, or removes what checkpoints there are.
        """
        beginning = self._beginning()
        checkpoints = self.directory / "checkpoints"
        learners = [member.name for member in self.spec.learners]
        try:
            resume = dict(json.loads((self.directory / "resume.json").read_text()))
        except (OSError, ValueError):
            resume = {}
        complete = beginning.keys() <= resume.keys()
        if not complete or not kept(checkpoints, learners, resume["step"]):
            resume = beginning
            shutil.rmtree(checkpoints, ignore_errors=True)
        with (self.directory / "events.jsonl").open("ab") as events:
            events.truncate(resume["bytes"])
        return resume

    def _beginning(self) -> _Facts:
        """What `_resume_point` says of a trial that has not begun."""
        first = 0
        if self.spec.collaboration == "horizontal":
            first = number(self.spec.seed, "rounds") >> 32
        return {
            "step": 0,
            "time": 0.0,
            "bytes": 0,
            "round": {member.name: first for member in self.spec.members},
            "evaluated": {},
            "seconds": 0.0,
            "cpu": 0.0,
        }

    async def _run(self, resume: _Facts) -> None:
        """All of it under the event loop. The event `end` is written last: it makes the trial finished."""
        self._began = time.monotonic() - resume["seconds"]
        self._cpu = time.process_time() - resume["cpu"]
        self._log = (self.directory / "events.jsonl").open("ab")
        try:
            await self._start(resume)
            if self.spec.pace == "lockstep":
                await self._lockstep(resume["step"])
            else:
                await self._free()
            for node in self._learners:
                await self._evaluate_all(node, self._at.get(node.name))  # its time may be over between two
            if self.spec.keep:
                await self._save_all()
            self._write({"event": "end", **self._spent()})
            if not self.spec.keep:
                shutil.rmtree(self.directory / "checkpoints", ignore_errors=True)
        finally:
            self._log.close()
            for node in self._nodes:
                await node.close()

    async def _start(self, resume: _Facts) -> None:
        """Makes all nodes, one run for them, and their weights: of the checkpoint, or new ones, which are evaluated."""
        network = Network()
        for member in self.spec.members:
            model = model_of(self.spec, member, self._models)
            node = Participant(self.spec, member, self._compute(member), model)
            self._nodes.append(node)
            if not member.script:
                self._learners.append(node)
        for node in self._nodes:
            await node.load()
        run = run_of(self.spec, self._nodes[0].facts)
        for node in self._nodes:
            first_round = resume["round"].get(node.name, 0)
            await node.open(run, network, first_round=first_round)
        if self._federation is not None:
            check_alike(self._trainers())
            if "federation" in resume:
                self._federation.take_up(resume["federation"])
        self._evaluated = resume["evaluated"]
        for node in self._learners:
            if resume["step"]:
                await node.restore(self.directory / "checkpoints", resume["step"])
            else:
                await self._evaluate_all(node)

    async def _evaluate(self, node: Participant, also: str | None = None, time: float | None = None) -> None:
        """Evaluates a node on one set, unless it has been at this step.

        Args:
            also: the set's name; None: the held-out prompts.
            time: the simulated second at which it was at this step, if that is not now.
        """
        key = f"{node.name}/{also or ''}"
        step = node.stepper.progress.step
        if self._evaluated.get(key) == step:
            return
        event = await node.evaluate(also)
        if time is not None:
            event["time"] = time
        self._write(event)
        self._evaluated[key] = step
        until = self.spec.until
        if also is None and until is not None and event["pass_at_1"] >= until:
            self._arrived.add(node.name)

    def _spent(self) -> Duration:
        """Real and CPU-seconds so far, those before an interruption included."""
        return {
            "seconds": time.monotonic() - self._began,
            "cpu": time.process_time() - self._cpu,
        }

    def _compute(self, member: NodeSpec) -> Compute:
        """What a member computes with, not started yet; a script is always in this process."""
        if member.samples:
            return Recorded(member.samples, self.spec.seed)
        if member.script:
            return Scripted(member.script, self.spec.seed)
        if self._processes:
            return OwnProcess()
        return InProcess()

    async def _evaluate_all(self, node: Participant, time: float | None = None) -> None:
        """Evaluates a node on the held-out prompts, and on what else the experiment asks for, as `_evaluate`; `time` is
        of the held-out prompts alone."""
        await self._evaluate(node, time=time)
        for also in self.spec.evaluate:
            await self._evaluate(node, also.name)

    def _trainers(self) -> dict[str, Learner]:
        """The learners of all nodes that train, by the nodes' names."""
        return {node.name: node.engine.learner for node in self._learners}

    # --- the two paces --------------------------------------------------------------------------------------------

    async def _lockstep(self, done: int) -> None:
        """The paper's all-gather: nobody goes on before everybody has made and taken a step's groups.

        Args:
            done: the steps that each node has taken before.
        """
        self._done = done * len(self._learners)
        while done < self.spec.steps and not self._out_of_time():
            began = asyncio.get_running_loop().time()
            for node in self._nodes:
                node.begin_round()
            making = [node.stepper.source.maker.generate(node.quota()) for node in self._nodes]
            made = await asyncio.gather(*making)
            stepping = []
            for node, own in zip(self._nodes, made, strict=True):
                if not node.member.script:
                    batch = await node.gather(own)
                    stepping.append(self._step(node, batch, began))
            told = await asyncio.gather(*stepping)
            done += 1
            self._federate(done, told)
            for node, event in zip(self._learners, told, strict=True):
                await self._after_step(node, event)
            stopping = self._stopping()
            since = time.monotonic() - self._saved_at
            if stopping or since > max(CHECKPOINT_SECONDS, SAVING_SHARE * self._save_seconds):
                await self._save_all()
            if stopping and done < self.spec.steps:
                raise Interrupted

    def _federate(self, done: int, told: Sequence[StepEvent]) -> None:
        """Average the nodes' weights if it is time to; their step events tell what each of them counts. Call it after
        each step, before its events are written. Nothing happens in a cell that is not federated."""
        federation = self._federation
        if federation is None:
            return
        for event in told:
            federation.add(event["node"], event["own_data_reward"])
        if federation.due(done):
            shares = federation.weights()
            average(self._trainers(), shares)
            for event in told:
                event["share"] = shares[event["node"]]

    async def _step(self, node: Participant, batch: StepBatch, began: float) -> StepEvent:
        """Takes a node's step and returns its event, of the time when this node was done, whoever else is not yet."""
        taken = await node.stepper.train(batch, began)
        return node.told_step(taken)

    async def _free(self) -> None:
        """All nodes at their own paces, and scripts until the last node is done."""
        writing = []
        for node in self._nodes:
            if node.member.script:
                writing.append(asyncio.ensure_future(node.write()))
        try:
            await asyncio.gather(*map(self._freely, self._learners))
        finally:
            failed = [task for task in writing if not task.cancel()]  # a script ends by an error only
            await asyncio.gather(*writing, return_exceptions=True)
        for task in failed:
            task.result()

    async def _freely(self, node: Participant) -> None:
        """One node, as the daemon steps."""
        never = asyncio.Event()
        while node.stepper.progress.step < self.spec.steps:
            if self._out_of_time() or self._all_there():
                return
            last = await node.stepper.step(never)
            assert last is not None  # it returns None for a set event alone
            await self._after_step(node, node.told_step(last))
            if self._stopping():
                raise Interrupted

    def _out_of_time(self) -> bool:
        """Whether the trial's simulated seconds are over; never if it has no limit."""
        return self.spec.seconds is not None and asyncio.get_running_loop().time() >= self.spec.seconds

    def _all_there(self) -> bool:
        """Whether all of the fastest nodes have reached what the trial goes on until."""
        if self.spec.until is None:
            return False
        fastest = max(node.member.speed for node in self._learners)
        awaited = [node.name for node in self._learners if node.member.speed == fastest]
        return self._arrived.issuperset(awaited)

    async def _after_step(self, node: Participant, event: StepEvent) -> None:
        """Writes a step down, and evaluates the node if it is due, and after the last step."""
        self._done += 1
        self._at[node.name] = event["time"]
        self._write(event)
        step = node.stepper.progress.step
        due = step % node.settings.eval_every == 0
        if due or step == self.spec.steps:
            await self._evaluate(node, time=event["time"])
        self._progressed(self._done)

    # --- what is written ------------------------------------------------------------------------------------------

    def _write(self, event: Event) -> None:
        """Appends an event's line to the log, and flushes it. Floats have six digits, which is more than they mean; a
        step has hundreds of them."""
        rounded = mapped(event, lambda number: float(f"{number:.6g}"))
        line = json.dumps(rounded)
        self._log.write(line.encode() + b"\n")
        self._log.flush()

    async def _save_all(self) -> None:
        """Checkpoints of all nodes that train, and then, in lock step, in one move that they are where to go on.

        A node keeps the checkpoint before, so a process that is killed halfway goes on from that.
        """
        began = time.monotonic()
        for node in self._learners:
            await node.save(self.directory / "checkpoints")
        if self.spec.pace == "lockstep":
            resume = {
                "step": self._learners[0].stepper.progress.step,
                "time": asyncio.get_running_loop().time(),
                "bytes": self._log.tell(),
                "round": {node.name: node.swarm.next_round for node in self._nodes},
                "evaluated": self._evaluated,
                **self._spent(),
            }
            if self._federation is not None:
                resume["federation"] = self._federation.facts()
            os.fsync(self._log.fileno())  # as long as is said, also after a power loss
            replace_text(self.directory / "resume.json", json.dumps(resume))
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - began


def finished(directory: Path) -> bool:
    """Whether the trial of this directory came to its end: the last line of its log says so. It reads the whole log."""
    with suppress(OSError, ValueError, IndexError, KeyError, TypeError):
        lines = (directory / "events.jsonl").read_bytes().splitlines()
        return bool(json.loads(lines[-1])["event"] == "end")
    return False
