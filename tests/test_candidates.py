"""Each candidate has its paper's gradient, written out sample by sample in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ftis_node.config.settings import collect
from ftis_node.lab.candidates import CANDIDATES, standing_on
from ftis_node.lab.corrections import KINDS, corrected
from ftis_node.learner import choose_objective
from ftis_node.objective import Objective

LENGTHS = [3, 5, 4, 2, 4, 3]
REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
CAP = 8  # tokens, by which the terms of `topr` and `asymre` are divided


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


@pytest.mark.parametrize("name", CANDIDATES)
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
    for name in KINDS:
        assert candidate(name).advantages(rewards).tolist() == pytest.approx([0.1 * (name == "asymre")] * 4)
