"""How far the gradient on a peer's samples is from the gradient on many of one's own (a referee's question).

Filtering and truncation trade variance for bias. Here both gradients are exact, of the same weights: the one that an
objective takes from the foreign groups of a step, and plain GRPO's from a large batch of the node's own samples, which
estimates what training alone would do. Nothing of the trial is changed by looking.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftis_node.lab.compute import InProcess
from ftis_node.lab.experiment import Probe
from ftis_node.lab.gradients import source_gradients
from ftis_node.learner import Learner, TrainingGroup
from ftis_node.pool import Scored
from ftis_node.stepping import OwnGroup, messages
from ftis_node.worker.engine import Engine, choose_objective
from ftis_node.worker.messages import OWN

if TYPE_CHECKING:
    from ftis_node.lab.participant import Participant

# The same prompts for every method and node of a seed, so that only the weights differ.
_REFERENCE = "reference"


def probe(
    node: Participant, own: Sequence[OwnGroup], foreign: Sequence[Scored], wanted: Probe
) -> Iterator[dict[str, Any]]:
    """Events `gradients`: of each objective its foreign gradient's cosine to the reference and ratio of norms.

    One event has the source `own`: the same of this step's own groups under GRPO, which is how well so few samples do
    when nothing is biased. Each gradient is of the loss of those groups alone, divided by their number.
    """
    if not isinstance(node.compute, InProcess) or not foreign:
        return
    engine = node.compute.engine
    learner = engine.learner
    reference = _gradient(node, learner, "grpo", _reference(engine, node, wanted.own_groups))
    ours = engine.training_groups(messages(own, [], horizontal=False))
    theirs = engine.training_groups(messages([], foreign, horizontal=False))
    batches = [("grpo", OWN, ours)] if ours else []
    batches += [(name, "foreign", theirs) for name in wanted.objectives]
    for name, source, groups in batches:
        gradient = _gradient(node, learner, name, groups)
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
            "own_groups": wanted.own_groups,
        }


def _reference(engine: Engine, node: Participant, count: int) -> list[TrainingGroup]:
    """A large batch of own groups, sampled beside the trial."""
    rng = random.Random(f"{_REFERENCE}/{node.spec.seed}/{node.stepper.progress.step}")
    rows = [rng.randrange(node.facts["rows"]) for _ in range(count)]
    state = engine.random.get_state()
    answers = engine.generate(rows)["groups"]
    engine.random.set_state(state)
    parts = [[{"source": OWN, "completions": answer, "rewards": answer["rewards"]}] for answer in answers]
    return engine.training_groups([{"row": row, "parts": part} for row, part in zip(rows, parts, strict=True)])


def _gradient(node: Participant, learner: Learner, name: str, groups: Sequence[TrainingGroup]) -> Tensor:
    """fp32 [parameters] of the loss on `groups` under that objective; zeros if nothing of them counts."""
    before = learner.objective
    asked = node.settings.model_copy(update={"objective": name})
    learner.objective = choose_objective(asked, node.run.task, node.run.completion_tokens)
    try:
        parts = source_gradients(learner, groups)
    finally:
        learner.objective = before
    zeros = torch.zeros(sum(parameter.numel() for parameter in learner.trainable.values()))
    return torch.stack([*parts.values(), zeros]).sum(0)
