"""Single terms worked on paper: clip, truncation, filter, weight and precision."""

from __future__ import annotations

import math

import pytest
import torch

from ftis_node.objective import PRESETS, Terms
from tests.support.objective_batches import graded, packed


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
    def weighed(weight: float) -> tuple[Terms, torch.Tensor]:
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
