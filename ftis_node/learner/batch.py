"""The batch of a step: groups, perhaps of several nodes' parts, and how they are cut into micro-batches."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ftis_node.errors import FtisError
from ftis_node.fit.memory import SPREAD
from ftis_node.objective import Objective
from ftis_node.packet import Completion
from ftis_node.policy.packing import Prefixed
from ftis_node.step_report import OWN

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Part:
    """Completions of one generator with their rewards `[n]`; `weight` is what each counts in the loss.

    None stands for a completion that the policy's tokenizer cannot write: its reward counts in the group's advantages.
    """

    source: str
    completions: Sequence[Completion | None]
    rewards: Sequence[float]
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class TrainingGroup:
    """All completions of one prompt. Vertical: one part, of one node. Horizontal: a part of each node that made any."""

    prompt_ids: Sequence[int]
    parts: Sequence[Part]


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion that is computed; `index` is its place in the batch. `judged`: it is evidence on claims."""

    index: int
    source: str
    completion: Completion
    advantage: float
    weight: float
    scale: float
    judged: bool

    @property
    def tokens(self) -> int:
        """The tokens that go through the model, given ones included."""
        return len(self.completion)

    @property
    def sampled(self) -> int:
        """The tokens that are trained on."""
        return self.completion.sampled

    @property
    def written(self) -> int:
        """The tokens in which its author wrote it."""
        counts = self.completion.counts
        if counts is None:
            return self.sampled
        return int(counts.sum())


@dataclass(frozen=True, eq=False)
class Prompted:
    """A prompt and those of its samples that are computed together."""

    prompt_ids: Sequence[int]
    samples: Sequence[Sample]

    @property
    def prefixed(self) -> Prefixed:
        """The same in the form in which the policy scores it."""
        completions = [sample.completion for sample in self.samples]
        return Prefixed(
            self.prompt_ids,
            [one.token_ids for one in completions],
            [one.given for one in completions],
        )

    def cost(self, packed: bool) -> int:
        """Tokens that go through the model. Without packing each completion has a copy of the prompt."""
        if packed:
            return self.prefixed.tokens
        return sum(len(self.prompt_ids) + one.tokens for one in self.samples)


@dataclass(eq=False)
class Batch:
    """The samples of a step, and what of it counts in a denominator although it needs no forward pass.

    computed                 the samples that need a forward pass, in the order of their `index`
    prompted                 the same, by prompt
    groups, samples, tokens  of the whole step, groups without a signal included; tokens as the objective counts them
    idle                     samples by source that have an advantage of 0 and are not computed. One of a group with
                             a signal is computed where the denominator leaves out what is dropped: it may be; and
                             where it is evidence on its author's claims
    unreadable, unreadable_judged   samples by source that the policy's tokenizer cannot write; those that are evidence
    """

    computed: list[Sample] = field(default_factory=list)
    prompted: list[Prompted] = field(default_factory=list)
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    idle: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    unreadable_judged: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, groups: Sequence[TrainingGroup], objective: Objective) -> Batch:
        """Advantages over what came of each group; with an objective of own samples only, over one's own parts.

        Raises:
            FtisError: a part has not as many rewards as completions.
        """
        batch = cls()
        known = [_ids(group) for group in groups]
        for group, ids in zip(groups, known, strict=True):
            parts = [part for part in group.parts if part.source == OWN or not objective.own_only]
            if any(part.completions for part in parts):
                batch._add(
                    group.prompt_ids,
                    parts,
                    objective,
                    random.Random(sum(known) - ids),
                )
        return batch

    def _add(
        self,
        prompt_ids: Sequence[int],
        parts: Sequence[Part],
        objective: Objective,
        rng: random.Random,
    ) -> None:
        """Add the samples of one group.

        Raises:
            FtisError: a part has not as many rewards as completions.
        """
        if any(len(part.rewards) != len(part.completions) for part in parts):
            raise FtisError("A group has not as many rewards as completions.")
        rewards = torch.tensor([reward for part in parts for reward in part.rewards], dtype=torch.float64)
        advantages = objective.advantages(rewards).tolist()
        every = objective.judges_all and any(advantages)
        readable = [one is not None for part in parts for one in part.completions]
        judged = after_both(rewards.tolist(), readable, rng)
        scale = objective.sample_scale(len(rewards))
        if objective.imitation is not None and all(part.source != OWN for part in parts):
            legible = rewards * torch.tensor(readable)  # what this node cannot write it cannot imitate
            advantages = imitated(legible.tolist(), objective.imitation)
            scale = 1.0  # λ of the group, not of its 1/G
            judged = [False] * len(judged)  # the one that is computed was picked by its reward
        samples: list[Sample] = []
        remaining = zip(advantages, judged, strict=True)
        for part in parts:
            mine = part.source == OWN
            for completion in part.completions:
                advantage, evidence = next(remaining)
                if completion is None:
                    self.unreadable[part.source] += 1
                    self.unreadable_judged[part.source] += evidence
                    continue
                self.tokens += counted(completion, objective)
                if advantage == 0 and not every and (mine or not evidence):
                    self.idle[part.source] += 1
                    continue
                sample = Sample(
                    index=len(self.computed) + len(samples),
                    source=part.source,
                    completion=completion,
                    advantage=advantage,
                    weight=part.weight,
                    scale=scale,
                    judged=evidence or mine,
                )
                samples.append(sample)
        self.groups += 1
        self.samples += len(rewards)
        if samples:
            self.computed += samples
            self.prompted.append(Prompted(prompt_ids, samples))


