"""One private optimiser step (arXiv 2605.22537, section 3): log-probs, loss, gradient, weights."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError
from ftis_node.fit.plan import MICRO_BATCH_TOKENS
from ftis_node.host.doing import advance, doing
from ftis_node.host.interruption import check
from ftis_node.learner.batch import Batch, Prompted, Sample, TrainingGroup, counted, micro_batches
from ftis_node.learner.fsdp import sharded
from ftis_node.learner.loss_scale import HALVINGS, LossScale
from ftis_node.learner.optimiser import NamedTensors, Optimiser
from ftis_node.learner.team import ALONE, Team
from ftis_node.learner.trust import distrusted, next_length
from ftis_node.objective import Diagnostics, FilterWatch, Objective, Terms, pack
from ftis_node.policy.policy import Policy
from ftis_node.policy.room import Room, free_memory, out_of_memory
from ftis_node.policy.score import completion_logprobs
from ftis_node.step_report import OWN, StepReport

BAD_STEPS = 5  # in a row without a finite gradient: what was before them is no longer trusted


@dataclass(frozen=True, eq=False)
class Computed:
    """A micro-batch of N samples with T tokens after its backward pass; nothing in it holds a graph.

    logprobs    `[T]`       of the sampled tokens, as the pass gave them
    entropy     `[T]`       in nats, of what each was drawn from
    loss        −Σ_i c_i · value_i, still to be divided by D
    distrusted  bool `[N]`  samples that a defence leaves out
    """

    samples: Sequence[Sample]
    terms: Terms
    logprobs: Tensor
    entropy: Tensor
    loss: float
    distrusted: Tensor


class Learner:
    """Owns the optimiser of a policy; `step` is its one verb."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        settings: Settings,
        temperature: float,
        task: str = "",
        team: Team = ALONE,
    ) -> None:
        """
        Args:
            team: with which it trains; its ranks have the same weights and take the same steps.
            temperature: the run's; log-probs of a peer are of the tempered distribution.
            task: whose learning rate stands in for one that the settings do not name; the paper's if it has none.

        Raises:
            UsageError: the optimiser of the settings is not to be had here.
        """
        self.policy = policy
        self.objective = objective
        self.temperature = temperature
        self.in_shards = any(map(sharded, policy.model.parameters()))
        self._team = team
        # In shards the ranks meet in each pass; else each computes its share by itself.
        self._within_pass: Team = ALONE
        self._around_passes = team
        if self.in_shards:
            self._within_pass = team
            self._around_passes = ALONE
        self.steps = 0
        self.gate: float | None = None  # see Objective.next_gate
        self.usual_length: float | None = None  # see trust.next_length
        self._defences = settings.defences
        self.room = Room(settings.micro_batch_tokens or MICRO_BATCH_TOKENS["cpu"])  # tokens of a micro-batch
        self.trainable = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        rate = settings.effective_learning_rate(task, lora=policy.kind == "lora")
        self.optimiser = Optimiser(self.trainable, settings, rate, team)
        self.loss_scale = LossScale(policy.dtype)
        self._bad_steps = 0
        self._retries = 0
        self._watch = FilterWatch()

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """Take one step (`objective.inner_steps` updates) on `groups`.

        The loss is −Σ_i c_i · value_i / D, with c_i and D as `objective.aggregation` says; by default
        −1/N Σ_groups 1/G Σ_i value_i (paper, section 3.3), N counting every group of the batch, also those whose
        rewards are all equal: they carry no gradient and cost no forward pass.
        A loss or gradient that is not finite ends the step and leaves the weights as they are (at a second inner step:
        as the first left them). A batch that does not fit into memory is tried again, later or in smaller
        micro-batches: see `Room`.

        Raises:
            FtisError: a single sample does not fit into memory.
        """
        try:
            return self._step(groups)
        finally:
            self.optimiser.drop_gradients()  # also those of a step that was interrupted

    def _step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        began = time.perf_counter()
        batch = Batch.of(groups, self.objective)
        diagnostics = Diagnostics(batch.idle, batch.unreadable, batch.unreadable_judged)
        retries = self._retries
        loss = 0.0
        norm = 0.0
        skipped: str | None = "no group had a reward that differs from the others"
        size = self.room.size
        if batch.computed:
            loss, norm, skipped = self._updates(batch, diagnostics)
            size = self.room.size
            self._note_end(skipped)
        self.steps += 1
        summary = diagnostics.summary()
        warnings = []
        if not skipped and self.objective.threshold is not None:
            warnings = self._watch.observe(summary.sources)
        return StepReport(
            loss=loss,
            gradient_norm=norm,
            tokens=sum(sample.sampled for sample in batch.computed),
            seconds=time.perf_counter() - began,
            skipped=skipped,
            bad_steps=self._bad_steps,
            diverged=self._bad_steps >= BAD_STEPS,
            warnings=warnings,
            micro_batch_tokens=size,
            memory_retries=self._retries - retries,
            diagnostics=summary,
        )

    def _updates(self, batch: Batch, diagnostics: Diagnostics) -> tuple[float, float, str | None]:
        """Take the step's updates; return loss, norm and why nothing changed, as `_apply`, of the last one."""
        gate = self.gate
        usual_length = self.usual_length
        start: list[Tensor] = []
        for inner in range(self.objective.inner_steps):
            with doing("training", len(batch.computed), "completions"):
                computed, norm = self._gradient_without_overflow(batch, start)
            self._tell(diagnostics, computed, inner)
            loss, norm, skipped = self._apply(batch, computed, norm)
            if skipped:
                break
            if inner == 0:
                gate = self.next_gate(computed)
                start = _by_sample(computed)
                successes = [s.sampled for s in batch.computed if s.source == OWN and s.advantage > 0]
                usual_length = next_length(self.usual_length, successes)
        self.gate = gate  # only now: all inner steps are gated alike
        self.usual_length = usual_length
        return loss, norm, skipped

    def _note_end(self, skipped: str | None) -> None:
        """Note how a step ended that had something to compute."""
        self.room.fine()
        if skipped:
            self._bad_steps += 1
        else:
            self._bad_steps = 0
            self.loss_scale.fine()

    # --- the gradient ---------------------------------------------------------------------------------------------

    def _gradient_without_overflow(self, batch: Batch, start: Sequence[Tensor]) -> tuple[list[Computed], float]:
        """`gradient_that_fits`, again with a smaller loss scale where it overflowed; and the gradient's norm.

        A forward pass that is not finite is no overflow of the gradient: no scale mends it.
        """
        for left in range(HALVINGS, -1, -1):
            computed = self.gradient_that_fits(batch, start)
            (norm,) = self._team.first(self.optimiser.gradient_norm() / self.loss_factor(batch))
            forward = [tensor for part in computed for tensor in (part.logprobs, part.terms.value)]
            if not left or not self.loss_scale.overflowed(norm, forward):
                break
        return computed, norm

    def loss_factor(self, batch: Batch) -> float:
        """What `loss_scale` multiplies the sum of a batch's losses by, were none of its samples dropped."""
        return self.loss_scale.of_sum(self.divisor(batch, ()))

    def gradient_that_fits(self, batch: Batch, start: Sequence[Tensor]) -> list[Computed]:
        """Leave the gradient of a batch in the parameters, up to `divisor` and `loss_factor`, and change nothing else.

        In a team each rank computes a share of it; all return the micro-batches of all.

        Args:
            start: log-probs of each sample at the first inner step, none if this is it.

        Raises:
            FtisError: a single sample does not fit into memory.
        """
        while True:
            self.optimiser.drop_gradients()
            try:
                self.policy.model.train()  # only gradient checkpointing needs it; without dropout all else is the same
                return self._gradient(batch, start)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            finally:
                self.policy.model.eval()
            self._make_room(batch)  # out here: the error's traceback holds the tensors that were there

    def _gradient(self, batch: Batch, start: Sequence[Tensor]) -> list[Computed]:
        """As `gradient_that_fits`, once: this rank's share, then the sum over all ranks."""
        team = self._team
        with self._around_passes.agreeing():
            mine = self._computed(team.share(batch.prompted, self.policy.packed), batch, start)
        with team.bound(by_size=True):
            team.add_up(self.trainable)
            return shared(mine, batch, team)

    def _computed(self, mine: Sequence[Prompted], batch: Batch, start: Sequence[Tensor]) -> list[Computed]:
        """Add the gradient of this rank's share; stop where one in float16 is not finite already, for no more mends it.

        In shards each pass exchanges weights, so all ranks make as many. One that fails within a pass, also for want of
        memory, ends all: the others wait for it there.
        """
        team = self._within_pass
        parts = list(micro_batches(mine, self.room.size, self.policy.packed))
        count = len(parts)
        first = batch.prompted[0]
        nothing = [Prompted(first.prompt_ids, [replace(first.samples[0], scale=0.0)])]
        passes = parts + [nothing] * (team.most(count) - count)
        computed: list[Computed] = []
        for part in passes:
            with team.agreeing():
                if not start:
                    check()
            with team.bound(by_size=True):
                one = self._backward(part, batch, start)
                computed.append(one)
                advance(len(one.samples), tokens=len(one.logprobs))
                if not self.loss_scale.used:
                    continue
                overflowed = not math.isfinite(self.optimiser.gradient_norm())
                if team.most(int(overflowed)):
                    break
        return computed[:count]

    def _make_room(self, batch: Batch) -> None:
        """Waits, or takes less at a time; never less than the longest sample, which has a micro-batch to itself.

        The first rank of a team decides for all.

        Raises:
            FtisError: a single sample does not fit into memory.
        """
        self.optimiser.drop_gradients()
        self._retries += 1
        longest = max(len(group.prompt_ids) + sample.tokens for group in batch.prompted for sample in group.samples)
        there = sum(group.cost(self.policy.packed) for group in batch.prompted)
        free_memory()
        enough = self._team.rank == 0 and self.room.short(there // self._team.size, longest)
        decided, size = self._team.first(enough, self.room.size)
        self.room.size = int(size)
        if not decided:
            raise FtisError("A single completion with its prompt does not fit into memory.")

    def _backward(
        self,
        part: Sequence[Prompted],
        batch: Batch,
        start: Sequence[Tensor],
    ) -> Computed:
        """Add the gradient of one micro-batch, times `loss_factor`, to that in the parameters.

        Args:
            start: log-probs of each sample of the batch at the first inner step, none if this is it.
        """
        device = self.policy.device
        samples = [sample for prompted in part for sample in prompted.samples]
        lengths = torch.tensor([sample.sampled for sample in samples], device=device)
        advantages = _column([sample.advantage for sample in samples], device)
        own = torch.tensor([sample.source == OWN for sample in samples], device=device)
        new, entropy = completion_logprobs(self.policy, [prompted.prefixed for prompted in part], self.temperature)
        claimed = np.concatenate([sample.completion.logprobs for sample in samples])
        before = new.detach()
        if start:
            before = torch.cat([start[sample.index].to(device) for sample in samples])
        suspect = distrusted(
            before,
            lengths,
            advantages,
            own,
            defences=self._defences,
            usual_length=self.usual_length,
        )
        packed = pack(
            trainer_logprobs=new,
            start_logprobs=before,
            sampler_logprobs=torch.from_numpy(claimed).to(device),
            lengths=lengths,
            advantages=advantages,
            weights=_column([sample.weight for sample in samples], device) * ~suspect,
            ended=torch.tensor([sample.completion.finished for sample in samples], device=device),
            own=own,
            chunks=_chunks(samples, device),
            written=torch.tensor([sample.written for sample in samples], device=device),
            count_end=self.objective.count_end,
        )
        terms = self.objective.terms(packed, self.gate)
        loss = -(terms.value * _column([sample.scale for sample in samples], device)).sum()
        (loss * self.loss_factor(batch)).backward()  # type: ignore[no-untyped-call]
        detached = replace(terms, value=terms.value.detach())
        return Computed(
            samples,
            detached,
            new.detach(),
            entropy,
            float(loss.detach()),
            suspect,
        )

    def divisor(self, batch: Batch, computed: Sequence[Computed]) -> float:
        """D, which the accumulated loss and gradient must still be divided by: it may hang on what was dropped."""
        dropped = [
            sample
            for part in computed
            for sample, kept in zip(part.samples, part.terms.kept.tolist(), strict=True)
            if not kept
        ]
        return self.objective.batch_divisor(
            groups=batch.groups,
            samples=batch.samples,
            tokens=batch.tokens,
            dropped_samples=len(dropped),
            dropped_tokens=sum(counted(sample.completion, self.objective) for sample in dropped),
        )

    def _apply(self, batch: Batch, computed: Sequence[Computed], norm: float) -> tuple[float, float, str | None]:
        """Change the weights; return the loss, the norm of the whole gradient, and why nothing changed, if so."""
        scale = 1 / self.divisor(batch, computed)
        loss = sum(part.loss for part in computed) * scale
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimiser.drop_gradients()
            why = "loss or gradient was not finite"
            if self.loss_scale.used:
                why += " in float16"
            return loss, norm * scale, why
        factor = self.loss_factor(batch)
        with self._team.bound():
            self.optimiser.step(norm=norm * factor, scale=scale / factor)
        return loss, norm * scale, None

    # --- diagnostics ----------------------------------------------------------------------------------------------

    def _tell(self, diagnostics: Diagnostics, computed: Sequence[Computed], inner: int) -> None:
        """Add micro-batches to the figures; inner: the number of the inner step."""
        for part in computed:
            samples = part.samples
            sources = [sample.source for sample in samples]
            lengths = torch.tensor([sample.sampled for sample in samples])
            if inner:
                diagnostics.add_inner(part.terms, lengths, sources)
                continue
            diagnostics.add(
                part.terms,
                advantages=torch.tensor([sample.advantage for sample in samples]),
                lengths=lengths,
                sources=sources,
                entropy=part.entropy,
                distrusted=part.distrusted,
                chunked=torch.tensor([sample.completion.chunks is not None for sample in samples]),
                judged=torch.tensor([sample.judged for sample in samples]),
            )

    def next_gate(self, computed: Sequence[Computed]) -> float | None:
        """The gate's level after a step on these; see `Objective.next_gate`."""
        successes = []
        for part in computed:
            for sample, likelihood in zip(part.samples, part.terms.likelihood, strict=True):
                if sample.source == OWN and sample.advantage > 0 and counted(sample.completion, self.objective):
                    successes.append(likelihood)
        likelihoods = torch.empty(0)
        if successes:
            likelihoods = torch.stack(successes)
        return self.objective.next_gate(self.gate, likelihoods)

    # --- what outlives the process --------------------------------------------------------------------------------

    def state(self, *, live: bool = False) -> tuple[NamedTensors, NamedTensors]:
        """Copies of the trainable weights by name, and of everything else that the next step depends on, on the CPU.

        Args:
            live: no copies, but what the next step will change, wherever it is.
        """
        with self._within_pass.bound():
            weights, state = self.optimiser.state(live=live)
        state[_GATE] = _level(self.gate)
        state[_LENGTH] = _level(self.usual_length)
        state |= self.loss_scale.state()
        return weights, state

    def restore(self, weights: NamedTensors, state: NamedTensors, steps: int) -> None:
        """Put back what `state` gave.

        Raises:
            FtisError: the weights are of another model or another choice of trainable parameters.
        """
        self.optimiser.restore(weights, {name: value for name, value in state.items() if "/" in name})
        self.loss_scale.restore(state)
        self.gate = _value(state.get(_GATE))
        self.usual_length = _value(state.get(_LENGTH))
        self.steps = steps
        self._bad_steps = 0


_WITH_TERMS = ("logprobs", "entropy", "distrusted")
_TERMS = tuple(field.name for field in fields(Terms))
_GATE = "gate"  # among the optimiser's tensors, whose names all have a slash
_LENGTH = "usual length"


def _level(value: float | None) -> Tensor:
    """A level as a tensor, `[1]`, or `[0]` if there is none."""
    values = []
    if value is not None:
        values = [value]
    return torch.tensor(values, dtype=torch.float64)


def _value(level: Tensor | None) -> float | None:
    """Undo `_level`; None where it was not kept."""
    if level is None or not len(level):
        return None
    return float(level[0])


def _by_sample(computed: Sequence[Computed]) -> list[Tensor]:
    """Log-probs at the start of the step, by a sample's index."""
    found: dict[int, Tensor] = {}
    for part in computed:
        pieces = torch.split(part.logprobs, [sample.sampled for sample in part.samples])
        for sample, piece in zip(part.samples, pieces, strict=True):
            found[sample.index] = piece
    return [found[index] for index in range(len(found))]


def shared(mine: list[Computed], batch: Batch, team: Team) -> list[Computed]:
    """The micro-batches of all ranks, in their order; only their tensors travel.

    A tensor's name is ``NUMBER/NAME``, with the number of its micro-batch among its rank's.
    """
    if team.size == 1:
        return mine
    tensors: NamedTensors = {}
    for number, one in enumerate(mine):
        row = {name: getattr(one.terms, name) for name in _TERMS}
        row |= {name: getattr(one, name) for name in _WITH_TERMS}
        row["index"] = torch.tensor([sample.index for sample in one.samples])
        row["loss"] = torch.tensor([one.loss], dtype=torch.float64)
        tensors |= {f"{number}/{name}": value for name, value in row.items()}
    everything: list[Computed] = []
    for found in team.gathered(tensors):
        number = 0
        while f"{number}/loss" in found:
            samples = [batch.computed[index] for index in found[f"{number}/index"].tolist()]
            terms = Terms(**{name: found[f"{number}/{name}"] for name in _TERMS})
            more = {name: found[f"{number}/{name}"] for name in _WITH_TERMS}
            everything.append(Computed(samples, terms, loss=float(found[f"{number}/loss"]), **more))
            number += 1
    return everything


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _chunks(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """The chunk of each token, counted through all samples: int64 `[Σ tokens]`; None where each token is a chunk."""
    if all(sample.completion.chunks is None for sample in samples):
        return None
    pieces = []
    begin = 0
    for sample in samples:
        completion = sample.completion
        chunks = completion.chunks
        if chunks is None:
            chunks = np.arange(completion.sampled)
        pieces.append(chunks + begin)
        begin += len(completion.logprobs)
    return torch.from_numpy(np.concatenate(pieces)).to(device)
