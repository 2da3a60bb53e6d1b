"""A step is the paper's, whatever the micro-batches; it survives nonsense, and goes on after a restart bit for bit."""

import math
from dataclasses import replace

import pytest
import torch

from ftis_node.errors import FtisError
from ftis_node.policy.room import Room
from tests.support.learners import (
    BATCH,
    FOREIGN,
    LORA,
    OWN,
    POLICY,
    assert_close,
    assert_same,
    by_hand,
    changed,
    coarse,
    decoder_sizes,
    gradient_of,
    in_turns,
    learner,
    weights_of,
    with_claims,
)
from tests.support.objective_by_hand import RULES, loss_by_hand
from tests.support.small_models import tiny_policy, twin

# --- the step, written out by hand ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "policy", "turns"),
    [
        ("grpo", POLICY, False),
        ("ftis", LORA, False),
        ("ftis", POLICY, True),
        ("grpo", LORA, True),
    ],
    ids=["answers", "lora", "episodes", "lora of own episodes"],
)
def test_a_step_is_the_one_written_out_by_hand(objective, policy, turns):
    batch = [*OWN, *(changed(group, weight=0.7) for group in FOREIGN)]
    batch = [in_turns(group) for group in batch] if turns else batch
    clip = 0.05
    rate = 1e-3
    betas = (0.9, 0.95)
    decay = 0.1
    rule = RULES[objective] if objective != "ftis" else replace(RULES["ftis"], g=1.0)
    parts = {"threshold": rule.g}
    settings = {
        "gradient_clip": clip,
        "learning_rate": rate,
        "betas": betas,
        "weight_decay": decay,
    }
    subject = learner(policy, objective, parts, **settings, micro_batch_tokens=64)
    reference = twin(policy)
    trained = [p for p in reference.model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, rate, betas, weight_decay=decay)
    for step in (1, 2):
        before = weights_of(subject)
        with torch.no_grad():  # the two must not drift apart by rounding where Adam divides noise by noise
            for name, parameter in reference.model.named_parameters():
                if name in before:
                    parameter.copy_(before[name])
        reference.model.zero_grad()
        used = [group for group in batch if group.parts[0].source == "own" or not rule.own_only]
        loss, _ = loss_by_hand(rule, [by_hand(reference, group) for group in used], None)
        loss.backward()
        gradient = {name: p.grad for name, p in reference.model.named_parameters() if p.requires_grad}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values() if g is not None))

        report = subject.step(batch)

        assert report.skipped is None
        assert subject.steps == step
        assert set(report.diagnostics.sources) == {group.parts[0].source for group in used}
        assert report.loss == pytest.approx(float(loss.detach()), abs=1e-6)
        assert report.gradient_norm == pytest.approx(norm, rel=1e-4)
        assert norm > clip, "the clip is in force"
        assert_close(gradient_of(subject), {name: g * (clip / norm) for name, g in gradient.items() if g is not None})
        for name, parameter in reference.model.named_parameters():
            parameter.grad = gradient_of(subject).get(name)
        adam.step()
        moved = dict(reference.model.named_parameters())
        for name, weight in weights_of(subject).items():
            torch.testing.assert_close(weight, moved[name].detach(), atol=1e-6, rtol=1e-5)


