"""One node of a trial: the daemon's stepper, pool and admission around an engine, in simulated time."""

import asyncio
import hashlib
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec

from ftis_node.config.run import Run, check_fit, run_for
from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError, UsageError
from ftis_node.lab.compute import Compute, InProcess, Metered
from ftis_node.lab.events import HELD_OUT, EvaluationEvent, Spent, StepEvent
from ftis_node.lab.exchange import MemorySwarm, Network, trade_of
from ftis_node.lab.experiment import NodeSpec
from ftis_node.lab.payloads import Watch, size_cap
from ftis_node.lab.spec import TrialSpec, generating, own_share
from ftis_node.node.demand import announced_age
from ftis_node.node.means import Means
from ftis_node.node.progress import Progress
from ftis_node.node.step_batch import StepBatch
from ftis_node.node.stepper import Stepper, source_for
from ftis_node.node.vertical import VerticalSource
from ftis_node.policy.load import load_tokenizer
from ftis_node.step_report import TakenStep
from ftis_node.store.checkpoints import Checkpoints, labelled
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.pool import Pool, Scored
from ftis_node.swarm.reputation import Reputation
from ftis_node.tasks import load_task
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import OWN_DATA, AddEvaluation, Evaluate, Load, ModelFacts, Open, Restore, Save

STORE_BYTES = 64 << 20
_TOLD = (  # of a step's figures
    "own_groups",
    "foreign_groups",
    "own_reward",
    "foreign_reward",
    "foreign_age",
    "loss",
    "gradient_norm",
    "tokens",
    "skipped",
    "warnings",
)
SLOTS = 128  # of a horizontal run at a free pace, in an epoch


