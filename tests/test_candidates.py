"""Each candidate has its paper's gradient, written out sample by sample in float64."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ftis_node.config.settings import collect
from ftis_node.lab.candidates import standing_on
from ftis_node.lab.corrections import KINDS, Given, corrected
from ftis_node.lab.pooling import hacpo, xgrpo
from ftis_node.learner import Part, TrainingGroup, choose_objective
from ftis_node.learner.batch import Batch
from ftis_node.objective import Objective
from ftis_node.packet import Completion

LENGTHS = [3, 5, 4, 2, 4, 3]
REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
CAP = 8  # tokens, by which the terms of `topr` and `asymre` are divided
ALONE = [name for name, kind in KINDS.items() if kind is not Given]


def candidate(name: str) -> Objective:
    settings = collect(task="gsm8k", flags=standing_on({"objective": name}), environment={})[0]
    return corrected(name, choose_objective(settings, "gsm8k", CAP))


def by_hand(name: str, new: list[Tensor], mu: list[Tensor], rewards: Tensor) -> Tensor:
    """What is ascended: new and mu are log π and log μ of each sample's tokens."""
    mean, total = float(rewards.mean()), torch.zeros((), dtype=torch.float64)
    for log_pi, log_mu, reward in zip(new, mu, rewards.tolist(), strict=True):
        advantage = (reward - mean) / float(rewards.std(correction=0))
        fixed = (rho := (log_pi - log_mu).exp()).detach()
        if name == "topr":
            total = total + (1 if advantage >= 0 else min(float(fixed.prod()), 1)) * advantage * log_pi.sum() / CAP
        elif name == "asymre":
            total = total + (reward - (mean - 0.1)) * log_pi.sum() / CAP
        elif name == "mu-grpo":
            outside = [place for place, one in enumerate(fixed.tolist()) if not 0.2 <= one <= 1.8]
            kept = outside[0] if outside and advantage < 0 else len(rho)
            clipped = torch.minimum(rho * advantage, rho.clamp(0.2, 1.8) * advantage)
            total = total + clipped[:kept].sum() / len(rho)
        else:
            advantage = (reward - mean) / mean if name == "maxrl" else advantage * (1 - mean)
            far = advantage <= 0 and float((1 / fixed - 1 + fixed.log()).mean()) >= 50
            total = total + (0 if far else advantage) * (fixed.clamp(max=2) * log_pi).sum() / len(rho)
    return total


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("apart", [0.0, 0.6, 2.5])
def test_a_candidates_gradient_is_its_papers(name: str, apart: float) -> None:
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        mu = -0.05 - 2 * torch.rand(sum(LENGTHS), generator=random, dtype=torch.float64)
        new = (mu + apart * torch.randn(len(mu), generator=random, dtype=torch.float64)).requires_grad_()
        objective = candidate(name)
        told = {"lengths": torch.tensor(LENGTHS), "advantages": objective.advantages(REWARDS), "generator": mu}
        terms = objective.terms(new=new, start=new.detach(), **told)  # type: ignore[arg-type]
        (ours,) = torch.autograd.grad(terms.value.sum(), new)
        (papers,) = torch.autograd.grad(by_hand(name, *(list(v.split(LENGTHS)) for v in (new, mu)), REWARDS), new)
        torch.testing.assert_close(ours, papers, atol=1e-10, rtol=0)


def test_the_veto_keeps_the_prefix_of_a_failure_where_the_filter_drops_all_of_it() -> None:
    rho = torch.tensor([0.5, 1e-6, 0.5, 0.5], dtype=torch.float64)
    told: dict[str, Any] = {"lengths": torch.tensor([4]), "advantages": torch.tensor([-1.0], dtype=torch.float64)}
    for name, expected in (("mu-grpo", [-0.125, 0, 0, 0]), ("focal", [0, 0, 0, 0])):
        new = (rho.log() - 1).requires_grad_()
        terms = candidate(name).terms(new=new, start=new.detach(), generator=torch.full_like(rho, -1), **told)
        assert torch.autograd.grad(terms.value.sum(), new)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("rewards", [torch.ones(4), torch.zeros(4)])
def test_groups_of_equal_rewards_have_a_signal_in_asymre_only(rewards: Tensor) -> None:
    for name in ALONE:
        assert candidate(name).advantages(rewards).tolist() == pytest.approx([0.1 * (name == "asymre")] * 4)


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