def after_both(
    rewards: Sequence[float],
    readable: Sequence[bool],
    rng: random.Random,
) -> list[bool]:
    """Which samples of a group are evidence on claims: those after a better and a worse one, in a random order.

    Only groups with a signal are computed, and given that, a sample's ρ no longer has a mean of 1. But once readable
    samples have different rewards, the highest above 0, the group is fetched and computed whatever the later ones are.
    So these are as if drawn without selection, and may be judged one by one (a martingale). The order is the reader's,
    so that no author can put its lies into the samples that are no evidence.
    """
    count = len(rewards)
    found = [False] * count
    low = math.inf
    high = -math.inf
    for place in rng.sample(range(count), count):
        found[place] = low < high > 0
        if readable[place]:
            low = min(low, rewards[place])
            high = max(high, rewards[place])
    return found


def _ids(group: TrainingGroup) -> int:
    """The sum of a group's ids. That of the others is the seed of its order: unknown to its author, and not its own."""
    total = 0
    for part in group.parts:
        for one in part.completions:
            if one is not None:
                total += int(one.token_ids.sum())
    return total


def imitated(rewards: Sequence[float], weight: float) -> list[float]:
    """λ for the first completion with the group's highest reward, if that is above 0; 0 for all others.

    With R = 1 the gradient of its term is λ ∇ log π: SGT's NLL on one verified success (arXiv 2605.07244).
    """
    advantages = [0.0] * len(rewards)
    best = max(rewards)
    if best > 0:
        advantages[rewards.index(best)] = weight
    return advantages


def counted(completion: Completion, objective: Objective) -> int:
    """Tokens of a completion that count in the loss: all sampled ones, or all but the EOS at its end."""
    return completion.sampled - (completion.finished and not objective.count_end)


def micro_batches(prompted: Sequence[Prompted], budget: int, packed: bool) -> Iterator[list[Prompted]]:
    """Groups of similar length together, each micro-batch within `budget`; a group that is too large is cut. Without
    packing it is completions, each with its prompt, and what pads them counts.

    Attention holds keys and values of a completion's prompt and itself, all as long as the longest of the micro-batch.
    So each of `budget` tokens has at most `SPREAD` rows of them, however uneven the lengths are.
    A single sample that is larger than that has a micro-batch to itself.
    """
    if not packed:
        rows = (Prompted(group.prompt_ids, [sample]) for group in prompted for sample in group.samples)
        longest_first = sorted(rows, key=lambda row: -row.cost(packed))
        yield from portions(longest_first, lambda some: len(some) * some[0].cost(packed) <= budget)
        return
    groups = sorted(prompted, key=lambda p: -max(sample.tokens for sample in p.samples))
    pieces = (piece for group in groups for piece in _cut(group, budget))
    yield from portions(pieces, lambda some: _within(some, budget))


def _cut(group: Prompted, budget: int) -> Iterator[Prompted]:
    """The group whole if it fits; else in pieces that do, each with its own copy of the prompt."""
    longest_first = sorted(group.samples, key=lambda sample: -sample.tokens)

    for some in portions(longest_first, lambda some: _within([Prompted(group.prompt_ids, some)], budget)):
        yield Prompted(group.prompt_ids, some)


def portions(things: Iterable[T], fit: Callable[[Sequence[T]], bool]) -> Iterator[list[T]]:
    """These things in their order, as many at a time as fit together; one that does not comes alone."""
    some: list[T] = []
    for thing in things:
        if some and not fit([*some, thing]):
            yield some
            some = []
        some.append(thing)
    if some:
        yield some


def _within(pieces: Sequence[Prompted], budget: int) -> bool:
    """Whether tokens that go through the model, and rows of attention, are as few as `micro_batches` says."""
    prompts = [len(piece.prompt_ids) for piece in pieces]
    samples = [sample.tokens for piece in pieces for sample in piece.samples]
    tokens = sum(prompts) + sum(samples) - len(samples)
    return tokens <= budget and len(samples) * (max(prompts) + max(samples)) <= SPREAD * budget
