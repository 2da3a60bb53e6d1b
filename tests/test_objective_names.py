"""The objectives of other trainers against their formulas, written out in float64 sample by sample."""

import itertools
import math

import numpy as np
import pytest
import torch

from ftis_node.learner.batch import Batch, Part, TrainingGroup, imitated
from ftis_node.methods.choices import PART_NAMES
from ftis_node.objective import PRESETS
from ftis_node.packet import Completion
from tests.support.objective_batches import graded, packed, termed

LENGTHS = [3, 2, 4, 1]
ADVANTAGES = [1.2, -0.7, 0.4, -1.5]
OWN = [True, False, False, False]
WRITTEN = [3, 4, 3, 1]


def drawn(seed):
    """new (with gradient), start and generator log-probs of ten tokens, some of them far apart."""
    source = torch.Generator().manual_seed(seed)
    start = -torch.rand(10, generator=source, dtype=torch.float64) * 2 - 0.05

    def moved(distance):
        noise = torch.randn(10, generator=source, dtype=torch.float64)
        return (start + distance * noise).clamp(max=-0.01)

    new = moved(0.3)
    generator = moved(0.8)
    return new.requires_grad_(), start, generator


def terms_of(objective, new, start, generator, **more):
    return termed(
        objective,
        trainer_logprobs=new,
        start_logprobs=start,
        sampler_logprobs=generator,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        own=torch.tensor(OWN),
        lengths=torch.tensor(LENGTHS),
        **more,
    )


def samples(values):
    return list(values.split(LENGTHS))


def clipped(ratio, advantage, low, high):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def likelier(start, generator, written):
    return math.exp(float(start.mean()) - float(generator.sum()) / written)


def graft(new, start, generator, advantage, own, written):
    s = likelier(start, generator, written)
    weight = 0.0
    if own:
        weight = 1.0
    elif s > 0.8:
        weight = min(s, 1.0)
    return weight * clipped((new - start).exp(), advantage, 0.2, 0.28).sum()


def hacpo(new, start, generator, advantage, own, written):
    s = likelier(start, generator, written)
    weight = 0.0
    if own:
        weight = 1.0
    elif 0.8 <= s <= 1:
        weight = s * s
    return weight * clipped((new - start).mean().exp(), advantage, 3e-4, 4e-4)


def gspo(new, start, generator, advantage, own, written):
    base = generator
    if own:  # nothing of its own is cut before something moved
        base = start
    return clipped((new - base).mean().exp(), advantage, 3e-4, 4e-4)


def cispo(new, start, generator, advantage, own, written):
    return ((new - generator).exp().clamp(max=5).detach() * advantage * new).sum()


def dapo(new, start, generator, advantage, own, written):
    return clipped((new - generator).exp(), advantage, 0.2, 0.28).sum()


FORMULAS = {formula.__name__: formula for formula in (graft, hacpo, gspo, cispo, dapo)}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", range(6))
def test_value_and_gradient_are_those_of_the_formula(name, seed):
    new, start, generator = drawn(seed)

    terms = terms_of(PRESETS[name], new, start, generator, written=torch.tensor(WRITTEN))
    terms.value.sum().backward()
    ours = new.grad
    new.grad = None

    parts = zip(
        samples(new),
        samples(start),
        samples(generator),
        ADVANTAGES,
        OWN,
        WRITTEN,
        strict=True,
    )
    expected = torch.stack([FORMULAS[name](*part) for part in parts])
    expected.sum().backward()
    torch.testing.assert_close(terms.value.detach(), expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours, new.grad, rtol=1e-9, atol=1e-12)


def test_grafts_weight_is_of_each_sides_own_tokens():
    """Three tokens here, two pieces there: s = e^(−1 + 1.5); then the floor, and one's own."""
    for claims, weight in (
        ([-1.0, -2.0], 1.0),
        ([-0.9, -0.9], math.exp(-0.1)),
        ([-0.5, -0.5], 0.0),
    ):
        batch = packed(
            [[-1.0] * 3],
            [1.0],
            generator=[claims],
            own=[False],
            chunks=[0, 0, 1],
            written=[2],
        )
        terms = termed(PRESETS["graft"], **batch)
        assert terms.value.item() == pytest.approx(3 * weight), claims


@pytest.mark.parametrize("name", ["graft", "hacpo"])
@pytest.mark.parametrize("count_end", [True, False])
def test_a_peer_with_the_same_policy_is_trusted_whole_with_the_end_and_without(name, count_end):
    """As the learner calls it: `written` counts the sampled end."""
    for length in (1, 2, 3, 50):
        policy = torch.linspace(-3.0, -0.1, length).tolist()
        batch = packed([policy], [1.0], ended=[True], own=[False], written=[length])
        terms = termed(PRESETS[name].replace(count_end=count_end), **batch)
        expected = length - (not count_end)
        if name == "hacpo":  # one ratio for the whole sample
            expected = min(expected, 1)
        assert terms.value.item() == pytest.approx(expected), length


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([0, 1, 1], [0, 0.1, 0]),
        ([0, 0], [0, 0]),
        ([0.2, 0.5], [0, 0.1]),
        ([1], [0.1]),
    ],
)
def test_sgt_takes_one_right_sample_of_a_foreign_group(rewards, advantages):
    assert imitated(rewards, 0.1) == advantages


def test_sgts_gradient_is_that_of_the_log_likelihood():
    def batch(source):
        made = []
        for length in (2, 3):
            ids = np.arange(length, dtype=np.uint32)
            claims = np.zeros(length, np.float32)
            made.append(Completion(ids, claims, True))
        group = TrainingGroup([1], [Part(source, made, [0.0, 1.0])])
        return Batch.of([group], PRESETS["sgt"]).computed

    [foreign] = batch("peer")
    assert not foreign.judged, "it was picked by its reward, so it says nothing of claims"
    assert (foreign.advantage, foreign.scale, foreign.tokens) == (0.1, 1.0, 3), "λ is the group's, not a sample's"
    assert [sample.advantage for sample in batch("own")] == [-1.0, 1.0], "own groups keep theirs: GRPO"

    step = packed(
        [[-1.0, -2.0, -0.5]],
        [foreign.advantage],
        generator=[[-6.0, -7.0, -5.5]],
        own=[False],
    )
    _, gradient = graded(PRESETS["sgt"], step)
    assert gradient.tolist() == pytest.approx([0.1 / 3] * 3)


def test_trust_combines_with_other_parts():
    new, start, generator = drawn(0)
    parts = ("importance", "ratio", "trust")
    for chosen in itertools.product(*(PART_NAMES[part] for part in parts)):
        objective = PRESETS["ftis"].replace(**dict(zip(parts, chosen, strict=True)))
        terms = terms_of(objective, new, start, generator)
        assert terms.value.isfinite().all(), objective
