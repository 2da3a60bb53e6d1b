"""On common rows each candidate has its paper's gradient, written out sample by sample in float64."""

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from ftis_node.config.settings import collect
from ftis_node.lab.candidates import standing_on
from ftis_node.lab.pooling import Given, hacpo, xgrpo
from ftis_node.learner import Part, TrainingGroup, choose_objective
from ftis_node.learner.batch import Batch
from ftis_node.objective import Objective
from ftis_node.packet import Completion


def candidate(name: str) -> Objective:
    settings = collect(task="gsm8k", flags=standing_on({"objective": name}), environment={})[0]
    return Given.like(choose_objective(settings, "gsm8k", 8))


AUTHORS, EACH = ("own", "b", "c"), 3
Told = dict[int, tuple[Tensor, Tensor]]  # a completion's id → its log π and log μ


def common_rows(rng: random.Random, able: dict[str, float]) -> tuple[list[TrainingGroup], Told]:
    """A batch of four rows; able: how often each author is right."""
    groups, told = [], Told()
    for _ in range(4):
        parts = []
        for author in AUTHORS:
            sizes, far = rng.choices((2, 3, 5), k=EACH), 0.0 if author == "own" else 0.4
            made = [Completion(np.zeros(size, np.uint32), np.zeros(size, np.float32), True) for size in sizes]
            parts.append(Part(author, made, [float(rng.random() < able[author]) for _ in made]))
            for one in made:
                mu, noise = torch.rand(2, len(one), dtype=torch.float64)
                told[id(one)] = (far * (noise - 0.7) - mu).requires_grad_(), -mu
        groups.append(TrainingGroup([1], parts))
    return groups, told


def ours(groups: list[TrainingGroup], told: Told, objective: Objective) -> Tensor:
    """What the learner ascends on a batch."""
    batch = Batch.of(groups, objective, "own")
    new, mu = (torch.cat([told[id(one.completion)][which] for one in batch.computed]) for which in (0, 1))
    facts = [[one.advantage, one.weight, one.scale, one.tokens, one.source == "own"] for one in batch.computed]
    advantages, weights, scales, lengths, own = torch.tensor(facts, dtype=torch.float64).T
    samples = {"lengths": lengths.long(), "advantages": advantages, "weights": weights, "own": own.bool()}
    terms = objective.terms(new=new, start=new.detach(), generator=mu, **samples)
    return (scales * terms.value).sum() / batch.groups


def papers(name: str, groups: list[TrainingGroup], of: Told, able: dict[str, float]) -> Tensor:
    """The same by the paper's own formulas; able: of each author beside the learner."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        row = [(p.source, r, *of[id(c)]) for p in group.parts for c, r in zip(p.completions, p.rewards, strict=True)]
        shares = {part.source: sum(part.rewards) / EACH for part in group.parts}
        mean = sum(shares.values()) / 3
        squares = sum((reward - mean) ** 2 for _, reward, *_ in row) or math.inf
        published = sum(reward / able[author] for author, reward, *_ in row) / 9
        baseline = mean if mean == 1 else shares["own"] if published > 1 else published
        for author, reward, new, mu in row:
            ratio = (new.mean() - mu.mean()).exp()
            if name == "hacpo-published":
                clipped = ratio.clamp(0.8, 1)
                term = ratio if author == "own" else clipped * clipped.detach() * able[author]
                total = total + term * (reward - baseline) / (math.sqrt(squares / 8) + 1e-6) / 9
            elif author == "own":
                total = total + new.mean() * (reward - mean) / math.sqrt(squares / 9) / EACH
    return total / len(groups)


@pytest.mark.parametrize("name", ["hacpo-published", "xgrpo"])
def test_on_common_rows_a_gradient_is_its_papers_over_all_authors(name: str) -> None:
    torch.manual_seed(0)
    rng, abilities = random.Random(1), dict[str, list[float]]()
    shares: dict[str, list[float]] = {author: [] for author in AUTHORS}
    for batch in range(10):
        right = (0.9, 0.8, 0.7) if batch == 1 else (0.8, 0.5, 0.2 if batch < 3 else 0.0)
        groups, told = common_rows(rng, dict(zip(AUTHORS, right, strict=True)))
        for author in AUTHORS:
            found = [sum(part.rewards) for group in groups for part in group.parts if part.source == author]
            shares[author].append(sum(found) / 12 or 1e-8)
        means = {author: sum(some[-5:]) / len(some[-5:]) for author, some in shares.items()}
        able = {author: min(max(mean / means["own"], 0.1), 10) for author, mean in means.items()}
        pooled = hacpo(groups, abilities) if name == "hacpo-published" else xgrpo(groups)
        leaves = [new for new, _ in told.values()]
        given = torch.autograd.grad(ours(pooled, told, candidate(name)), leaves, materialize_grads=True)
        wanted = torch.autograd.grad(papers(name, groups, told, able), leaves, materialize_grads=True)
        torch.testing.assert_close(given, wanted, atol=1e-10, rtol=0)