class Participant:
    """A member with everything it needs. `load`, `open`, perhaps `restore`, then steps; `close` at the end. In lock
    step the trial calls `begin_round`, the maker and `gather` for each step; at a free pace `Stepper.step`, or `write`
    of a script."""

    def __init__(self, spec: TrialSpec, member: NodeSpec, compute: Compute, model: str) -> None:
        """
        Args:
            model: what `Settings.model` is to be, see `starts.model_of`.
        """
        self.spec = spec
        self.member = member
        self.name = member.name
        self.compute = compute
        settings = spec.settings_of(member)
        own: dict[str, Any] = {
            "model": model,
            "seed": number(spec.seed, member.name, "engine") >> 1,
        }
        if spec.average is not None:
            # The whole batch is on rows of its own; a daemon's settings leave a group for the run's.
            own["own_data_share"] = 1.0
            own["batch_groups"] = settings.batch_groups + 1
        self.settings: Settings = settings.model_copy(update=own)
        self.meter = Metered(compute, spec.clock, member.speed)
        seed = hashlib.sha256(f"ftis lab/{spec.seed}/{member.name}".encode())
        self._identity = Identity(seed.digest())

    # --- starting -------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Loads task and model; `facts` is then what a run must know of them.

        Raises:
            UserError: they cannot be loaded.
            UsageError: rows of its own, and a process of its own.
        """
        if self.member.own_data:
            self.engine.own_task = load_task(self.member.own_data, code=True)
        await self.compute.start()
        sizes = {"prompt_tokens", "completion_tokens", "group"}
        request = Load(
            settings=self.settings,
            task=self.spec.task,
            data=self.spec.data or None,
            eval_data=self.spec.eval_data or None,
            code=True,  # who runs a lab file has named what is in it
            caps={key: value for key, value in self.spec.run.items() if key in sizes},
        )
        self.facts = await self.compute.call(request)

    async def open(self, run: Run, network: Network, *, first_round: int = 0) -> None:
        """Takes up the run, and a place in the network; from now on samples count, and cost simulated time.

        Args:
            first_round: the number of its next round: that of the checkpoint where a trial goes on.

        Raises:
            UsageError: its model or task does not fit the run.
        """
        try:
            check_fit(run, self.facts.shared(), self.settings.model)
        except UsageError as error:
            what = f"Node {self.name} shares no run with the first node. {error.what}"
            raise UsageError(what, "Use models of one family.") from None
        opened = await self.compute.call(Open(run))
        for also in self.spec.evaluate:
            if also.name != OWN_DATA:
                request = AddEvaluation(also.name, also.task, also.data or None, also.prompts)
                await self.compute.call(request)
        own_only = opened.own_only or self.spec.collaboration in ("alone", "federated")
        at_own_pace = self.spec.pace == "free"
        max_age = math.inf
        if at_own_pace:
            max_age = announced_age(run, self.settings.max_age)
        clock = asyncio.get_running_loop().time
        context = AdmissionContext(run=run, prompt_digests=opened.prompt_digests)
        store = PacketStore(Path(":memory:"), run.id, STORE_BYTES, clock=lambda: first_round)
        self.swarm = MemorySwarm(
            network,
            self._identity.author,
            trade_of(context, store, lambda: self.stepper),
            clock,
            max_age=max_age,
            rng=self._rng("table"),
            on_demand=at_own_pace and not own_only and not self.member.script,
        )
        means = Means(
            context=context,
            own_only=own_only,
            author=self._identity.author,
            settings=self.settings,
            store=store,
            worker=self.meter,
            reputation=Reputation(clock, self.settings.defences),
            clock=clock,
            age_clock=clock,
            unix=clock,
            swarm=self.swarm,
            own_data=bool(self.member.own_data),
        )
        source = source_for(means, self._rng("pool"))
        self.stepper = Stepper(means, source)
        self.swarm.next_round = first_round
        self.meter.run = run
        if self.spec.payloads:
            tokenizer = load_tokenizer(self.settings.model)
            rows = load_task(self.spec.task).train
            self.meter.watch = Watch(tokenizer, rows, size_cap(run))

    @property
    def engine(self) -> Engine:
        """Its engine in this process. Raises UsageError where it is in a process of its own."""
        if not isinstance(self.compute, InProcess):
            what = "Rows of a node's own and averaged weights need all nodes in one process."
            raise UsageError(what, "Leave out --procs.")
        return self.compute.engine

    def _rng(self, what: str) -> random.Random:
        """Random numbers of this node for one purpose, the same in each run of the trial."""
        return random.Random(number(self.spec.seed, self.name, what))

    async def write(self) -> None:
        """A script at its own pace: it makes one step's groups after another, and never trains. It ends by an error or
        when it is cancelled. The clock must make groups cost time."""
        while True:
            await self.stepper.source.maker.generate(self.quota())

    # --- lock step ------------------------------------------------------------------------------------------------

    def quota(self) -> int:
        """Groups that it generates itself a step, or parts of groups in a horizontal run; 0 for a listener."""
        if self.spec.average is not None:
            return 0  # rows of its own alone, which the step makes
        means = self.stepper.means
        if means.own_only or means.run.parts > 1:
            return means.batch_groups  # with parts, of each of them a part
        return math.ceil(own_share(self.spec, self.settings) * means.batch_groups)

    def begin_round(self) -> None:
        """A pool for this round alone, in which groups without a signal count as they do among one's own. In lock step
        only, for all nodes before any of them generates.

        What the round draws follows from its step, so that a resumed trial draws the same.
        """
        step = self.stepper.progress.step
        clock = asyncio.get_running_loop().time
        assert isinstance(self.stepper.source, VerticalSource)
        self.stepper.source.pool = Pool(lambda: math.inf, clock, self._rng(f"pool/{step}"), keep_all=True)
        self.swarm.reseed(self._rng(f"table/{step}"))

    async def gather(self, own: list[Scored]) -> StepBatch:
        """The batch of this round: what it made itself, and what it takes of the others. In lock step only, once all
        nodes have made theirs."""
        means = self.stepper.means
        if means.own_only:
            return StepBatch(own, [])
        await self.swarm.collect()
        await self.stepper.source.inbox.scored()
        parts = means.run.parts
        if parts > 1:  # in lock step the parts of one round and slot form a group
            missing = means.batch_groups * (parts - 1)
            others = self.stepper.pool.take(missing, means.newcomers())
            return StepBatch(own, others, key=lambda group: group.key[1:])
        missing = means.batch_groups - len(own)
        others = self.stepper.pool.take(missing, means.newcomers())
        return StepBatch(own, others)

    async def close(self) -> None:
        """Ends what it started, also if it was not opened."""
        if hasattr(self, "swarm"):
            await self.swarm.close()
        await self.compute.stop()

    # --- what is told ---------------------------------------------------------------------------------------------

    def spent(self) -> Spent:
        """The cost so far: a line's beginning."""
        return {
            "node": self.name,
            "step": self.stepper.progress.step,
            "time": asyncio.get_running_loop().time(),
            "generated": self.meter.generated,
            "trained": self.meter.trained,
        }

    async def evaluate(self, also: str | None = None) -> EvaluationEvent:
        """Evaluates now, and returns the event, which is not written yet. also: a set's name; None: the held-out
        prompts. It takes no simulated time."""
        found = await self.compute.call(Evaluate(also))
        result = msgspec.structs.asdict(found)
        del result["seconds"]
        event = {
            "event": "evaluation",
            **self.spent(),
            "set": also or HELD_OUT,
            **result,
        }
        return cast(EvaluationEvent, event)

    def told_step(self, taken: TakenStep) -> StepEvent:
        """A step event; diagnostics of all samples, one's own, and the foreign ones. Call it once a step: it takes the
        counts of payloads."""
        event: dict[str, Any] = {"event": "step", **self.spent()}
        if self.meter.watch is not None:
            event["payloads"] = self.meter.watch.take()
        row = taken.row()
        for name in _TOLD:
            event[name] = row[name]
        if self.member.own_data:
            event["own_data_reward"] = taken.report.own_data_reward
        diagnostics = taken.report.diagnostics
        event["overall"] = diagnostics.overall
        event["own"] = diagnostics.sources.get("own", {})
        event["foreign"] = {}
        if taken.batch.foreign_groups:
            event["foreign"] = diagnostics.foreign
        return cast(StepEvent, event)

    # --- what outlives an interruption ----------------------------------------------------------------------------

    async def save(self, directory: Path) -> None:
        """A checkpoint in the daemon's own format, in a folder of the node's name; the training waits."""
        checkpoints = Checkpoints(directory / self.name)
        partial = checkpoints.begin(self.stepper.progress.step)
        await self.compute.call(Save(str(partial)))
        counts = {
            "generated": self.meter.generated,
            "trained": self.meter.trained,
            "round": self.swarm.next_round,
        }
        facts = {
            "model": labelled(self.settings.model, self.facts.kind),
            "optimiser": self.facts.plan.optimiser,
            "settings": self.settings.model_dump(mode="json"),
            "progress": self.stepper.progress.facts(),
            "lab": counts,
            "standing": self.stepper.means.reputation.facts(),
        }
        checkpoints.commit(partial, facts)

    async def restore(self, directory: Path, step: int) -> None:
        """Goes on from the checkpoint of that step; later ones are set aside. Call it only if `kept` found it sound."""
        checkpoints = Checkpoints(directory / self.name)
        found = checkpoints.latest(before=step + 1)
        if found is None:
            raise FtisError(f"The checkpoint of node {self.name} at step {step} is gone.")
        checkpoints.set_aside(after=step)
        path, facts = found
        await self.compute.call(Restore(str(path), step))
        means = self.stepper.means
        means.progress = Progress.from_facts(facts["progress"])
        means.reputation.take_up(facts.get("standing", {"authors": {}}))
        counts = facts["lab"]
        self.meter.generated = counts["generated"]
        self.meter.trained = counts["trained"]


def kept(directory: Path, names: Iterable[str], step: int) -> bool:
    """Whether there is a sound checkpoint of that step of each of these nodes."""
    for name in names:
        found = Checkpoints(directory / name).latest(before=step + 1)
        if found is None or found[1]["progress"]["step"] != step:
            return False
    return True


def run_of(spec: TrialSpec, facts: ModelFacts) -> Run:
    """The run that the trial's members share, for the task and tokenizer that the first node's engine loaded."""
    fields: dict[str, Any] = dict(spec.run)
    if spec.collaboration == "horizontal":
        fields["collaboration"] = "horizontal"
        fields["parts"] = generating(spec)
        if spec.pace == "free":
            fields["common"] = fields.setdefault("slots", SLOTS)
    return run_for(facts.shared(), **fields)


def number(*parts: Any) -> int:
    """A number of 64 bits that follows from the parts' texts, the same everywhere."""
    text = "/".join(map(str, parts))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big")
