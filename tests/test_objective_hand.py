"""The loss of a whole step and its gradient, preset by preset, against the formulas one token at a time.

Nothing of the code is used on the other side: advantages, divergences, filter, gate and denominators are written out
again in plain Python from the paper's formulas, and float64 autograd differentiates one scalar after the other.
"""

import random
from dataclasses import replace

import pytest
import torch

from ftis_node.objective import PRESETS
from tests.support.objective_batches import packed, termed
from tests.support.objective_by_hand import CAP, RULES, Completion, Group, loss_by_hand


def random_step(seed, *, later):
    """Five groups of one's own and of others, near and far; the rewards of the last are all equal."""
    rng = random.Random(seed)
    groups = []
    for index in range(5):
        own = index % 2 == 0
        far = 0.05 if own else 2.5
        weight = 1.0 if own else 0.25
        size = rng.randint(3, 5)
        rewards = [1.0, 0.0, *rng.choices([0.0, 0.25, 1.0], k=size - 2)]
        if index == 4:
            rewards = [0.5] * size
        completions = []
        for _ in range(size):
            start = [rng.uniform(-8, -0.01) for _ in range(rng.randint(1, 7))]
            moved = start
            if later:
                moved = [x + rng.gauss(0, 0.2) for x in start]
            new = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in moved]
            spread = rng.choice([far, 2 * far])
            claimed = [min(0.0, x + rng.gauss(0, spread)) for x in start]
            completions.append(Completion(new, start, claimed, ended=rng.random() < 0.6))
        groups.append(Group(own, rewards, completions, weight))
    return groups


def loss_of_the_code(objective, groups, level):
    """The same as a learner works it out: groups of equal rewards have no terms and are counted all the same."""
    advantages = []
    completions = []
    of_groups = []  # the group of each
    for group in groups:
        found = objective.advantages(torch.tensor(group.rewards, dtype=torch.float64))
        if found.any():
            advantages += found.tolist()
            completions += group.completions
            of_groups += [group] * len(group.completions)
    batch = packed(
        [completion.start for completion in completions],
        advantages,
        generator=[completion.generator for completion in completions],
        ended=[completion.ended for completion in completions],
        own=[group.own for group in of_groups],
        weights=[group.weight for group in of_groups],
        gate=level,
    )
    new = [x for completion in completions for x in completion.new]
    batch["trainer_logprobs"] = torch.stack(new)
    terms = termed(objective, **batch)
    kept = terms.kept.tolist()

    def counted(completion):
        return len(completion.start) - (completion.ended and not objective.count_end)

    dropped = [completion for completion, stays in zip(completions, kept, strict=True) if not stays]
    everything = [completion for group in groups for completion in group.completions]
    divisor = objective.batch_divisor(
        groups=len(groups),
        samples=len(everything),
        tokens=sum(map(counted, everything)),
        dropped_samples=len(dropped),
        dropped_tokens=sum(map(counted, dropped)),
    )
    scales = [objective.sample_scale(len(group.completions)) for group in of_groups]
    weighed = torch.tensor(scales, dtype=torch.float64) * terms.value
    return -weighed.sum() / divisor, kept


def slopes(loss, groups):
    leaves = []
    for group in groups:
        for completion in group.completions:
            leaves += completion.new
    found = torch.autograd.grad(
        loss,
        leaves,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(map(float, found))


def agree(objective, rule, *, level, seeds, later=True):
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


def test_every_preset_has_a_rule():
    others = {"graft", "sgt", "hacpo", "gspo", "cispo", "dapo"}
    assert RULES.keys() == PRESETS.keys() - others, "test_objective_names has those of other trainers"


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_loss_and_gradient_of_a_step_are_those_of_the_formulas(name, later):
    rule = RULES[name]
    dropped = agree(PRESETS[name], rule, level=-4.0, seeds=6, later=later)
    assert (dropped > 0) == (rule.g is not None or rule.gate)


@pytest.mark.parametrize("name", ["vis", "ftis", "gated"])
@pytest.mark.parametrize("aggregation", ["sample", "token", "fixed"])
@pytest.mark.parametrize("count_end", [True, False], ids=["end", "no-end"])
@pytest.mark.parametrize("count_dropped", [True, False], ids=["all", "kept"])
def test_so_they_are_with_other_denominators(name, aggregation, count_end, count_dropped):
    denominators = {
        "aggregation": aggregation,
        "count_end": count_end,
        "count_dropped": count_dropped,
    }
    objective = PRESETS[name].replace(**denominators, divisor=CAP)
    agree(objective, replace(RULES[name], **denominators), level=-4.0, seeds=2)


ARITHMETIC = PRESETS["ftis"].replace(divergence="k1", reduction="sum", threshold=1.0)


def test_the_filter_of_the_arithmetic_task_goes_by_the_sum_of_k1():
    rule = replace(RULES["ftis"], kl="k1", mean=False, g=1.0)
    assert agree(ARITHMETIC, rule, level=None, seeds=6)


@pytest.mark.parametrize("level", [None, -3.5, -4.5])
def test_a_gate_and_a_filter_together_drop_what_either_drops(level):
    rule = replace(RULES["ftis"], gate=True)
    agree(PRESETS["ftis"].replace(gate=0.0), rule, level=level, seeds=4)


@pytest.mark.parametrize(
    ("advantage", "claimed", "kept"),
    [
        (-1.0, -1.0, False),
        (0.0, -1.0, False),
        (-1.0, -1.25, True),
        (0.5, 0.0, True),
    ],
)
def test_filter_drops_at_the_threshold_itself_and_never_what_has_a_positive_advantage(advantage, claimed, kept):
    batch = packed([[-2.0]], [advantage], generator=[[claimed]])
    assert termed(ARITHMETIC, **batch).kept.tolist() == [kept]
