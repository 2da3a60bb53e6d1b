"""How far the gradient on peers' samples is from the gradient on one's own (a referee's question).

Filtering and truncation trade variance for bias. So that bias is not lost in noise, both gradients are exact and of
many groups, sampled beside the trial from the very weights of that moment: plain GRPO's on groups of the node's own,
which is what training alone would do; and each objective's on as many groups of the others. A second batch of own
groups says how near one comes without any bias. Nothing of the trial is changed by looking.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftis_node.lab.compute import InProcess
from ftis_node.lab.events import GradientEvent
from ftis_node.lab.experiment import Probe
from ftis_node.learner import Learner, TrainingGroup, choose_objective
from ftis_node.learner.batch import Batch
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import OWN, GroupPart, StepGroup

if TYPE_CHECKING:
    from ftis_node.lab.participant import Participant


def probe(node: Participant, others: Sequence[Participant], wanted: Probe) -> Iterator[GradientEvent]:
    """Events `gradients`: of each objective its foreign gradient's cosine to the reference, and ratio of norms.

    The event with the source `own` is of the second batch of own groups, under GRPO. Each gradient is of the loss of
    those groups alone, divided by their number. An objective with a gate has the level that the reference batch gives.
    Nodes in processes of their own are not looked at.
    """
    engine = _engine(node)
    partners = [(other, found) for other in others if (found := _engine(other)) is not None]
    if engine is None or not partners:
        return
    first, second = (
        engine.training_groups(_sampled(engine, node, OWN, wanted.groups, which)) for which in ("own", "own again")
    )
    foreign: list[TrainingGroup] = []
    for place, (other, found) in enumerate(partners):
        share = wanted.groups // len(partners) + (place < wanted.groups % len(partners))
        foreign += engine.training_groups(_sampled(found, other, other.name, share, "for others"))
    reference = _gradient(node, engine, "grpo", first, first)
    for name, source, groups in [("grpo", OWN, second), *((name, "foreign", foreign) for name in wanted.objectives)]:
        gradient = _gradient(node, engine, name, groups, first)
        norms = float(gradient.norm()), float(reference.norm())
        yield {
            "event": "gradients",
            "node": node.name,
            "step": node.stepper.progress.step,
            "objective": name,
            "source": source,
            "cosine": float(torch.cosine_similarity(gradient, reference, dim=0)),
            "norm_ratio": norms[0] / norms[1] if norms[1] else 0.0,
            "own_norm": norms[1],
            "groups": len(groups),
        }


def _engine(node: Participant) -> Engine | None:
    return node.compute.engine if isinstance(node.compute, InProcess) and not node.member.script else None


def _sampled(engine: Engine, node: Participant, source: str, count: int, which: str) -> list[StepGroup]:
    """Groups sampled beside the trial, on prompts that are the same for every cell of a seed."""
    rng = random.Random(f"{node.spec.seed}/{node.name}/{node.stepper.progress.step}/{which}")
    rows = [rng.randrange(node.facts.rows) for _ in range(count)]
    state = engine.random.get_state()
    answers = engine.generate(rows).groups
    engine.random.set_state(state)
    parts = [[GroupPart(source, answer.packet, answer.rewards)] for answer in answers]
    return [StepGroup(row, part) for row, part in zip(rows, parts, strict=True)]


def _gradient(
    node: Participant, engine: Engine, name: str, groups: Sequence[TrainingGroup], own: Sequence[TrainingGroup]
) -> Tensor:
    """fp32 [parameters] of the loss on `groups` under that objective; zeros if nothing of them counts."""
    learner = engine.learner
    before = learner.objective, learner.gate
    asked = node.settings.model_copy(update={"objective": name})
    learner.objective, learner.gate = choose_objective(asked, node.run.task, node.run.completion_tokens), None
    try:
        if learner.objective.gate is not None:
            learner.gate = learner.next_gate(learner.gradient_that_fits(Batch.of(own, learner.objective, OWN)))
        parts = source_gradients(learner, groups)
    finally:
        learner.objective, learner.gate = before
        learner.optimiser.drop_gradients()
    zeros = torch.zeros(sum(parameter.numel() for parameter in learner.trainable.values()))
    return torch.stack([*parts.values(), zeros]).sum(0)


def source_gradients(learner: Learner, groups: Sequence[TrainingGroup]) -> dict[str, Tensor]:
    """Each source's part of the gradient that the next step on `groups` would take, before clipping.

    Nothing is changed by it.

    Returns:
        Source → fp32 `[parameters]` on the CPU, the trainable weights in their order; they add up to the whole.
    """
    batch = Batch.of(groups, learner.objective, learner.own)
    parts, computed = {}, []
    for source in sorted({sample.source for sample in batch.computed}):
        computed += learner.gradient_that_fits(batch.only(source))
        parts[source] = _flat(learner)
    divisor = learner.divisor(batch, computed) * learner.loss_factor(batch)
    return {source: gradient / divisor for source, gradient in parts.items()}


def _flat(learner: Learner) -> Tensor:
    """The gradient that lies in the parameters, taken out of them."""
    pieces = [
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().float().flatten().cpu()
        for p in learner.trainable.values()
    ]
    learner.optimiser.drop_gradients()
    return torch.cat(pieces)
