"""One private optimiser step on groups of one's own and of others (F-TIS, arXiv 2605.22537)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis_node.errors import FtisError
from ftis_node.objective import Diagnostics, Objective
from ftis_node.packet import Completion
from ftis_node.policy.load import Policy
from ftis_node.policy.score import completion_logprobs
from ftis_node.settings import Settings


@dataclass(frozen=True, eq=False)
class TrainingGroup:
    """A group as the learner sees it: whose it is, its prompt, its completions and their rewards [G]."""

    source: str
    prompt_ids: Sequence[int]
    completions: Sequence[Completion]
    rewards: Sequence[float]
    weight: float = 1.0


@dataclass(frozen=True)
class StepReport:
    """What one step did. `skipped` says why the weights were left as they were, if they were."""

    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    skipped: str | None = None
    diagnostics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Sample:
    """One completion with a non-zero advantage, ready for a micro-batch."""

    source: str
    prompt_ids: Sequence[int]
    completion: Completion
    advantage: float
    weight: float
    denominator: int

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion.token_ids)


class Learner:
    """Owns the optimiser of a policy; `step` is its one verb."""

    def __init__(self, policy: Policy, objective: Objective, settings: Settings, temperature: float, own: str) -> None:
        """
        Args:
            temperature: the run's; log-probs of a peer are of the tempered distribution.
            own: the source name of this node's own groups.
        """
        self.policy = policy
        self.objective = objective
        self.settings = settings
        self.temperature = temperature
        self.own = own
        self.steps = 0
        self.trainable = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        self.optimiser = torch.optim.AdamW(
            self.trainable.values(),
            lr=settings.effective_learning_rate(),
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """Takes one step on `groups`; a non-finite loss or gradient leaves the weights as they are.

        The loss is −1/N Σ_groups 1/G Σ_i value_i (paper, section 3.3), N counting every group of the batch, also those
        whose rewards are all equal: they carry no gradient and cost no forward pass.
        """
        began = time.perf_counter()
        if self.objective.own_only:
            groups = [group for group in groups if group.source == self.own]
        diagnostics = Diagnostics()
        samples = list(self._samples(groups, diagnostics))
        self.optimiser.zero_grad(set_to_none=True)
        loss = sum(self._backward(batch, diagnostics) for batch in _micro_batches(samples, self.settings))
        norm, skipped = self._apply(loss) if samples else (0.0, "no group had a reward that differs from the others")
        self.steps += 1
        return StepReport(
            loss=loss,
            gradient_norm=norm,
            tokens=sum(len(sample.completion.token_ids) for sample in samples),
            seconds=time.perf_counter() - began,
            skipped=skipped,
            diagnostics=diagnostics.summary(),
        )

    def _samples(self, groups: Sequence[TrainingGroup], diagnostics: Diagnostics) -> Iterator[_Sample]:
        for group in groups:
            size = len(group.completions)
            advantages = self.objective.advantages(torch.tensor(group.rewards, dtype=torch.float64)).tolist()
            idle = sum(1 for advantage in advantages if advantage == 0)
            if idle:
                diagnostics.add_idle(group.source, idle)
            for completion, advantage in zip(group.completions, advantages, strict=True):
                if advantage != 0:
                    yield _Sample(
                        group.source, group.prompt_ids, completion, advantage, group.weight, len(groups) * size
                    )

    def _backward(self, batch: Sequence[_Sample], diagnostics: Diagnostics) -> float:
        """Adds the gradient of one micro-batch; returns its part of the loss."""
        device = self.policy.device
        new = completion_logprobs(
            self.policy,
            [sample.prompt_ids for sample in batch],
            [sample.completion.token_ids for sample in batch],
            self.temperature,
        )
        claimed = np.concatenate([sample.completion.logprobs for sample in batch])
        lengths = torch.tensor([len(sample.completion.token_ids) for sample in batch], device=device)
        advantages = _column([sample.advantage for sample in batch], device)
        weights = _column([sample.weight for sample in batch], device)
        terms = self.objective.terms(
            new=new,
            start=new.detach(),
            generator=torch.from_numpy(claimed).to(device),
            lengths=lengths,
            advantages=advantages,
            weights=weights,
        )
        loss = -(terms.value / _column([sample.denominator for sample in batch], device)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        diagnostics.add(
            terms, advantages=advantages, lengths=lengths, sources=[sample.source for sample in batch], own=self.own
        )
        return float(loss.detach())

    def _apply(self, loss: float) -> tuple[float, str | None]:
        norm = float(torch.nn.utils.clip_grad_norm_(self.trainable.values(), self.settings.gradient_clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimiser.zero_grad(set_to_none=True)
            return norm, "loss or gradient was not finite"
        self.optimiser.step()
        return norm, None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the trainable weights by name, and of the optimiser's state as ``name/key``, on the CPU."""
        weights = {name: _copy(parameter) for name, parameter in self.trainable.items()}
        names = list(self.trainable)
        optimiser = {
            f"{names[index]}/{key}": _copy(torch.as_tensor(value))
            for index, entry in self.optimiser.state_dict()["state"].items()
            for key, value in entry.items()
        }
        return weights, optimiser

    def restore(self, weights: dict[str, Tensor], optimiser: dict[str, Tensor], steps: int) -> None:
        """Puts back what `state` gave.

        Raises:
            FtisError: the weights are of another model or another choice of trainable parameters.
        """
        index = {name: position for position, name in enumerate(self.trainable)}
        if (
            weights.keys() != self.trainable.keys()
            or any(weights[name].shape != parameter.shape for name, parameter in self.trainable.items())
            or any(full.rsplit("/", 1)[0] not in index for full in optimiser)
        ):
            raise FtisError("The checkpoint belongs to another model or to another choice of trainable parameters.")
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(weights[name])
        state: dict[int, dict[str, Tensor]] = {}
        for full, value in optimiser.items():
            name, key = full.rsplit("/", 1)
            state.setdefault(index[name], {})[key] = value.clone()  # the optimiser goes on in what it is given
        whole = self.optimiser.state_dict()
        whole["state"] = state
        self.optimiser.load_state_dict(whole)
        self.steps = steps


def _micro_batches(samples: Sequence[_Sample], settings: Settings) -> Iterator[list[_Sample]]:
    """Samples of similar length together, each batch within the token budget once padded."""
    batch: list[_Sample] = []
    for sample in sorted(samples, key=lambda s: s.length):
        if batch and (len(batch) + 1) * sample.length > settings.micro_batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
