"""Exact gradients by source add up to the step's, and say who pulls where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftis_node.lab.bias import source_gradients
from tests.support import learners
from tests.support.small_models import twin

STRANGE = [learners.with_claims(group, -1e-4) for group in learners.FOREIGN]


@pytest.mark.parametrize("parts", [{}, {"threshold": 0.5, "divergence": "k1", "count_dropped": False}])
def test_the_sources_gradients_add_up_to_that_of_the_step(parts: dict[str, Any]) -> None:
    subject = learners.learner(parts=parts)
    before = learners.weights_of(subject)
    found = source_gradients(subject, [*learners.OWN, *STRANGE])
    learners.assert_same(learners.weights_of(subject), before)
    assert set(found) == {"own", "peer"}
    report = subject.step([*learners.OWN, *STRANGE])
    assert parts == {} or report.diagnostics.overall["filtered"] > 0
    taken = torch.cat([gradient.flatten() for gradient in learners.gradient_of(subject).values()])
    torch.testing.assert_close(found["own"] + found["peer"], taken, atol=2e-6, rtol=1e-4)
    assert float(found["peer"].norm()) > 1e-3


def test_opposite_rewards_have_opposite_gradients() -> None:
    group = learners.OWN[0]
    turned = learners.changed(
        group, source="peer", rewards=[1 - reward for reward in group.parts[0].rewards], weight=0.5
    )
    against = source_gradients(learners.learner(objective="nois"), [group, turned])
    torch.testing.assert_close(against["peer"], -against["own"] / 2, atol=1e-6, rtol=1e-4)


def test_nothing_to_learn_from_has_no_gradient() -> None:
    assert source_gradients(learners.learner(), learners.OWN[2:]) == {}


def test_in_float16_they_are_of_the_loss_and_not_of_its_scale() -> None:
    policy = twin(learners.POLICY)
    policy.model.half()
    subject = learners.learner(policy)
    found = source_gradients(subject, [*learners.OWN, *learners.FOREIGN])
    norm = subject.step([*learners.OWN, *learners.FOREIGN]).gradient_norm
    assert float((found["own"] + found["peer"]).norm()) == pytest.approx(norm, rel=1e-2)
