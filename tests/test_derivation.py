"""The statements of docs/method.md on bias and ranking, against exact enumeration of a table of logits.

Proof of statement 1. E_π[f] = E_gen[W f], so g_C − g* = E_gen[1/|a| Σₜ (min(ρₜ, C) − W) Â ∇ log π(aₜ)]. Its norm is
≤ M B ⟨|min(ρₜ, C) − W|⟩ ≤ M B (⟨|min(ρₜ, C) − 1|⟩ + E_gen|W − 1|), and E_gen|W − 1| = 2 TV(π, π_gen). Truncation:
(x − C)⁺ ≤ x²/4C. The filter: Markov's inequality; with `k3_reverse` E_gen[D] = ⟨1/ρₜ − 1 + log ρₜ⟩.

Proof of statement 2. Â rises with r, and a sample with Â > 0 is never dropped. (a) uᵢ = Âᵢ > 0; uⱼ is Âⱼ < Âᵢ or 0.
(b) rᵢ > rⱼ of two values means Âᵢ > 0 > Âⱼ, which is (a). (c) By (a) Âᵢ ≤ 0. Were j kept, uⱼ = Âⱼ < Âᵢ ≤ uᵢ; so j is
dropped, uⱼ = 0, and uᵢ < 0 says that i is kept. (d) Σᵢ Âᵢ = 0, and each failure has Â = −p / √(p(1−p)) = −√(p/(1−p)).
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ftis_node.objective import PRESETS
from ftis_node.objective.filter import kept_by_filter
from tests.support.objective_batches import termed

WORDS = 3
END = 2  # of them; the others are words
CAP = 3  # tokens of a completion
FTIS = PRESETS["ftis"]
TIS = PRESETS["tis"]
SEEDS = range(20)


def completions():
    """Every completion: up to its end, or to the cap."""
    found = []
    for length in range(1, CAP + 1):
        lasts = range(WORDS) if length == CAP else (END,)
        for head in itertools.product(range(END), repeat=length - 1):
            found += [(*head, last) for last in lasts]
    return found


ALL = completions()
CONTEXTS = sorted({a[:place] for a in ALL for place in range(len(a))})
WHERE = [CONTEXTS.index(a[:place]) for a in ALL for place in range(len(a))]  # of each token
TOKENS = [token for a in ALL for token in a]
LENGTHS = torch.tensor([len(a) for a in ALL])


def of_tokens(logits):
    """log π of each token of each completion, in double precision `[T]`."""
    return torch.log_softmax(logits, 1)[WHERE, TOKENS]


def by_completion(values):
    return torch.stack([part.sum() for part in values.split(LENGTHS.tolist())])


@dataclass(frozen=True)
class World:
    """A learner θ, a generator, and advantages that are a function of the completion."""

    learner: Tensor
    generator: Tensor
    advantages: Tensor

    @classmethod
    def drawn(cls, seed, apart):
        random = torch.Generator().manual_seed(seed)
        shape = (len(CONTEXTS), WORDS)
        learner = torch.randn(shape, generator=random, dtype=torch.float64)
        noise = torch.randn(shape, generator=random, dtype=torch.float64)
        generator = learner + apart * noise
        rewards = torch.randint(0, 3, (len(ALL),), generator=random).double()
        advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
        return cls(learner.requires_grad_(), generator, advantages)

    @property
    def ratio(self):
        """ρ of each token."""
        mine = of_tokens(self.learner.detach())
        return (mine - of_tokens(self.generator)).exp()

    @property
    def drawn_by(self):
        """π_gen(a) of each completion."""
        return by_completion(of_tokens(self.generator)).exp()

    @property
    def whole_ratio(self):
        """W = π(a) / π_gen(a)."""
        return by_completion(self.ratio.log()).exp()

    def gradient(self, objective, factor=1.0):
        """E of a sample's gradient under the generator, through the code that trains."""
        new = of_tokens(self.learner)
        terms = termed(
            objective,
            trainer_logprobs=new,
            start_logprobs=new.detach(),
            sampler_logprobs=of_tokens(self.generator),
            lengths=LENGTHS,
            advantages=self.advantages,
            weights=self.drawn_by * factor,
        )
        return torch.autograd.grad(terms.value.sum(), self.learner)[0]

    def wanted(self):
        """E of the same under the learner itself: of its own samples, with weights of 1."""
        new = of_tokens(self.learner)
        mine = by_completion(new.detach()).exp()
        value = (mine * self.advantages * by_completion(new) / LENGTHS).sum()
        return torch.autograd.grad(value, self.learner)[0]

    def bias(self, objective):
        """How far the gradient is from the wanted one."""
        return float((self.gradient(objective) - self.wanted()).norm())

    @property
    def scale(self):
        """M B: the largest advantage by the largest ‖∇ log π(token)‖, which is ‖e − π‖ of a table of logits."""
        pi = torch.softmax(self.learner.detach(), 1)
        slopes = torch.eye(WORDS)[TOKENS] - pi[WHERE]
        return float(self.advantages.abs().max() * slopes.norm(dim=1).max())

    def mean(self, values):
        """E under the generator of the mean over a completion's tokens."""
        return float((self.drawn_by * by_completion(values) / LENGTHS).sum())


def test_the_completions_are_all_of_them():
    world = World.drawn(0, 1.0)
    assert float(world.drawn_by.sum()) == pytest.approx(1)
    assert float((world.drawn_by * world.whole_ratio).sum()) == pytest.approx(1)
    assert len(ALL) == 1 + 2 + 4 * 3


