"""Exact gradients by source add up to the step's, and say who pulls where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftis_node.lab.gradients import gradient_shares, source_gradients
from tests.test_learner import BATCH, FOREIGN, OWN, assert_same, changed, gradient_of, learner, weights_of, with_claims

STRANGE = [with_claims(group, -1e-4) for group in FOREIGN]


@pytest.mark.parametrize("parts", [{}, {"threshold": 0.5, "divergence": "k1", "count_dropped": False}])
def test_the_sources_gradients_add_up_to_that_of_the_step(parts: dict[str, Any]) -> None:
    subject = learner(parts=parts)
    before = weights_of(subject)
    found = source_gradients(subject, [*OWN, *STRANGE])
    assert_same(weights_of(subject), before)
    assert set(found) == {"own", "peer"}
    report = subject.step([*OWN, *STRANGE])
    assert parts == {} or report.diagnostics["overall"]["filtered"] > 0
    taken = torch.cat([gradient.flatten() for gradient in gradient_of(subject).values()])
    torch.testing.assert_close(found["own"] + found["peer"], taken, atol=2e-6, rtol=1e-4)
    assert float(found["peer"].norm()) > 1e-3


def test_shares_add_up_to_one_and_opposites_have_a_cosine_of_minus_one() -> None:
    figures = gradient_shares(source_gradients(learner(objective="nois"), BATCH))
    assert sum(figure["share"] for figure in figures.values()) == pytest.approx(1, abs=1e-5)
    group = OWN[0]
    turned = changed(group, source="peer", rewards=[1 - reward for reward in group.parts[0].rewards], weight=0.5)
    against = gradient_shares(source_gradients(learner(objective="nois"), [group, turned]))
    assert against["peer"]["cosine"] == pytest.approx(-1, abs=1e-5)
    assert (against["own"]["share"], against["peer"]["share"]) == pytest.approx((2, -1), abs=1e-4)


def test_nothing_to_learn_from_has_no_shares() -> None:
    assert gradient_shares(source_gradients(learner(), OWN[2:])) == {}
