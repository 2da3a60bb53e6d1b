"""Methods for common rows that look at what all authors made of a row, and the engine that trains by a candidate.

For horizontal cells in lock step, where every author answers every row of a batch. An objective learns the rewards of a
group, but not whose they are. So `Candidate` puts advantages in the place of rewards, and `Given` takes them as such.

    hacpo-published   HACPO (arXiv 2603.02604, equations 5, 6 and 59; its authors' code, `recipe/hacpo`). The ability P
                      of an author is its share of right samples in a batch, averaged over the last five batches, this
                      one included. For the learner k and a sample of author j: Â = (r − b) / (s + 1e-6), b the mean of
                      r · P_k / P_j over all authors' samples of the row, s their sample standard deviation, and the
                      sample's term counts P_j / P_k times. That ratio lies in 0.1 to 10; where all rewards are equal,
                      b is their mean; where b > 1, it is the mean of k's own. The rest is our `hacpo`: one update a
                      batch, so bounds that close in from minibatch to minibatch stay at 0.8 and 1
    xgrpo             XGRPO (arXiv 2605.07244) as we read it, for we have not seen its formula: GRPO on own samples
                      only, with the mean over all authors of k(q)/n as baseline, and the standard deviation around it
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from statistics import fmean

import torch
from torch import Tensor

from ftis_node.config.run import Run
from ftis_node.learner import TrainingGroup
from ftis_node.objective import Objective
from ftis_node.objective.advantages import group_advantages
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import OWN, OpenedRun, StepGroup

WINDOW, LEAST, BOUND, EPSILON = 5, 1e-8, 10.0, 1e-6


def hacpo(groups: Sequence[TrainingGroup], abilities: dict[str, list[float]]) -> list[TrainingGroup]:
    """The groups of a batch with HACPO's advantages, and its ratios as weights.

    abilities: by source, its shares of right samples in the latest batches, to which those of this one are added.
    """
    right: dict[str, list[float]] = defaultdict(list)
    for part in (part for group in groups for part in group.parts):
        right[part.source] += [float(reward > 0) for reward in part.rewards]
    for source, found in right.items():
        abilities[source] = [*abilities.get(source, ()), max(fmean(found), LEAST)][-WINDOW:]
    able = {source: fmean(shares) for source, shares in abilities.items()}
    ratios = {source: min(max(one / able[OWN], 1 / BOUND), BOUND) for source, one in able.items()}
    return [_given(group, _weighed(group, ratios), ratios) for group in groups]


def xgrpo(groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
    """Own parts only, with advantages over all; parts are of one size, so no author counts more than another."""
    return [_given(group, group_advantages(_rewards(group), "mean_std"), {OWN: 1.0}) for group in groups]


def _rewards(group: TrainingGroup) -> Tensor:
    return torch.tensor([reward for part in group.parts for reward in part.rewards], dtype=torch.float64)


def _weighed(group: TrainingGroup, ratios: Mapping[str, float]) -> Tensor:
    """Â of a group's samples, part by part: float64 `[G]`."""
    rewards, sources = _rewards(group), [part.source for part in group.parts for _ in part.rewards]
    if rewards.min() == rewards.max():
        return torch.zeros_like(rewards)
    baseline = fmean(reward / ratios[source] for reward, source in zip(rewards.tolist(), sources, strict=True))
    if baseline > 1:
        baseline = fmean(reward for part in group.parts if part.source == OWN for reward in part.rewards)
    return (rewards - baseline) / (rewards.std() + EPSILON)


def _given(group: TrainingGroup, advantages: Tensor, ratios: Mapping[str, float]) -> TrainingGroup:
    """The group with advantages for rewards; parts whose source has no ratio are left out."""
    values = iter(advantages.tolist())
    given = [replace(part, rewards=list(islice(values, len(part.rewards)))) for part in group.parts]
    parts = [replace(part, weight=part.weight * ratios[part.source]) for part in given if part.source in ratios]
    return replace(group, parts=parts)


class Given(Objective):
    """The objective whose advantages have been put in the place of rewards."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """As they are: `[G]` → `[G]`."""
        return rewards

    @classmethod
    def like(cls, base: Objective) -> "Given":
        """With all parts of another."""
        return cls(**{field.name: getattr(base, field.name) for field in fields(base)})


class Candidate(Engine):
    """Trains by a candidate of that name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.abilities: dict[str, list[float]] = {}

    def open(self, run: Run) -> OpenedRun:
        opened = super().open(run)
        self.learner.objective = Given.like(self.learner.objective)
        return opened

    def training_groups(self, groups: Sequence[StepGroup]) -> list[TrainingGroup]:
        made = super().training_groups(groups)
        if self._name == "xgrpo":
            return xgrpo(made)
        return hacpo(made, self.abilities)
