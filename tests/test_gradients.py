"""Exact gradients by source add up to the step's, and say who pulls where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftis_node.lab.bias import source_gradients
from tests.support.learners import (
    FOREIGN,
    OWN,
    POLICY,
    assert_same,
    changed,
    gradient_of,
    learner,
    weights_of,
    with_claims,
)
from tests.support.small_models import twin

STRANGE = [with_claims(group, -1e-4) for group in FOREIGN]


@pytest.mark.parametrize("parts", [{}, {"threshold": 0.5, "divergence": "k1", "count_dropped": False}])
def test_the_sources_gradients_add_up_to_that_of_the_step(parts: dict[str, Any]) -> None:
    subject = learner(parts=parts)
    before = weights_of(subject)
    found = source_gradients(subject, [*OWN, *STRANGE])
    assert_same(weights_of(subject), before)
    assert set(found) == {"own", "peer"}
    report = subject.step([*OWN, *STRANGE])
    assert parts == {} or report.diagnostics.overall["filtered"] > 0
    taken = torch.cat([gradient.flatten() for gradient in gradient_of(subject).values()])
    torch.testing.assert_close(found["own"] + found["peer"], taken, atol=2e-6, rtol=1e-4)
    assert float(found["peer"].norm()) > 1e-3


def test_opposite_rewards_have_opposite_gradients() -> None:
    group = OWN[0]
    turned = changed(group, source="peer", rewards=[1 - reward for reward in group.parts[0].rewards], weight=0.5)
    against = source_gradients(learner(objective="nois"), [group, turned])
    torch.testing.assert_close(against["peer"], -against["own"] / 2, atol=1e-6, rtol=1e-4)


def test_nothing_to_learn_from_has_no_gradient() -> None:
    assert source_gradients(learner(), OWN[2:]) == {}


def test_in_float16_they_are_of_the_loss_and_not_of_its_scale() -> None:
    policy = twin(POLICY)
    policy.model.half()
    subject = learner(policy)
    found = source_gradients(subject, [*OWN, *FOREIGN])
    norm = subject.step([*OWN, *FOREIGN]).gradient_norm
    assert float((found["own"] + found["peer"]).norm()) == pytest.approx(norm, rel=1e-2)
