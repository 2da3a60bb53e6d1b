"""The compute process's operations: load, open a run, generate, score, step, evaluate, save, restore."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ftis_node.config.run import RUN_DEFAULTS, Run
from ftis_node.config.settings import LIVE_CONSTANTS, Settings
from ftis_node.evaluate.episodes import Episodes
from ftis_node.evaluate.evaluation import Evaluation
from ftis_node.evaluate.judging import verdict
from ftis_node.evaluate.playing import play, sampled
from ftis_node.fit.context import Context, refuse_run
from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Plan
from ftis_node.host.allocator import trim
from ftis_node.host.doing import advance, doing, now
from ftis_node.host.interruption import forget, interrupt
from ftis_node.host.threads import Threads
from ftis_node.learner import Learner, Part, TrainingGroup, choose_objective
from ftis_node.learner.fsdp import Shards
from ftis_node.learner.team import ALONE, Team
from ftis_node.policy.generate.graphs import failed
from ftis_node.policy.generate.kept import let_go
from ftis_node.policy.generate.sampler import noise_of
from ftis_node.policy.generate.sampling import CompletionGroups, Sampling
from ftis_node.policy.generate.vllm import server_of
from ftis_node.policy.load import load_policy, load_tokenizer, use_device
from ftis_node.policy.measure import geometry
from ftis_node.policy.policy import Policy
from ftis_node.policy.room import Room, make_way
from ftis_node.step_report import OWN, StepReport, Watched
from ftis_node.tasks import Scorer, Task, load_evaluation, load_task, scoring
from ftis_node.tasks.jsonl import JsonLines
from ftis_node.tasks.score_columns import ScoreColumns
from ftis_node.tasks.trial import refuse_unskilled
from ftis_node.worker import messages as m
from ftis_node.worker.checkpoint import ALPHA, Checkpointer
from ftis_node.worker.facts import facts_before
from ftis_node.worker.formats import Packets, Reading, Slot, chat_in, group_text, packets_of, prompts_of
from ftis_node.worker.gpu import gpu_figures
from ftis_node.worker.own_data import figures, groups_of, rows_of_step
from ftis_node.worker.planning import asked_in_chat, settle, starting_sizes
from ftis_node.worker.rows import Evaluations, EvaluationSet, TrainingRows
from ftis_node.worker.shortage import refuse_shortage
from ftis_node.worker.usage import Usage

PROBE_ROWS = 64  # questions that the guard of the fast paths may take its tokens from


class Engine:
    """One model on one device. `worker.messages` has the request and the answer of each method that the network process
    calls.

    The public attributes serve code that uses an engine in its own process; seeds of samples are drawn from `random`.
    """

    def __init__(
        self, planned: Callable[[Settings], None] = lambda settings: None, threads: Threads | None = None
    ) -> None:
        """
        planned: called by `load` with the settled settings, before the model is loaded.
        threads: that a CPU's work takes; None: as many as there are, always.
        """
        self._planned = planned
        self.threads = threads
        self._settings: Settings
        self.policy: Policy
        self.task: Task
        self.run: Run
        self.learner: Learner
        self.random: torch.Generator
        self.usage = Usage()
        self._facts: dict[str, Any] | None = None  # see `facts_before`
        self._context: Context
        self._starting: dict[str, int]  # see `planning.starting_sizes`
        self._generating: Room  # sequences side by side
        self._crowded = False  # training has no room beside what generation keeps
        self.packets: Packets
        self.checkpointer: Checkpointer
        self.evaluations: Evaluations
        self.own_task: Task | None = None  # of `own_data`; `open` reads it
        self._rows: TrainingRows  # the run's
        self._own_rows: TrainingRows | None = None
        self._team: Team = ALONE
        self._shards: Shards | None = None
        # Scorers of the run's rule, one per thread: some rules are processes that serve one caller at a time.
        self._side_scorer: Scorer
        self._scorers = ExitStack()
        self._columns = ScoreColumns()

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of the prompt of each row of the training data."""
        return self._rows.prompts

    def load(self, settings: Settings, task: str, **others: Any) -> m.ModelFacts:
        """Load the task, plan, then load the model.

        Args:
            others: the other fields of `messages.Load`.

        Raises:
            UserError: the data or the model cannot be loaded.
        """
        asked = m.Load(settings=settings, task=task, **others)
        files = {"data": asked.data, "eval_data": asked.eval_data}
        paths = {name: Path(file) if file else None for name, file in files.items()}
        with doing("reading the task"):
            self.task = load_task(asked.task, **paths, reward=asked.reward, template=asked.template, code=asked.code)
        if asked.must_fit:
            refuse_unskilled(self.task)
        if asked.own_data is not None:
            self.own_task = JsonLines(asked.own_data, reward=asked.own_reward).load()
        caps = {
            "group": RUN_DEFAULTS["group"],
            "prompt_tokens": self.task.prompt_tokens,
            "completion_tokens": self.task.completion_tokens,
            **(asked.caps or {}),
        }
        workload = Workload(**caps, batch_groups=settings.batch_groups)
        remembered = asked.remembered or {}
        # Check this before a model is loaded and before the home belongs to a run.
        shape = geometry(settings.model)
        self._context = shape.context
        refuse_run(settings.model, shape.context, workload.completion_tokens)
        if use_device(settings.devices[0]).type != "cpu":
            self.threads = None

        def settled(cap: int) -> tuple[Settings, Plan]:
            return settle(settings, replace(workload, completion_tokens=cap), remembered, shape)

        tokenizer = load_tokenizer(settings.model)
        if not asked.caps and chat_in(None, tokenizer, self.task.template, settings) is not None:
            self.task, self._settings, plan = asked_in_chat(self.task, shape.context, settled)
            workload = replace(workload, completion_tokens=self.task.completion_tokens)
        else:
            self._settings, plan = settled(workload.completion_tokens)
        if asked.must_fit:
            refuse_shortage(settings, plan)
        self._starting = starting_sizes(remembered, workload)
        self._generating = self._room("generation_batch")
        self._crowded = plan.budget < plan.memory.training + plan.memory.sampling + plan.memory.kv_cache
        self._facts = facts_before(tokenizer, self.task, self._settings)
        self._planned(self._settings)
        server = server_of(settings)
        questions = [example.question for example in self.task.train[:PROBE_ROWS]]
        self._give_way()
        self.policy = replace(load_policy(self._settings, questions, tokenizer), server=server)
        self.random = torch.Generator().manual_seed(self._settings.seed)
        trim()
        return self._loaded(self._facts, plan)

    def _loaded(self, facts: dict[str, Any], plan: Plan) -> m.ModelFacts:
        """The facts of tokenizer and task, and those of the model."""
        policy = self.policy
        return m.ModelFacts(
            **facts,
            parameters=policy.parameters(),
            checkpoint_bytes=4 * policy.trainable() + plan.memory.optimiser,
            kind=policy.kind,
            device=str(policy.device),
            threads=torch.get_num_threads(),
            settings=self._settings,
            rows=len(self.task.train),
            held_out=len(self.task.held_out),
            own_rows=len(self.own_task.train) if self.own_task is not None else 0,
            plan=replace(plan, reasons=(*plan.reasons, policy.way)),
        )

    def init_process_group(self, rank: int, size: int, place: str, sharded: bool = False) -> None:
        """Join the other ranks, see `learner.team`, and take over the first one's weights; sharded: keep a part."""
        self._team = Team.init_process_group(rank, size, place, self.policy.device)
        self._team.broadcast_parameters([p for p in self.policy.model.parameters() if p.requires_grad])
        if sharded:
            parts = self.policy.causal_lm.get_decoder().modules()
            layers = next(part for part in parts if isinstance(part, torch.nn.ModuleList))
            self._shards = Shards(list(layers), self._team, self.policy.device)

    @contextmanager
    def _phase(self, part: str) -> Iterator[None]:
        """A part of the work that keeps the device busy."""
        if part == "train":
            if self._crowded:
                let_go()
            trim()
        make_way(self.policy.device)
        self._give_way()
        with ExitStack() as stack:
            stack.enter_context(self.usage.of(part))
            if self._shards is not None and part != "train":
                stack.enter_context(self._shards.whole())
            yield
        if part != "generate":  # which comes in many small calls
            trim()

    def _give_way(self) -> None:
        """Take as many threads as other processes leave cores."""
        if self.threads:
            torch.set_num_threads(self.threads.wanted())

    def open(self, run: Run) -> m.OpenedRun:
        """Open a run: tokenise every prompt and create the learner.

        Raises:
            UsageError: a prompt has no token, or is longer than the run or the model's context allows; the rule is not
                available.
        """
        policy = self.policy
        settings = self._settings
        self.close()
        self.run = run
        self.packets = packets_of(run, policy.tokenizer, settings, policy.vocabulary)
        self.evaluations = Evaluations(run, self.packets, self._room("generation_batch"))
        self._rows = self._open_rows(run, self.task)
        self._side_scorer = self._scorers.enter_context(scoring(run.reward, self.task.scorer))
        if self.own_task is not None:
            self._own_rows = self._open_rows(run, self.own_task, own=True)
        self.learner = Learner(
            policy,
            choose_objective(settings, run.task, run.completion_tokens),
            settings,
            run.temperature,
            task=run.task,
            team=self._team,
        )
        self.learner.room = self._room("micro_batch_tokens")
        alpha = None
        if policy.kind == "lora":
            alpha = {ALPHA: str(settings.lora_alpha)}
        self.checkpointer = Checkpointer(self.learner, self.random, alpha)
        if policy.server is not None:
            longest = max(map(len, self.prompts)) + run.completion_tokens
            policy.server.connect(policy, self.prompts[0], self._rows.text(0), longest, self.learner.steps)
        digests = [self.packets.digest(self._rows.text(row), ids) for row, ids in enumerate(self.prompts)]
        return m.OpenedRun(b"".join(digests), self.learner.objective.own_only)

    def _room(self, name: str) -> Room:
        """As much at a time as the plan has, or at first as an earlier process of this node had room for."""
        return Room(getattr(self._settings, name), self._starting.get(name))

    def _open_rows(self, run: Run, task: Task, *, own: bool = False) -> TrainingRows:
        """A task's rows, and the evaluation on those held out.

        Args:
            own: they are the owner's, under a template and a rule of their own, each answered once by a whole group.
        """
        name = None
        template = run.template
        reward = run.reward
        completions = run.completions
        episodes = None
        if own:
            name = m.OWN_DATA
            template = task.template
            reward = task.reward
            completions = run.group
        else:
            episodes = Episodes.of(self.policy.tokenizer, template, self.packets.asked.chat, run.turns)
        count = self._settings.eval_prompts
        with doing("tokenising the prompts"):
            prompts, held_out = prompts_of(run, self.packets, self.policy.name, self._context, task, count, own=own)
        scorer = self._scorers.enter_context(scoring(reward, task.scorer))
        asked = task.asked(count)
        self.evaluations.sets[name] = EvaluationSet(
            held_out, asked, reward, run.completion_tokens, episodes, task.scorer
        )
        return TrainingRows(template, task.train, prompts, completions, scorer, episodes)

    def change(self, settings: Settings) -> None:
        """Take over the constants of the objective; `config.settings.changed` has checked them."""
        constants = {name: getattr(settings, name) for name in LIVE_CONSTANTS}
        asked = self._settings.model_copy(update=constants)
        self.learner.objective = choose_objective(asked, self.run.task, self.run.completion_tokens)
        self._settings = asked

    def generate(
        self,
        rows: Sequence[int],
        author: bytes = b"",
        round: int = 0,
        policy_step: int = 0,
        slots: Sequence[int] = (),
        seeds: Sequence[int] = (),
        own: bool = False,
    ) -> m.Generated:
        """Sample and score a group (in a horizontal run a part of it) for each row of the training data.

        Args:
            author, round, policy_step, slots: values for the packets; their slots count from 0 where none are given.
            seeds: of each row's random numbers, from which its tokens follow; new ones where none are given.
            own: the rows are of the owner's own data, and the groups whole.
        """
        began = time.perf_counter()
        asked = self._rows_of(own)
        count = len(rows)
        server = self.policy.server
        if server is not None:
            server.prepare(self.policy, self.learner.steps)
        noise = None
        if rows:
            noise = noise_of(seeds or self.seeds(count), asked.completions, self.run.completion_tokens)
        with self._phase("generate"), doing("generating", count * asked.completions, "completions"):
            groups = self._sample(asked, rows, noise)
        packets = []
        for slot, row, group in zip(slots or range(count), rows, groups, strict=True):
            place = Slot(author, round, slot, policy_step)
            packets.append(self.packets.write(place, asked.text(row), asked.prompts[row], group))
        answers = []
        with self.usage.of("score"), doing("scoring", count, "groups"):
            for row, packet in zip(rows, packets, strict=True):
                rewards = self._rewards(asked, row, packet, self.packets.read(packet), asked.scorer)
                answers.append(m.ScoredPacket(packet, rewards))
                advance(1)
        return m.Generated(answers, time.perf_counter() - began, self._generating.size)

    def _rows_of(self, own: bool) -> TrainingRows:
        """The owner's own rows, or the run's."""
        if own and self._own_rows is not None:
            return self._own_rows
        return self._rows

    def seeds(self, count: int) -> list[int]:
        """New seeds of random numbers."""
        return torch.randint(1 << 62, (count,), generator=self.random).tolist()

    def score(self, row: int, packet: bytes) -> list[float]:
        """Rewards [G] of a foreign group, by this node's own reading of its text; in a thread of its own.

        There are none if this node can train on none of its completions: right answers that its tokenizer cannot read
        would take others' place in a batch and teach nothing.
        """
        reading = self.packets.read(packet)
        if all(completion is None for completion in reading.completions(own=False)):
            return []
        return self._rewards(self._rows, row, packet, reading, self._side_scorer)

    def close(self) -> None:
        """End the scoring processes, if any; `open` starts others."""
        self._scorers.close()

    def texts(self, groups: Sequence[m.ReadableGroup]) -> list[m.GroupText]:
        """Groups as readable text; a very long completion is cut."""
        texts = []
        for one in groups:
            columns = self._columns.of(one.packet)
            texts.append(group_text(self.packets, self.task.train[one.row], one, columns))
        return texts

    def step(
        self, groups: Sequence[m.StepGroup], micro_batch_tokens: int | None = None, own_data: int = 0
    ) -> StepReport:
        """Take one optimiser step.

        Args:
            micro_batch_tokens: replaces the settings' value from now on; it affects the last bits of the result.
            own_data: so many groups besides, made here on rows of one's own.
        """
        if micro_batch_tokens is not None:
            self.learner.room = Room(micro_batch_tokens)
        groups = [*groups, *self.own_groups(own_data, lambda rows: self.generate(rows, own=True))]
        taken = self.training_groups(groups)
        with self._phase("train"):
            report = self.learner.step(taken)
        generator = None
        server = self.policy.server
        if server is not None:
            generator = server.told(report.diagnostics.sources.get(OWN, {}))
        return msgspec.structs.replace(
            report,
            columns=self._columns.taken(),
            generator=generator,
            device=self.usage.step_ended(),
            threads=torch.get_num_threads(),
            **figures(groups),
        )

    def own_groups(self, count: int, generate: Callable[[list[int]], m.Generated]) -> list[m.StepGroup]:
        """So many groups for the next step, on those of the owner's rows that `generate` is given."""
        if self._own_rows is None or not count:
            return []
        rows = rows_of_step(len(self._own_rows.examples), count, self.learner.steps, self._settings.seed)
        return groups_of(rows, generate(rows).groups)

    def training_groups(self, groups: Sequence[m.StepGroup]) -> list[TrainingGroup]:
        """The same groups in the learner's form."""
        taken = []
        for group in groups:
            asked = self._rows_of(group.own)
            parts = [self._part(part) for part in group.parts]
            taken.append(TrainingGroup(asked.prompts[group.row], parts))
        return taken

    def _part(self, part: m.GroupPart) -> Part:
        completions = self.packets.read(part.packet).completions(own=part.source == OWN)
        return Part(part.source, list(completions), part.rewards, part.weight)

    def evaluate(self, also: str | None = None, part: int = 0, parts: int = 1) -> Evaluation:
        """Greedy pass@1 on held-out prompts (strict), with the format rate and the lenient accuracy.

        Args:
            also: a task from `add_evaluation` instead of the run's.
            part, parts: only every `parts`-th prompt, from `part` on.
        """
        with self._phase("evaluate"):
            return self.evaluations.evaluate(self.policy, also, part, parts)

    def add_evaluation(self, name: str, task: str, data: str | None, prompts: int | None) -> int:
        """Load another task under `name` for evaluation only, after `open`, and return its number of prompts."""
        loaded = load_evaluation(task, data=Path(data) if data else None)
        return self.evaluations.add(name, loaded, prompts, self.policy, self._context)

    def interrupt(self) -> None:
        """Interrupt the running generation or step, which fails without changing weights. Call it from any thread."""
        interrupt()

    def forget(self) -> None:
        """Take back an interrupt: what it was for has ended."""
        forget()

    def watch(self) -> Watched:
        """The GPU's figures, see `gpu_figures`, and the work under way; runs in a thread of its own."""
        policy: Policy | None = getattr(self, "policy", None)  # there is none while it is being loaded
        if policy is None:
            return Watched(None, now(), self._facts)
        work = now()
        if work and self.threads:
            work = msgspec.structs.replace(work, what=work.what + self.threads.told())
        graphs = policy.graphs and policy.native and not failed()
        return Watched(gpu_figures(policy.device, graphs), work)

    def save(self, directory: str) -> None:
        """Write weights, optimiser and random states into an existing directory. Raises UserError if it is full."""
        self.checkpointer.save(directory)

    def snapshot(self, directory: str) -> None:
        """Copy the state for `write` into main memory. Without enough room, write it at once while training waits."""
        self.checkpointer.snapshot(directory)

    def write(self, directory: str) -> None:
        """Write the latest snapshot, once, into an existing directory. Call it from any thread."""
        self.checkpointer.write(directory)

    def gather(self) -> None:
        """Give the first rank this one's parts of a checkpoint."""
        self.checkpointer.state(live=True)

    def restore(self, directory: str, steps: int) -> None:
        """Restore the files of `save`. Raises UsageError if they are of another model."""
        self.checkpointer.restore(directory, steps)
        server = self.policy.server
        if server is not None:
            server.changed()

    def _sample(self, asked: TrainingRows, rows: Sequence[int], noise: Tensor | None) -> CompletionGroups:
        """Generate; if memory runs out, try again later or with fewer sequences side by side.

        Raises:
            FtisError: not even one group fits.
        """
        policy = self.policy
        if asked is not self._rows:
            policy = replace(policy, server=None)  # the owner's rows stay in this process: no server reads them
        prompts = [asked.prompts[row] for row in rows]
        sampling = Sampling(self.run.completion_tokens, self.run.temperature, self.packets.asked.ends)
        room = self._generating
        made = sampled(policy, prompts, sampling, room, group=asked.completions, noise=noise)
        if asked.episodes is None:
            return made
        examples = [asked.examples[row] for row in rows]
        return play(policy, asked.episodes, prompts, made, examples, asked.scorer, sampling, room=room, noise=noise)

    def rewards(self, row: int, packet: bytes) -> list[float]:
        """Rewards [G] of a group, whatever this node can read of it."""
        return self._rewards(self._rows, row, packet, self.packets.read(packet), self._rows.scorer)

    def _rewards(self, of: TrainingRows, row: int, packet: bytes, reading: Reading, scorer: Scorer) -> list[float]:
        """Rewards [G] of a packet on one of these rows. Columns of the verdicts are kept by the packet's bytes."""
        example = of.examples[row]
        if of.episodes is not None:
            completions = [one for one in reading.completions(own=False) if one is not None]
            return of.episodes.rewards(completions, example, scorer)
        texts = reading.texts()
        scorer.begin()
        scores = [verdict(written.text, written.finished, example, scorer) for written in texts]
        self._columns.add(packet, [score.columns for score in scores])
        return [score.reward for score in scores]
