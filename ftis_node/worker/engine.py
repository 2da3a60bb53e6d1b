"""The compute process's operations: load, open a run, generate, score, step, evaluate, save, restore."""

from __future__ import annotations

import errno
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor

from ftis_node.config.run import RUN_DEFAULTS, Run
from ftis_node.config.settings import LIVE_CONSTANTS, Settings
from ftis_node.errors import FtisError, UsageError, UserError, did_you_mean
from ftis_node.evaluate import greedy
from ftis_node.evaluate.episodes import Episodes
from ftis_node.evaluate.evaluation import Evaluation
from ftis_node.fit.context import Context, refuse_prompts, refuse_run
from ftis_node.fit.memory import Workload
from ftis_node.host.interruption import forget, interrupt
from ftis_node.learner import Learner, Part, TrainingGroup
from ftis_node.learner.fsdp import Shards
from ftis_node.learner.team import Team
from ftis_node.learner.tensorfile import write_tensors
from ftis_node.objective import PRESETS, Objective
from ftis_node.packet import Completion
from ftis_node.policy.generate.sampler import noise_of
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.generate.vllm import KEY, Server
from ftis_node.policy.load import choose_device, load_policy
from ftis_node.policy.measure import geometry
from ftis_node.policy.policy import Policy
from ftis_node.policy.room import Room, fitting, make_way, out_of_memory
from ftis_node.step_report import Generator, GpuFigures, StepReport
from ftis_node.tasks import Example, Scorer, Task, load_evaluation, load_task, scoring
from ftis_node.tasks.jsonl import JsonLines
from ftis_node.tasks.rewards import TAGS
from ftis_node.tasks.score_columns import ScoreColumns
from ftis_node.tasks.trial import refuse_unskilled
from ftis_node.text import rounded
from ftis_node.tokenizer.chat import end_ids
from ftis_node.tokenizer.codec import text_refusal
from ftis_node.tokenizer.fingerprint import fingerprint, unwritable
from ftis_node.worker.formats import Packets, Prompts, Slot, chat_in, packets_of
from ftis_node.worker.gpu import gpu_figures
from ftis_node.worker.messages import (
    OWN,
    OWN_DATA,
    Generated,
    GroupPart,
    GroupText,
    ModelFacts,
    OpenedRun,
    ReadableGroup,
    ScoredPacket,
    Sizes,
    StepGroup,
)
from ftis_node.worker.own_data import OwnData
from ftis_node.worker.planning import ceilings, refuse_unsaveable, settle
from ftis_node.worker.shortage import refuse_shortage
from ftis_node.worker.usage import Usage

# Files of a checkpoint, and the key of LoRA's alpha in the metadata of the weights: no tensor shows it.
WEIGHTS, OPTIMISER, ALPHA = "trainable.safetensors", "optimiser.safetensors", "lora_alpha"
_RANDOM = "random.safetensors"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
SPARE = 1.2  # free main memory that a snapshot needs, as a multiple of the checkpoint's size
TEXT_TOKENS, TEXT_LETTERS = 1024, 4000  # longest text of one completion to show

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _EvaluationSet:
    """An evaluation's prompts and their examples, the reward rule and the task's own scorer (see `tasks.scoring`), the
    cap in tokens, and how its episodes go on."""

    prompts: list[list[int]]
    examples: Sequence[Example]
    reward: str
    completion_tokens: int
    episodes: Episodes | None
    scorer: Scorer | None


