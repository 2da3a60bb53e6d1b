"""Each preset's loss and gradient against explicit loops of plain Python floats that share nothing with the code."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from ftis_node.objective import PRESETS, Objective, Terms
from tests.objective_batches import graded, packed

F_NOIS = PRESETS["nois"].replace(name="f-nois", threshold=1.0, divergence="k1", reduction="sum")
F_TIS_SUM = PRESETS["ftis"].replace(name="ftis-arithmetic", threshold=1.0, divergence="k1", reduction="sum")
F_VIS = PRESETS["grpo"].replace(name="f-vis", threshold=0.5, divergence="k1")
OBJECTIVES = [*PRESETS.values(), F_NOIS, F_TIS_SUM, F_VIS]


@dataclass
class Sample:
    new: list[float]
    start: list[float]
    generator: list[float]
    advantage: float
    weight: float = 1.0


@dataclass
class Expected:
    value: float
    gradient: list[float]
    kept: bool
    clipped: list[bool]


def by_hand(objective: Objective, sample: Sample) -> Expected:
    """Value, d value / d new, filter and clip: written from the paper's formulas, one token at a time."""
    length = len(sample.new)
    divergence = 0.0
    for start, generator in zip(sample.start, sample.generator, strict=True):
        d = max(-20.0, min(20.0, start - generator))
        divergence += -d if objective.divergence == "k1" else math.exp(-d) - 1 + d
    if objective.reduction == "mean":
        divergence /= length
    g = objective.threshold
    kept = not (g is not None and sample.advantage <= 0 and divergence >= g)

    value, gradient, clipped = 0.0, [], []
    for new, start, generator in zip(sample.new, sample.start, sample.generator, strict=True):
        if objective.importance == "vanilla":
            token_weight, ratio = 1.0, math.exp(max(-20.0, min(20.0, new - generator)))
        else:
            token_weight, ratio = 1.0, math.exp(new - start)
            if objective.importance == "truncated":
                token_weight = min(math.exp(max(-20.0, min(20.0, start - generator))), objective.truncation)
        clip = min(max(ratio, 1 - objective.epsilon), 1 + objective.epsilon)
        unclipped_is_smaller = ratio * sample.advantage <= clip * sample.advantage
        value += token_weight * min(ratio * sample.advantage, clip * sample.advantage)
        beyond = objective.importance == "vanilla" and abs(new - generator) > 20  # clamped: finite, no gradient
        slope = token_weight * ratio * sample.advantage if unclipped_is_smaller and not beyond else 0.0
        gradient.append(sample.weight * slope / length)
        clipped.append(not unclipped_is_smaller)
    if not kept:
        value, gradient = 0.0, [0.0] * length
    return Expected(sample.weight * value / length, gradient, kept, clipped)


def run(objective: Objective, samples: list[Sample]) -> tuple[Terms, torch.Tensor]:
    new, start, generator = ([getattr(sample, name) for sample in samples] for name in ("new", "start", "generator"))
    weights = torch.tensor([sample.weight for sample in samples], dtype=torch.float64)
    return graded(objective, packed(start, [s.advantage for s in samples], new, generator, weights=weights))


def random_samples(seed: int, *, inner_steps: bool) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for index in range(12):
        start = [rng.uniform(-6, -0.01) for _ in range(rng.randint(1, 9))]
        spread = rng.choice([0.0, 0.3, 2.0, 8.0])
        samples.append(
            Sample(
                new=[x + rng.gauss(0, 0.3) for x in start] if inner_steps else list(start),
                start=start,
                generator=[min(0.0, x + rng.gauss(0, spread)) for x in start],
                advantage=[rng.gauss(0, 1), -abs(rng.gauss(0, 1)), 0.0][index % 3],
                weight=rng.choice([1.0, 0.5, 0.0]),
            )
        )
    return samples


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
@pytest.mark.parametrize("inner_steps", [False, True], ids=["first", "later"])
def test_value_gradient_and_filter_are_those_of_the_formula(objective: Objective, inner_steps: bool) -> None:
    dropped = 0
    for seed in range(20):
        samples = random_samples(seed, inner_steps=inner_steps)
        terms, gradient = run(objective, samples)
        expected = [by_hand(objective, sample) for sample in samples]
        dropped += sum(not e.kept for e in expected)
        assert terms.kept.tolist() == [e.kept for e in expected]
        assert terms.clipped.tolist() == [flag for e in expected for flag in e.clipped]
        assert terms.value.tolist() == pytest.approx([e.value for e in expected], rel=1e-12, abs=1e-15)
        assert gradient.tolist() == pytest.approx([x for e in expected for x in e.gradient], rel=1e-12, abs=1e-15)
    assert (dropped > 0) == (objective.threshold is not None)


def test_one_token_worked_on_paper() -> None:
    # ρ = e^(−1+3) = 7.39 is cut to C = 2; R = e^0.1 = 1.105 is inside the clip; Â = 1.5.
    sample = Sample(new=[-0.9], start=[-1.0], generator=[-3.0], advantage=1.5)
    terms, gradient = run(PRESETS["ftis"], [sample])
    assert terms.value.item() == pytest.approx(2 * math.exp(0.1) * 1.5)
    assert gradient.item() == pytest.approx(2 * math.exp(0.1) * 1.5)
    assert (terms.truncated.tolist(), terms.clipped.tolist()) == ([True], [False])
    assert terms.loss_weight.item() == pytest.approx(1.5 * 2)
    # NoIS does not see ρ; GRPO clips it at 1.2 and has no gradient left.
    terms, gradient = run(PRESETS["nois"], [sample])
    assert gradient.item() == pytest.approx(math.exp(0.1) * 1.5)
    assert terms.loss_weight.item() == pytest.approx(1.5)
    terms, gradient = run(PRESETS["grpo"], [sample])
    assert terms.value.item() == pytest.approx(1.2 * 1.5)
    assert (gradient.item(), terms.clipped.tolist(), terms.truncated.tolist()) == (0.0, [True], [False])


def test_filter_drops_at_the_threshold_itself_and_never_what_has_a_positive_advantage() -> None:
    objective = PRESETS["ftis"].replace(divergence="k1", reduction="sum", threshold=1.0)
    for advantage, claimed, kept in [(-1.0, -1.0, False), (0.0, -1.0, False), (-1.0, -1.25, True), (0.5, 0.0, True)]:
        terms, _ = run(objective, [Sample([-2.0], [-2.0], [claimed], advantage)])
        assert terms.kept.tolist() == [kept], (advantage, claimed)


def test_weight_of_a_source_scales_value_gradient_and_loss_weight() -> None:
    (sample, *_) = random_samples(3, inner_steps=True)
    sample.advantage, sample.weight = 1.0, 1.0
    whole, whole_gradient = run(PRESETS["ftis"], [sample])
    sample.weight = 0.25
    quarter, quarter_gradient = run(PRESETS["ftis"], [sample])
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
