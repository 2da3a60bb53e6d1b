"""The loss of a whole step and its gradient, preset by preset, against the formulas one token at a time.

Nothing of the code is used on the other side: advantages, divergences, filter, gate and denominators are written out
again in plain Python from the paper's formulas, and float64 autograd differentiates one scalar after the other.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ftis_node.objective import PRESETS, Objective, Terms
from tests.support.objective_batches import graded, packed
from tests.support.objective_by_hand import CAP, RULES, Completion, Group, Rule, loss_by_hand


def random_step(seed: int, *, later: bool) -> list[Group]:
    """Five groups of one's own and of others, near and far; the rewards of the last are all equal."""
    rng = random.Random(seed)
    groups = []
    for index in range(5):
        size, far = rng.randint(3, 5), 0.05 if index % 2 == 0 else 2.5
        rewards = [0.5] * size if index == 4 else [1.0, 0.0, *(rng.choice([0.0, 0.25, 1.0]) for _ in range(size - 2))]
        completions = []
        for _ in range(size):
            start = [rng.uniform(-8, -0.01) for _ in range(rng.randint(1, 7))]
            moved = [x + rng.gauss(0, 0.2) if later else x for x in start]
            new = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in moved]
            spread = rng.choice([far, 2 * far])
            claimed = [min(0.0, x + rng.gauss(0, spread)) for x in start]
            completions.append(Completion(new, start, claimed, ended=rng.random() < 0.6))
        groups.append(Group(index % 2 == 0, rewards, completions))
    return groups


def loss_of_the_code(objective: Objective, groups: list[Group], level: float | None) -> tuple[Tensor, list[bool]]:
    """The same as a learner works it out: groups of equal rewards have no terms and are counted all the same."""
    taught = []
    for group in groups:
        advantages = objective.advantages(torch.tensor(group.rewards, dtype=torch.float64))
        if advantages.any():
            taught += [(group, *pair) for pair in zip(group.completions, advantages.tolist(), strict=True)]
    completions = [completion for _, completion, _ in taught]
    batch = packed(
        [completion.start for completion in completions],
        [advantage for *_, advantage in taught],
        generator=[completion.generator for completion in completions],
        ended=[completion.ended for completion in completions],
        own=[group.own for group, *_ in taught],
        gate=level,
    )
    terms = objective.terms(**batch | {"new": torch.stack([x for completion in completions for x in completion.new])})

    def counted(completion: Completion) -> int:
        return len(completion.start) - (completion.ended and not objective.count_end)

    dropped = [completion for completion, kept in zip(completions, terms.kept.tolist(), strict=True) if not kept]
    everything = [completion for group in groups for completion in group.completions]
    divisor = objective.batch_divisor(
        groups=len(groups),
        samples=len(everything),
        tokens=sum(map(counted, everything)),
        dropped_samples=len(dropped),
        dropped_tokens=sum(map(counted, dropped)),
    )
    scale = torch.tensor([objective.sample_scale(len(group.completions)) for group, *_ in taught], dtype=torch.float64)
    return -(scale * terms.value).sum() / divisor, terms.kept.tolist()