class Engine:
    """One model on one device. `worker.messages` has the request and the answer of each method that the network process
    calls.

    The public attributes serve code that uses an engine in its own process; seeds of samples are drawn from `random`.
    """

    def __init__(self) -> None:
        self._settings: Settings
        self.policy: Policy
        self.task: Task
        self.run: Run
        self.learner: Learner
        self.random: torch.Generator
        self.usage = Usage()
        self._context: Context
        # Sequences side by side. The two sizes are separate, so that a shortage in evaluation shrinks nothing else.
        self._generating: Room
        self._evaluating: Room
        self._sizes: Sizes  # see `planning.ceilings`
        self.packets: Packets
        self._episodes: Episodes | None
        self._team: Team | None = None
        self._shards: Shards | None = None
        self.own_task: Task | None = None  # of `own_data`; `open` reads it
        self._own_data: OwnData | None = None
        self.prompts: list[list[int]] = []
        self._snapshot: dict[str, dict[str, torch.Tensor]] = {}
        self._warned_no_room = False
        # Scorers of the run's rule, one per thread: some rules are processes that serve one caller at a time.
        self._scorer: Scorer
        self._side_scorer: Scorer
        self._scorers = ExitStack()
        self._columns = ScoreColumns()
        # by the name from `add_evaluation`; None: the run's own task
        self._evaluation_sets: dict[str | None, _EvaluationSet] = {}

    def load(
        self,
        settings: Settings,
        task: str,
        data: str | None = None,
        eval_data: str | None = None,
        caps: Mapping[str, int] | None = None,
        remembered: Mapping[str, bool | int | str] | None = None,
        reward: str | None = None,
        code: bool = False,
        must_fit: bool = False,
        own_data: str | None = None,
        own_reward: str = "integer",
        sizes: Sizes | None = None,
    ) -> ModelFacts:
        """Load the task, plan, then load the model.

        Args:
            caps: prompt_tokens, completion_tokens and group of the run, if it is known already.
            remembered: see `planning.settle`.
            reward, code: see `tasks.load_task`.
            must_fit: at a node's start: refuse a model that cannot be trained in the available memory, and a task that
                rewards answers without skill.
            own_data: a JSONL file of rows that only this node trains on; own_reward: their rule.
            sizes: the largest batch sizes, where another rank has planned them.

        Raises:
            UserError: the data or the model cannot be loaded.
        """
        files = {"data": Path(data) if data else None, "eval_data": Path(eval_data) if eval_data else None}
        self.task = load_task(task, **files, reward=reward, code=code)
        if must_fit:
            refuse_unskilled(self.task)
        if own_data is not None:
            self.own_task = JsonLines(own_data, reward=own_reward).load()
        asked, workload = settings, self._workload(settings, caps or {})
        # Check this before a model is loaded and before the home belongs to a run.
        choose_objective(asked, self.task.name, workload.completion_tokens)
        shape = geometry(asked.model)
        self._context = shape.context
        refuse_run(asked.model, shape.context, workload.completion_tokens)
        self._settings, plan = settle(asked, workload, remembered or {}, shape)
        if must_fit:
            refuse_shortage(asked, workload, remembered or {}, plan, shape)
        refuse_unsaveable(plan.optimiser, choose_device(asked.devices[0]))
        self._sizes = sizes or ceilings(asked, workload, remembered or {}, plan)
        self._generating = Room(self._sizes.generation_batch, plan.generation_batch)
        self._evaluating = Room(self._sizes.generation_batch, plan.generation_batch)
        self._planned()
        server = _server(asked)
        self.policy = replace(load_policy(self._settings), server=server)
        self.random = torch.Generator().manual_seed(self._settings.seed)
        tokenizer = self.policy.tokenizer
        chat = chat_in(None, tokenizer, self.task.template, asked)
        return ModelFacts(
            tokenizer=fingerprint(tokenizer),
            vocabulary=self.policy.vocabulary,
            eos=list(end_ids(tokenizer, chat)),
            chat=chat.digest(self.task.turns) if chat is not None else "",
            unwritable=unwritable(tokenizer, self.task.template.replace("{question}", "") + "".join(TAGS)),
            text=self.task.text,
            text_refusal=text_refusal(tokenizer, [self.task.prompt(row) for row in self.task.train], "".join(TAGS)),
            parameters=self.policy.parameters(),
            checkpoint_bytes=4 * self.policy.trainable() + plan.memory.optimiser,
            kind=self.policy.kind,
            device=str(self.policy.device),
            threads=torch.get_num_threads(),
            settings=self._settings,
            task=self.task.name,
            data=self.task.data,
            template=self.task.template,
            reward=self.task.reward,
            prompt_tokens=self.task.prompt_tokens,
            completion_tokens=self.task.completion_tokens,
            turns=self.task.turns,
            rows=len(self.task.train),
            held_out=len(self.task.held_out),
            own_rows=len(self.own_task.train) if self.own_task is not None else 0,
            plan=replace(plan, reasons=(*plan.reasons, self.policy.way)),
            sizes=self._sizes,
        )

    def _planned(self) -> None:
        """The settings are settled; the model is loaded next."""

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
        make_way(self.policy.device)
        whole = self._shards.whole() if self._shards is not None and part != "train" else nullcontext()
        with self.usage.of(part), whole:
            yield

    def _workload(self, settings: Settings, caps: Mapping[str, int]) -> Workload:
        """The workload to plan for: the run's caps, or the task's if no run is known yet."""
        known = {"prompt_tokens": self.task.prompt_tokens, "completion_tokens": self.task.completion_tokens}
        return Workload(**{**known, "group": RUN_DEFAULTS["group"], **caps}, batch_groups=settings.batch_groups)

    def open(self, run: Run) -> OpenedRun:
        """Open a run: tokenise every prompt and create the learner.

        Raises:
            UsageError: a prompt has no token, or is longer than the run or the model's context allows; the rule is not
                available; or the objective is unknown.
        """
        self.run = run
        self.packets = packets_of(run, self.policy.tokenizer, self._settings)
        self._episodes = Episodes.of(self.policy.tokenizer, run.template, self.packets.chat, run.turns)
        self.close()
        self._scorer, self._side_scorer = (
            self._scorers.enter_context(scoring(self.run.reward, self.task.scorer)) for _ in range(2)
        )
        count, own = self._settings.eval_prompts, self.own_task
        asked = Prompts.of(run, self.packets, self.policy.name, self._context, self.task, own, count)
        self.prompts, held_out = asked.train, self.task.held_out[:count]
        chosen = (asked.held_out, held_out, run.reward, run.completion_tokens, self._episodes, self.task.scorer)
        self._evaluation_sets[None] = _EvaluationSet(*chosen)
        if own is not None:
            scorer = self._scorers.enter_context(scoring(own.reward, own.scorer))
            self._own_data = OwnData(own.template, own.train, asked.own, scorer)
            rows = own.held_out[:count]
            chosen = (asked.own_held_out, rows, own.reward, run.completion_tokens, None, None)
            self._evaluation_sets[OWN_DATA] = _EvaluationSet(*chosen)
        objective = choose_objective(self._settings, self.run.task, self.run.completion_tokens)
        made = (self.policy, objective, self._settings, self.run.temperature, OWN)
        self.learner = Learner(*made, task=self.run.task, team=self._team)
        if self.policy.server is not None:
            longest = max(map(len, self.prompts)) + run.completion_tokens
            text = self._prompt(self.task.train[0])
            self.policy.server.connect(self.policy, self.prompts[0], text, longest, self.learner.steps)
        self.learner.room = Room(self._sizes.micro_batch_tokens, self._settings.micro_batch_tokens)
        texts = (self._prompt(example) for example in self.task.train)
        digests = b"".join(self.packets.digest(text, ids) for text, ids in zip(texts, self.prompts, strict=True))
        return OpenedRun(digests, self.learner.objective.own_only)

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
    ) -> Generated:
        """Sample and score a group (in a horizontal run a part of it) for each row of the training data.

        Args:
            author, round, policy_step, slots: values for the packets; their slots count from 0 where none are given.
            seeds: of each row's random numbers, from which its tokens follow; new ones where none are given.
            own: the rows are of the owner's own data, and the groups whole.
        """
        began = time.perf_counter()
        data = self._own_data if own else None
        prompts, completions = (self.prompts, self.run.completions) if data is None else (data.prompts, self.run.group)
        if self.policy.server is not None:
            self.policy.server.prepare(self.policy, self.learner.steps)
        noise = noise_of(seeds or self.seeds(len(rows)), completions, self.run.completion_tokens) if rows else None
        with self._phase("generate"):
            # the owner's rows stay in this process: no server reads them
            policy = self.policy if data is None else replace(self.policy, server=None)
            groups = self._sample(policy, [prompts[row] for row in rows], completions, noise)
            if self._episodes is not None and data is None:
                groups = self._played(rows, groups, noise)
        packets = [
            self.packets.write(Slot(author, round, slot, policy_step), self._text_of(row, data), prompts[row], group)
            for slot, row, group in zip(slots or range(len(rows)), rows, groups, strict=True)
        ]
        with self.usage.of("score"):
            rewards = [
                self.rewards(row, packet) if data is None else self._worth(packet, data.examples[row], data.scorer)
                for row, packet in zip(rows, packets, strict=True)
            ]
        answers = [ScoredPacket(packet, reward) for packet, reward in zip(packets, rewards, strict=True)]
        return Generated(answers, time.perf_counter() - began, self._generating.size)

    def seeds(self, count: int) -> list[int]:
        """New seeds of random numbers."""
        return torch.randint(1 << 62, (count,), generator=self.random).tolist()

    def score(self, row: int, packet: bytes) -> list[float]:
        """Rewards [G] of a foreign group, by this node's own reading of its text; in a thread of its own.

        There are none if this node can train on none of its completions: right answers that its tokenizer cannot read
        would take others' place in a batch and teach nothing.
        """
        return self.rewards(row, packet, self._side_scorer) if self.packets.readable(packet) else []

    def close(self) -> None:
        """End the scoring processes, if any; `open` starts others."""
        self._scorers.close()

    def texts(self, groups: Sequence[ReadableGroup]) -> list[GroupText]:
        """Groups as readable text; a very long completion is cut."""
        return [self._text(group) for group in groups]

    def _text(self, group: ReadableGroup) -> GroupText:
        example, texts = self.task.train[group.row], []
        for written in self.packets.texts(group.packet, TEXT_TOKENS)[: group.completions]:
            cut = written.cut or len(written.text) > TEXT_LETTERS
            texts.append(written.text[:TEXT_LETTERS] + ("…" if cut else ""))
        columns = self._columns.of(group.packet)[: group.completions]
        return GroupText(example.question[:TEXT_LETTERS], example.answer[:200], texts, columns)

    def step(self, groups: Sequence[StepGroup], micro_batch_tokens: int | None = None, own_data: int = 0) -> StepReport:
        """Take one optimiser step.

        Args:
            micro_batch_tokens: replaces the settings' value from now on; it affects the last bits of the result.
            own_data: so many groups besides, made here on rows of one's own.
        """
        if micro_batch_tokens is not None:
            self.learner.micro_batch_tokens = micro_batch_tokens
        own = self._own_groups(own_data)
        report = self._step([*groups, *own])
        rewards = [reward for group in own for part in group.parts for reward in part.rewards]
        mean = sum(rewards) / len(rewards) if rewards else None
        told = {
            "columns": self._columns.taken(),
            "own_data_groups": len(own),
            "own_data_reward": mean,
            "generator": self._generator(report),
            "device": self.usage.step_ended(),
        }
        return msgspec.structs.replace(report, **told)

    def _generator(self, report: StepReport) -> Generator | None:
        server = self.policy.server
        if server is None:
            return None
        own = report.diagnostics.sources.get(OWN, {})
        return Generator(server.away, math.sqrt(2 * max(0.0, own["k2"])) if "k2" in own else None)

    def _step(self, groups: Sequence[StepGroup]) -> StepReport:
        taken = self.training_groups(groups)
        with self._phase("train"):
            return self.learner.step(taken)

    def _own_groups(self, count: int) -> list[StepGroup]:
        """Groups on rows of one's own."""
        data = self._own_data
        if data is None or not count:
            return []
        rows = data.rows(count, self.learner.steps, self._settings.seed)
        made = self.generate(rows, own=True).groups
        return [
            StepGroup(row, [GroupPart(OWN, one.packet, one.rewards)], own=True)
            for row, one in zip(rows, made, strict=True)
        ]

    def training_groups(self, groups: Sequence[StepGroup]) -> list[TrainingGroup]:
        """The same groups in the learner's form."""
        mine = self._own_data.prompts if self._own_data is not None else ()
        return [
            TrainingGroup(
                (mine if group.own else self.prompts)[group.row],
                [Part(part.source, self._completions(part), part.rewards, part.weight) for part in group.parts],
            )
            for group in groups
        ]

    def evaluate(self, also: str | None = None, part: int = 0, parts: int = 1) -> Evaluation:
        """Greedy pass@1 on held-out prompts (strict), with the format rate and the lenient accuracy.

        Args:
            also: a task from `add_evaluation` instead of the run's.
            part, parts: only every `parts`-th prompt, from `part` on.
        """
        chosen = self._evaluation_sets[also]
        sampling = self._sampling(greedy=True, cap=chosen.completion_tokens)
        with self._phase("evaluate"), scoring(chosen.reward, chosen.scorer) as scorer:
            outcome = greedy.evaluate(
                self.policy,
                chosen.prompts[part::parts],
                chosen.examples[part::parts],
                scorer,
                sampling,
                episodes=chosen.episodes,
                room=self._evaluating,
            )
        return outcome.figures()

    def try_rows(self, rows: Sequence[int]) -> list[bool]:
        """Whether the greedy answers to these rows of the training data are right."""
        examples = [self.task.train[row] for row in rows]
        prompts = [self.prompts[row] for row in rows]
        sampling = self._sampling(greedy=True, cap=self.run.completion_tokens)
        with self._phase("evaluate"):
            outcome = greedy.evaluate(
                self.policy,
                prompts,
                examples,
                self._scorer,
                sampling,
                episodes=self._episodes,
                room=self._evaluating,
            )
        return [one.score.reward > 0 for one in outcome.judged]

    def add_evaluation(self, name: str, task: str, data: str | None, prompts: int | None) -> int:
        """Load another task under `name` for evaluation only. Call it after `open`.

        Returns its number of prompts.
        """
        loaded = load_evaluation(task, data=Path(data) if data else None)
        examples = _spread(loaded.held_out, prompts)
        cap = max(loaded.completion_tokens, self.run.completion_tokens)
        ids = [self.packets.prompt(loaded.template, example.question) for example in examples]
        refuse_prompts(self.policy.name, self._context, ids, examples, name, completion_tokens=cap)
        episodes = Episodes.of(self.policy.tokenizer, loaded.template, self.packets.chat, loaded.turns)
        self._evaluation_sets[name] = _EvaluationSet(ids, examples, loaded.reward, cap, episodes, loaded.scorer)
        return len(examples)

    def interrupt(self) -> None:
        """Interrupt the running generation or step, which fails without changing weights. Call it from any thread."""
        interrupt()

    def forget(self) -> None:
        """Take back an interrupt: what it was for has ended."""
        forget()

    def gpu(self) -> GpuFigures | None:
        """The GPU's figures, see `gpu_figures`; runs in a thread of its own."""
        return gpu_figures(self.policy.device)

    def save(self, directory: str) -> None:
        """Write trainable weights, optimiser and random states into an existing directory."""
        self._write(self._state(live=True), directory)

    def snapshot(self, directory: str) -> None:
        """Copy the state for `write` into main memory. Without enough room, write it at once while training waits.

        Raises:
            UserError: the disk is full.
        """
        self._snapshot = self._copy()
        if not self._snapshot:
            self._write(self._state(live=True), directory)

    def gather(self) -> None:
        """Give the first rank this one's parts of a checkpoint."""
        self._state(live=True)

    def _copy(self) -> dict[str, dict[str, torch.Tensor]]:
        """A copy of the state; empty if main memory has no room for it."""
        if self._shards is not None:  # to write it, it must be whole in any case
            return self._state()
        size = sum(tensor.nbytes for tensors in self._state(live=True).values() for tensor in tensors.values())
        free = psutil.virtual_memory().available
        if free >= SPARE * size:
            try:
                return self._state()
            except (RuntimeError, MemoryError) as error:  # the available memory is an estimate
                if not out_of_memory(error):
                    raise
        if not self._warned_no_room:
            self._warned_no_room = True
            logger.warning(
                "Main memory (%s free) cannot hold a copy of a checkpoint (%s): training waits while it is written.",
                rounded(free),
                rounded(size),
            )
        return {}

    def write(self, directory: str) -> None:
        """Write the latest snapshot, once, into an existing directory. Call it from any thread.

        Raises:
            UserError: the disk is full.
        """
        snapshot, self._snapshot = self._snapshot, {}
        self._write(snapshot, directory)

    def _state(self, *, live: bool = False) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of all state that the next step depends on, by file name; with `live`, the state itself."""
        with self._team.bound() if self._team is not None and self._shards is not None else nullcontext():
            weights, optimiser = self.learner.state(live=live)
        random = {"torch": torch.get_rng_state(), "sampling": self.random.get_state()}
        return {WEIGHTS: weights, OPTIMISER: optimiser, _RANDOM: random}

    def _write(self, state: dict[str, dict[str, torch.Tensor]], directory: str) -> None:
        metadata = {ALPHA: str(self._settings.lora_alpha)} if self.policy.kind == "lora" else None
        try:
            for name, tensors in state.items():
                write_tensors(Path(directory) / name, tensors, metadata if name == WEIGHTS else None)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise UserError(
                    f"There is no room for a checkpoint in {Path(directory).parent}: {error}.",
                    "Make room on its disk and start the same command again; it goes on from the last checkpoint.",
                ) from error
            raise

    def restore(self, directory: str, steps: int) -> None:
        """Restore the files of `save`.

        Raises:
            UsageError: the checkpoint is of another model.
        """
        path = Path(directory)
        try:
            self.learner.restore(load_file(path / WEIGHTS), load_file(path / OPTIMISER), steps)
        except FtisError as error:
            fix = "Use the model, --lora/--full and optimiser of the first start, or a fresh --home."
            raise UsageError(str(error), fix) from error
        if self.policy.server is not None:
            self.policy.server.changed()
        random = load_file(path / _RANDOM)
        torch.set_rng_state(random["torch"])
        if random["sampling"].shape == self.random.get_state().shape:  # early versions drew from a GPU's
            self.random.set_state(random["sampling"])

    def _prompt(self, example: Example) -> str:
        """The run's template around a question."""
        return self.run.template.replace("{question}", example.question)

    def _text_of(self, row: int, data: OwnData | None) -> str:
        """The text of a row's prompt."""
        if data is None:
            return self._prompt(self.task.train[row])
        return data.template.replace("{question}", data.examples[row].question)

    def _sampling(self, *, greedy: bool, cap: int) -> Sampling:
        return Sampling(cap, self.run.temperature, self.packets.ends, greedy=greedy)

    def _sample(
        self, policy: Policy, prompts: Sequence[Sequence[int]], group: int, noise: Tensor | None
    ) -> list[list[Completion]]:
        """Generate; if memory runs out, try again later or with fewer sequences side by side.

        Raises:
            FtisError: not even one group fits.
        """
        sampling = self._sampling(greedy=False, cap=self.run.completion_tokens)
        return fitting(
            lambda batch: generate(policy, prompts, group=group, sampling=sampling, noise=noise, batch=batch),
            self._generating,
            there=group * len(prompts),
            least=group,
        )

    def _played(
        self, rows: Sequence[int], first: list[list[Completion]], noise: Tensor | None
    ) -> list[list[Completion]]:
        """Play the episodes that begin with these first answers to rows of the training data."""
        assert self._episodes is not None
        return greedy.play(
            self.policy,
            self._episodes,
            [self.prompts[row] for row in rows],
            first,
            [self.task.train[row] for row in rows],
            self._scorer,
            self._sampling(greedy=False, cap=self.run.completion_tokens),
            room=self._generating,
            noise=noise,
        )

    def rewards(self, row: int, packet: bytes, scorer: Scorer | None = None) -> list[float]:
        """Rewards [G] of a group, whatever this node can read of it."""
        scorer = scorer or self._scorer
        example = self.task.train[row]
        if self._episodes is not None:
            completions = [one for one in self.packets.completions(packet, own=False) if one is not None]
            return self._episodes.rewards(completions, example, scorer)
        return self._worth(packet, example, scorer)

    def _worth(self, packet: bytes, example: Example, scorer: Scorer) -> list[float]:
        texts = self.packets.texts(packet)
        scorer.begin()
        scores = [greedy.verdict(written.text, written.finished, example, scorer) for written in texts]
        self._columns.add(packet, [score.columns for score in scores])
        return [score.reward for score in scores]

    def _completions(self, part: GroupPart) -> Sequence[Completion | None]:
        return self.packets.completions(part.packet, own=part.source == OWN)