# --- statement 1: bias ------------------------------------------------------------------------------------------------


def bound(world, cap):
    apart = (world.whole_ratio - 1).abs()
    twice_the_distance = float((world.drawn_by * apart).sum())
    tokens = world.mean((world.ratio.clamp(max=cap) - 1).abs())
    return world.scale * (twice_the_distance + tokens)


@pytest.mark.parametrize("cap", [1.0, 2.0, 8.0, 1e6])
@pytest.mark.parametrize("apart", [0.01, 0.3, 1.0, 3.0])
def test_the_bias_of_truncated_tokens_is_within_its_bound(apart, cap):
    truncated = TIS.replace(truncation=cap)
    for seed in SEEDS:
        world = World.drawn(seed, apart)
        limit = bound(world, cap) / 5
        assert world.bias(truncated) <= limit + 1e-9, "as the page says; the statement itself has the whole bound"
        assert float(world.gradient(truncated).norm()) <= cap * world.scale + 1e-9


def test_the_bias_goes_with_the_distance_of_the_generator():
    """A tenth of the distance has a tenth of the bias; on one's own samples there is none."""
    for seed in SEEDS:
        near = World.drawn(seed, 1e-2).bias(TIS)
        assert World.drawn(seed, 1e-3).bias(TIS) == pytest.approx(near / 10, rel=0.15)
        assert World.drawn(seed, 0.0).bias(TIS) < 1e-12


def test_the_bias_does_not_go_with_the_truncation():
    """Weights of single tokens leave prefix and ending to the generator, however large C is; Π ρ would not."""
    world = World.drawn(3, 1.0)
    never = TIS.replace(truncation=1e9)
    assert world.bias(never) > 0.1 * float(world.wanted().norm())
    whole = world.gradient(PRESETS["nois"], world.whole_ratio)
    torch.testing.assert_close(whole, world.wanted(), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("cap", [1.0, 2.0, 8.0])
def test_what_truncation_alone_takes_is_within_its_bound(cap):
    for seed in SEEDS:
        world = World.drawn(seed, 1.0)
        whole = world.gradient(TIS.replace(truncation=1e9))
        taken = whole - world.gradient(TIS.replace(truncation=cap))
        excess = world.mean((world.ratio - cap).clamp(min=0))
        assert float(taken.norm()) <= world.scale * excess + 1e-9
        assert excess <= world.mean(world.ratio**2) / (4 * cap) + 1e-12


@pytest.mark.parametrize("threshold", [0.1, 1.0, 5.0])
def test_what_the_filter_takes_is_within_its_bound(threshold):
    dropped_any = False
    for seed in SEEDS:
        world = World.drawn(seed, 1.5)
        whole = world.gradient(FTIS.replace(threshold=None))
        taken = whole - world.gradient(FTIS.replace(threshold=threshold))

        d = world.ratio.log()
        divergence = by_completion((-d).exp() - 1 + d) / LENGTHS
        low = world.advantages <= 0
        dropped = low & (divergence >= threshold)
        share = float(world.drawn_by[dropped].sum())
        lowest = replace(world, advantages=world.advantages[low])
        assert float(taken.norm()) <= FTIS.truncation * lowest.scale * share + 1e-9
        assert share <= float((world.drawn_by * divergence).sum()) / threshold + 1e-12
        dropped_any |= share > 0
    assert dropped_any


# --- statement 2: ranking ---------------------------------------------------------------------------------------------


def filtered(rewards, divergences, threshold):
    """Advantages before and after the filter."""
    double = partial(torch.tensor, dtype=torch.float64)
    advantages = FTIS.advantages(double(rewards))
    kept = kept_by_filter(advantages, double(divergences), threshold)
    return advantages.tolist(), (advantages * kept).tolist()


REWARDS = st.sampled_from([0.0, 0.25, 0.5, 1.0])
groups = st.lists(st.tuples(REWARDS, st.floats(0, 10)), min_size=2, max_size=9)


@settings(max_examples=200)
@given(groups)
def test_no_comparison_above_the_mean_is_turned_and_a_push_upwards_is_left(group):
    rewards, divergences = zip(*group, strict=True)

    before, after = filtered(rewards, divergences, 5.0)

    for i, j in itertools.permutations(range(len(rewards)), 2):
        if rewards[i] <= rewards[j]:
            continue
        if before[i] > 0 or len(set(rewards)) == 2:
            assert after[i] > after[j] or after[i] == after[j] == 0
        if after[i] < after[j]:
            assert before[j] < before[i] <= 0, "both are below the mean"
            assert divergences[j] >= 5 > divergences[i], "the worse is dropped"

    dropped = [value for value, left in zip(before, after, strict=True) if value != left]
    assert sum(before) == pytest.approx(0, abs=1e-9)
    assert sum(after) == pytest.approx(sum(map(abs, dropped)), abs=1e-9)

    if set(rewards) == {0.0, 1.0}:
        rate = sum(rewards) / len(rewards)
        push = math.sqrt(rate / (1 - rate))
        assert sum(after) == pytest.approx(len(dropped) * push, abs=1e-9)


def test_a_better_failure_can_fall_behind_a_worse_one_that_is_dropped():
    """The one comparison that can turn round, on the table: rewards 1, ½ and 0, the last far from the learner."""
    before, after = filtered([1.0, 1.0, 0.25, 0.0], [0.0, 0.0, 0.0, 9.0], 5.0)
    assert before[2] > before[3]
    assert after[2] < after[3] == 0