def slopes(loss: Tensor, groups: list[Group]) -> list[float]:
    leaves = [x for group in groups for completion in group.completions for x in completion.new]
    return [float(x) for x in torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


def agree(objective: Objective, rule: Rule, *, later: bool, level: float | None, seeds: int) -> int:
    """Checks both sides on random steps; how many samples were dropped."""
    dropped = 0
    for seed in range(seeds):
        groups = random_step(seed, later=later)
        if rule.own_only:
            groups = [group for group in groups if group.own]
        by_hand, expected = loss_by_hand(rule, groups, level)
        by_code, kept = loss_of_the_code(objective, groups, level)
        assert kept == expected
        assert by_code.item() == pytest.approx(by_hand.item(), rel=1e-12)
        gradient = slopes(by_code, groups)
        assert any(gradient)
        assert gradient == pytest.approx(slopes(by_hand, groups), rel=1e-11, abs=1e-16)
        dropped += kept.count(False)
    return dropped


def test_every_preset_has_a_rule() -> None:
    others = {"graft", "sgt", "hacpo", "icepop", "mis", "geo-rs", "dppo", "gspo", "cispo", "dapo"}
    assert RULES.keys() == PRESETS.keys() - others, "test_objective_names has those of other trainers"


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_loss_and_gradient_of_a_step_are_those_of_the_formulas(name: str, later: bool) -> None:
    dropped = agree(PRESETS[name], RULES[name], later=later, level=-4.0, seeds=6)
    assert (dropped > 0) == (RULES[name].g is not None or RULES[name].gate)


@pytest.mark.parametrize("name", ["vis", "ftis", "gated"])
@pytest.mark.parametrize("aggregation", ["sample", "token", "fixed"])
@pytest.mark.parametrize("count_end", [True, False], ids=["end", "no-end"])
@pytest.mark.parametrize("count_dropped", [True, False], ids=["all", "kept"])
def test_so_they_are_with_other_denominators(name: str, aggregation: str, count_end: bool, count_dropped: bool) -> None:
    objective = PRESETS[name].replace(
        aggregation=aggregation, count_end=count_end, count_dropped=count_dropped, divisor=CAP
    )
    rule = replace(RULES[name], aggregation=aggregation, count_end=count_end, count_dropped=count_dropped)
    agree(objective, rule, later=True, level=-4.0, seeds=2)


def test_the_filter_of_the_arithmetic_task_goes_by_the_sum_of_k1() -> None:
    objective = PRESETS["ftis"].replace(divergence="k1", reduction="sum", threshold=1.0)
    assert agree(objective, replace(RULES["ftis"], kl="k1", mean=False, g=1.0), later=True, level=None, seeds=6)


@pytest.mark.parametrize("level", [None, -3.5, -4.5])
def test_a_gate_and_a_filter_together_drop_what_either_drops(level: float | None) -> None:
    objective = PRESETS["ftis"].replace(gate=0.0)
    agree(objective, replace(RULES["ftis"], gate=True), later=True, level=level, seeds=4)


def test_a_step_worked_on_paper() -> None:
    # Two groups of two, one right and one wrong each: Â = ±1. The foreign wrong one has d = −8: e^8 − 9 ≥ 50.
    def completion(d: float, length: int) -> Completion:
        new = [torch.tensor(-10.0, dtype=torch.float64, requires_grad=True) for _ in range(length)]
        return Completion(new, [-10.0] * length, [-10.0 - d] * length, ended=True)

    mine = Group(True, [1.0, 0.0], [completion(0.0, 2), completion(0.0, 4)])
    theirs = Group(False, [1.0, 0.0], [completion(math.log(4), 1), completion(-8.0, 3)])
    idle = Group(False, [1.0, 1.0], [completion(0.0, 2), completion(0.0, 2)])
    groups = [mine, theirs, idle]
    # Three groups: 1/3 · 1/2 · (1 − 1 + min(4, 2) + 0).
    loss, kept = loss_of_the_code(PRESETS["ftis"], groups, None)
    assert kept == [True, True, True, False] and loss.item() == pytest.approx(-2 / 6)
    assert slopes(loss, groups) == pytest.approx([-1 / 12] * 2 + [1 / 24] * 4 + [-2 / 6] + [0.0] * 7)
    # Tokens: (2 − 4 + 2) / 14, or of the 11 kept.
    token = PRESETS["ftis"].replace(aggregation="token")
    assert slopes(loss_of_the_code(token, groups, None)[0], groups)[:3] == pytest.approx([-1 / 14] * 2 + [1 / 14])
    token = token.replace(count_dropped=False)
    assert slopes(loss_of_the_code(token, groups, None)[0], groups)[:3] == pytest.approx([-1 / 11] * 2 + [1 / 11])
    # A sixth of a sixteenth a token, whatever the length.
    fixed = PRESETS["ftis"].replace(aggregation="fixed", divisor=CAP)
    assert slopes(loss_of_the_code(fixed, groups, None)[0], groups)[:3] == pytest.approx([-1 / 96] * 2 + [1 / 96])
    # The author's: Â = ±1/2, five of six samples, and no EOS: one token of two, three of four, none of one.
    loss, kept = loss_of_the_code(PRESETS["ftis-author"], groups, None)
    assert kept == [True, True, True, False] and loss.item() == pytest.approx(0)
    assert slopes(loss, groups) == pytest.approx([-1 / 10, 0.0] + [1 / 30] * 3 + [0.0] * 9)
    # The gate opens to the foreign right answer at s = −10, and never to the wrong one.
    for level, opened in [(None, False), (-9.9, False), (-10.0, True)]:
        loss, kept = loss_of_the_code(PRESETS["gated"], groups, level)
        assert kept == [True, True, opened, False]
        assert loss.item() == pytest.approx(-1 / 6 if opened else 0)


def test_one_token_worked_on_paper() -> None:
    # ρ = e^(−1+3) = 7.39 is cut to C = 2; R = e^0.1 = 1.105 is inside the clip; Â = 1.5.
    token = packed([[-1.0]], [1.5], new=[[-0.9]], generator=[[-3.0]])
    terms, gradient = graded(PRESETS["ftis"], token)
    assert terms.value.item() == pytest.approx(2 * math.exp(0.1) * 1.5)
    assert gradient.item() == pytest.approx(2 * math.exp(0.1) * 1.5)
    assert (terms.truncated.tolist(), terms.clipped.tolist()) == ([True], [False])
    assert terms.loss_weight.item() == pytest.approx(1.5 * 2)
    # NoIS does not see ρ; GRPO clips it at 1.2 and has no gradient left.
    terms, gradient = graded(PRESETS["nois"], token)
    assert gradient.item() == pytest.approx(math.exp(0.1) * 1.5)
    assert terms.loss_weight.item() == pytest.approx(1.5)
    terms, gradient = graded(PRESETS["grpo"], token)
    assert terms.value.item() == pytest.approx(1.2 * 1.5)
    assert (gradient.item(), terms.clipped.tolist(), terms.truncated.tolist()) == (0.0, [True], [False])


def test_filter_drops_at_the_threshold_itself_and_never_what_has_a_positive_advantage() -> None:
    objective = PRESETS["ftis"].replace(divergence="k1", reduction="sum", threshold=1.0)
    for advantage, claimed, kept in [(-1.0, -1.0, False), (0.0, -1.0, False), (-1.0, -1.25, True), (0.5, 0.0, True)]:
        terms = objective.terms(**packed([[-2.0]], [advantage], generator=[[claimed]]))
        assert terms.kept.tolist() == [kept], (advantage, claimed)


def test_weight_of_a_source_scales_value_gradient_and_loss_weight() -> None:
    def weighed(weight: float) -> tuple[Terms, Tensor]:
        batch = packed([[-1.0, -2.5]], [1.0], [[-1.1, -2.4]], [[-1.5, -0.5]], weights=[weight])
        return graded(PRESETS["ftis"], batch)

    (whole, whole_gradient), (quarter, quarter_gradient) = weighed(1.0), weighed(0.25)
    assert whole_gradient.all() and whole.loss_weight.all()
    assert torch.allclose(quarter.value, whole.value / 4)
    assert torch.allclose(quarter_gradient, whole_gradient / 4)
    assert torch.allclose(quarter.loss_weight, whole.loss_weight / 4)


def test_half_precision_is_computed_in_float32() -> None:
    batch = packed([[-1.0, -1.0]], [1.0], generator=[[-1.0, -1.001]])
    halved = {"new": batch["new"].bfloat16(), "start": batch["start"].float(), "generator": batch["generator"].float()}
    terms, gradient = graded(PRESETS["ftis"], batch | halved)
    assert terms.value.dtype == terms.log_ratio.dtype == torch.float32
    assert terms.log_ratio[1].item() == pytest.approx(0.001, rel=1e-3)
    assert gradient.dtype == torch.bfloat16
