"""Samples that no honest peer is likely to have written teach nothing; one's own, and failures, are never left out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ftis_node.learner import trust
from ftis_node.learner.trust import LENGTH, LIKELIHOOD, LONGER, NEAR_IMPOSSIBLE, distrusted, next_length
from ftis_node.packet import Completion
from tests.support.learners import FOREIGN, OWN, assert_close, changed, gradient_of, learner

RARE = NEAR_IMPOSSIBLE - 0.1
PLAIN = NEAR_IMPOSSIBLE + 0.1


def suspects(start, advantages, own, **how):
    found = distrusted(
        torch.tensor([logprob for sample in start for logprob in sample]),
        torch.tensor([len(sample) for sample in start]),
        torch.tensor(advantages),
        torch.tensor(own),
        **{"defences": (), "usual_length": None, **how},
    )
    return found.tolist()


def test_a_foreign_success_with_one_near_impossible_token_is_left_out():
    start = [[PLAIN, PLAIN], [PLAIN, RARE, 0.0], [RARE], [RARE]]
    advantages = [1.0, 1.0, -1.0, 1.0]
    own = [False, False, False, True]
    assert suspects(start, advantages, own, defences=(LIKELIHOOD,)) == [False, True, False, False]
    assert suspects(start, advantages, own) == [False] * 4


def test_a_foreign_success_of_more_than_twice_the_usual_length_is_left_out():
    start = [[0.0] * length for length in (10, 21, 20, 21, 21)]
    advantages = [1.0, 1.0, 1.0, -1.0, 1.0]
    own = [False, False, False, False, True]
    assert LONGER == 2.0
    found = suspects(start, advantages, own, defences=(LENGTH,), usual_length=10.0)
    assert found == [False, True, False, False, False]
    assert not any(suspects(start, advantages, own, defences=(LENGTH,))), "nothing is usual yet"


def test_the_usual_length_follows_ones_own_successes():
    assert next_length(None, []) is None
    assert next_length(None, [8, 12]) == 10.0
    assert next_length(10.0, []) == 10.0
    assert next_length(10.0, [20]) == pytest.approx(12.0)


@pytest.mark.parametrize("tokens", [2048, 64])
def test_what_is_left_out_weighs_nothing_and_stays_in_the_divisor(monkeypatch, tokens):
    monkeypatch.setattr(trust, "NEAR_IMPOSSIBLE", math.inf)
    careful = learner(defences=(LIKELIHOOD,), objective="tis", micro_batch_tokens=tokens)
    told = careful.step([*OWN, *FOREIGN]).diagnostics.sources
    careless = learner(objective="tis", micro_batch_tokens=tokens)
    careless.step([*OWN, *map(_successes_weigh_nothing, FOREIGN)])
    assert_close(gradient_of(careful), gradient_of(careless))
    assert told["peer"]["distrusted"] == 3
    assert told["own"]["distrusted"] == 0


def _successes_weigh_nothing(group):
    """The same group in two parts: failures as they are, successes without weight."""
    [part] = group.parts
    parts = []
    for reward in (0, 1):
        completions = [one for one, earned in zip(part.completions, part.rewards, strict=True) if earned == reward]
        if completions:
            rewards = [reward] * len(completions)
            parts.append(replace(part, completions=completions, rewards=rewards, weight=1.0 - reward))
    return replace(group, parts=parts)


def test_padding_is_noticed_after_one_step_and_also_after_a_restart():
    subject = learner(defences=(LENGTH,))
    subject.step(OWN)
    usual = subject.usual_length
    size = int(3 * usual)
    endless = Completion(np.full(size, 9, np.uint32), np.full(size, -3.0, np.float32), False)
    padded = changed(FOREIGN[0], completions=[endless, *FOREIGN[3].parts[0].completions[1:]])
    again = learner(defences=(LENGTH,))
    weights, state = subject.state()
    again.restore(weights, state, subject.steps)
    assert again.usual_length == usual
    for one in (subject, again):
        assert one.step([*OWN, padded]).diagnostics.sources["peer"]["distrusted"] == 1