def test_with_lora_only_the_lora_weights_move():
    subject = learner(LORA)
    before = {name: p.detach().clone() for name, p in subject.policy.model.named_parameters()}
    subject.step(BATCH)
    moved = {n for n, p in subject.policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(subject.trainable)
    assert all("lora_" in name for name in moved)


# --- what may not matter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 16, 40, 16_384])
def test_the_size_of_micro_batches_does_not_change_the_step(tokens):
    one = learner()
    other = learner()
    one.room = Room(10**6)
    other.room = Room(tokens)
    batch = [*BATCH, *map(in_turns, BATCH)]
    expected = one.step(batch)
    report = other.step(batch)
    assert report.loss == pytest.approx(expected.loss, abs=1e-6)
    assert report.tokens == expected.tokens
    assert_close(gradient_of(other), gradient_of(one), atol=2e-6)
    assert report.diagnostics.overall["loss_weight"] == pytest.approx(
        expected.diagnostics.overall["loss_weight"], rel=1e-4
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("budget", [16, 40])
def test_a_micro_batch_keeps_within_its_budget(budget, packed):
    """Padding counts: it is computed like any token."""
    subject = learner(replace(POLICY, packed=packed))
    other = learner()
    subject.room = Room(budget)
    sizes = decoder_sizes(subject)
    for one in (subject, other):
        one.step(BATCH)
    assert_close(gradient_of(subject), gradient_of(other), atol=2e-6)
    assert len(sizes) > 1
    assert max(sizes) <= budget
    uneven = [*OWN[:2], *FOREIGN[:2]]
    drawn = sum(len(c) - 1 for group in uneven for c in group.parts[0].completions)
    assert drawn + sum(len(g.prompt_ids) for g in uneven) <= sum(sizes)


def test_a_prompt_is_computed_once_for_its_whole_group():
    subject = learner(micro_batch_tokens=10**6)
    sizes = decoder_sizes(subject)
    subject.step(BATCH)
    uneven = [*OWN[:2], *FOREIGN[:2]]
    assert sizes == [sum(len(g.prompt_ids) + sum(len(c) - 1 for c in g.parts[0].completions) for g in uneven)]


# --- whose groups count, and how much -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [OWN[2:], []], ids=["no signal", "no groups"])
def test_a_batch_without_signal_moves_nothing_and_says_why(batch):
    subject = learner(weight_decay=0.5)
    subject.step(BATCH)  # momentum there is
    before = weights_of(subject)
    report = subject.step(batch)
    assert_same(weights_of(subject), before)
    assert "reward" in report.skipped
    assert report.tokens == 0
    assert report.loss == 0.0
    assert report.gradient_norm == 0.0
    assert subject.steps == 2


# --- nonsense -------------------------------------------------------------------------------------------------------


def spoilt(kind):
    if kind == "NaN log-prob":
        return with_claims(OWN[0], math.nan)
    return changed(OWN[0], rewards=[{"inf reward": math.inf, "NaN reward": math.nan}[kind], 0, 0, 1])


@pytest.mark.parametrize("kind", ["NaN log-prob", "inf reward", "NaN reward"])
def test_a_step_that_is_not_finite_leaves_weights_and_optimiser_alone(kind):
    subject = learner()
    spared = learner()
    for one in (subject, spared):
        one.step(OWN)
    before = weights_of(subject)
    report = subject.step([spoilt(kind), *OWN[1:]])
    assert "finite" in report.skipped
    assert_same(weights_of(subject), before)
    assert subject.steps == 2
    for one in (subject, spared):
        one.step(OWN[::-1])
    assert_same(weights_of(subject), weights_of(spared))


def test_broken_weights_are_reported_and_not_made_worse():
    subject = learner()
    with torch.no_grad():
        subject.trainable["model.norm.weight"][3] = math.nan
    before = weights_of(subject)
    report = subject.step(OWN)
    assert report.skipped is not None
    assert not math.isfinite(report.gradient_norm)
    assert all(torch.equal(p.nan_to_num(7.0), before[n].nan_to_num(7.0)) for n, p in subject.trainable.items())


# --- going on -------------------------------------------------------------------------------------------------------


def test_after_restore_training_goes_on_bit_for_bit():
    policy = coarse()
    original = learner(policy)
    original.step(OWN)
    weights, optimiser = original.state()
    original.step(BATCH)

    for _ in range(2):  # twice: what was saved is not used up
        resumed = learner(policy)
        for _ in range(2):  # whatever it did before is forgotten
            resumed.step(FOREIGN)
        resumed.restore(weights, optimiser, steps=1)
        assert resumed.step(BATCH).skipped is None
        assert resumed.steps == original.steps == 2
        assert_same(weights_of(resumed), weights_of(original))
        for mine, theirs in zip(resumed.state(), original.state(), strict=True):
            assert_same(mine, theirs)


def test_a_state_before_the_first_step_can_be_restored():
    fresh = learner()
    moved = learner()
    moved.step(OWN)
    moved.restore(*fresh.state(), steps=0)
    for subject in (fresh, moved):
        subject.step(BATCH)
    assert_same(weights_of(fresh), weights_of(moved))


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"lora": True},
    ],
    ids=str,
)
def test_another_models_checkpoint_is_refused_and_nothing_changes(other):
    policy = twin(POLICY)
    policy.model.half()
    subject = learner(policy)
    donor = learner(tiny_policy(vocab_size=32, **other))
    donor.step(OWN)
    before = weights_of(subject)
    weights, state = donor.state()
    with pytest.raises(FtisError, match="another model"):
        subject.restore(weights, state | {"loss scale": torch.tensor([64.0, 7.0])}, steps=1)
    assert_same(weights_of(subject), before)
    assert subject.loss_scale.value != 64
    assert subject.steps == 0