def _spread(examples: Sequence[Example], count: int | None) -> Sequence[Example]:
    """Pick so many examples at even distances, because neighbours may be alike."""
    if count is None or count >= len(examples):
        return examples
    return [examples[index * len(examples) // count] for index in range(count)]


def _server(settings: Settings) -> Server | None:
    """The vLLM server of the settings, not asked yet."""
    if settings.engine != "vllm":
        return None
    folder = settings.vllm_folder or tempfile.mkdtemp(prefix="ftis-vllm-")
    return Server.of(settings.vllm_url, folder, None, os.environ.get(KEY))


def choose_objective(settings: Settings, task: str, completion_tokens: int) -> Objective:
    """The named preset with the parts that the settings or the task replace.

    Args:
        completion_tokens: the run's cap; the default divisor of the loss under `fixed`.

    Raises:
        UsageError: there is no such preset or part.
    """
    if settings.objective not in PRESETS:
        hint = did_you_mean(settings.objective, PRESETS)
        raise UsageError(f"There is no objective {settings.objective!r}.", f"{hint}Use one of: {', '.join(PRESETS)}.")
    preset = PRESETS[settings.objective]
    standard = PRESETS["ftis"]
    alike = all(getattr(preset, part) == getattr(standard, part) for part in ("divergence", "reduction", "threshold"))
    parts = settings.objective_parts(task, filters=alike)
    if parts.get("aggregation", preset.aggregation) == "fixed":
        parts.setdefault("divisor", float(completion_tokens))
    try:
        return preset.replace(**parts)
    except ValueError as error:
        raise UsageError(f"The objective cannot be set up: {error}.", "Mend that setting.") from error
