"""Samples whose reward is the mean of their group: no gradient, no success, and in the denominator unless dropped."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from ftis_node.learner.batch import Batch, after_both
from ftis_node.objective import PRESETS
from tests.support.learners import (
    FOREIGN,
    OWN,
    POLICY,
    TEMPERATURE,
    assert_close,
    by_hand,
    changed,
    gradient_of,
    learner,
)
from tests.support.objective_by_hand import CAP, RULES, loss_by_hand
from tests.support.small_models import plain_logprobs, twin

MIXED = [1.0, 0.5, 0.5, 0.0]


def partly_right(group, rewards, sure=()):
    """The group with these rewards; the completions at some places claim that every token was next to certain."""
    made = list(group.parts[0].completions)
    for place in sure:
        claims = np.full(len(made[place]), -1e-4, np.float32)
        made[place] = replace(made[place], logprobs=claims)
    return changed(group, completions=made, rewards=rewards)


BATCH = [
    partly_right(OWN[0], MIXED),
    partly_right(OWN[1], [0.0, 1.0, 0.5, 0.5], sure=(0, 2)),
    partly_right(FOREIGN[0], MIXED, sure=range(4)),
    partly_right(FOREIGN[1], [0.0, 0.5, 1.0, 0.5], sure=(1,)),
    OWN[2],
]


@pytest.mark.parametrize("aggregation", ["sample", "token", "fixed"])
@pytest.mark.parametrize("count_dropped", [True, False], ids=["all", "kept"])
@pytest.mark.parametrize("name", ["ftis", "gated", "ftis-author"])
def test_a_step_with_rewards_at_the_mean_is_the_one_by_hand(name, count_dropped, aggregation):
    rule = replace(RULES[name], count_dropped=count_dropped, aggregation=aggregation)
    parts = {"count_dropped": count_dropped, "aggregation": aggregation, "divisor": CAP}
    subject = learner(objective=name, parts=parts)
    subject.gate = -4.0
    reference = twin(POLICY)
    expected, kept = loss_by_hand(rule, [by_hand(reference, group) for group in BATCH], -4.0)
    expected.backward()
    assert subject.step(BATCH).loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    gradient = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    assert_close(gradient_of(subject), gradient)
    assert (False in kept) == (rule.g is not None or rule.gate)


def test_it_costs_no_forward_pass_where_the_denominator_does_not_ask_for_it():
    """Two of four are at the mean: they are computed only if what a filter drops leaves the denominator.

    One of a foreign group is computed also where it is evidence on claims, so that none is picked by its own reward.
    """
    group = changed(FOREIGN[0], rewards=MIXED)
    batch = Batch.of([group], PRESETS["ftis"])
    judged = [sample.advantage for sample in batch.computed if sample.judged]
    assert 0 in judged
    assert batch.idle["peer"] == 1
    group = changed(OWN[0], rewards=MIXED)
    for name, changes, computed in (
        ("ftis", {}, 2),
        ("ftis-author", {}, 4),
        ("ftis-author", {"threshold": None}, 2),
        ("gated", {}, 2),
        ("gated", {"count_dropped": False}, 4),
    ):
        batch = Batch.of([group], PRESETS[name].replace(**changes))
        assert len(batch.computed) == computed
        assert batch.idle["own"] == 4 - computed


def test_a_reward_at_the_mean_is_no_success_that_moves_the_gate():
    """0.3, 0.4 and 0.5 have in floating point a mean below 0.4: its sample has no advantage all the same."""
    assert sum([0.3, 0.4, 0.5]) / 3 < 0.4
    part = OWN[0].parts[0]

    def likelihood(completion):
        return float(plain_logprobs(POLICY, [OWN[0].prompt_ids], [completion.token_ids], TEMPERATURE).detach().mean())

    least, *_, most = sorted(part.completions, key=likelihood)
    subject = learner(objective="gated")
    subject.step([changed(OWN[0], completions=[least, least, most], rewards=[0.3, 0.4, 0.5])])
    assert subject.gate == pytest.approx(likelihood(most), abs=1e-5)


class Ordered(random.Random):
    """Gives one order."""

    def __init__(self, order):
        super().__init__(0)
        self.order = order

    def sample(self, population, k, *, counts=None):
        return list(self.order)


def test_evidence_on_claims_is_not_picked_by_its_own_reward():
    """Over all rewards of a group and all orders the bets pay 1 on average; over all of groups with a signal, more."""
    chances = {1.0: 0.1, 0.0: 0.9}
    pays = {1.0: 2.0, 0.0: 0.8 / 0.9}
    mean = 0.0
    naive = 0.0
    for rewards in itertools.product((0.0, 1.0), repeat=5):
        chance = math.prod(chances[one] for one in rewards)
        signal = len(set(rewards)) > 1
        if signal:
            naive += chance * math.prod(pays[one] for one in rewards)
        else:
            naive += chance
        for order in itertools.permutations(range(5)):
            judged = after_both(list(rewards), [True] * 5, Ordered(order))
            assert signal or not any(judged)
            won = math.prod(pays[one] for one in itertools.compress(rewards, judged))
            mean += chance * won / math.factorial(5)
    assert mean == pytest.approx(1.0, abs=1e-12)
    assert naive > 1.1
    judged = after_both([0.0, 1.0, 0.0, 0.0], [False, True, True, True], Ordered(range(4)))
    assert judged == [False, False, False, True], "a group of which nothing can be read is never computed"
    assert after_both([-2.0, -1.0, -2.0], [True] * 3, Ordered(range(3))) == [False] * 3, "nor one without a success"
