"""FGRPO in the lab: what owners count, how weights are averaged, and whole trials of owners with rows of their own."""

import math
from pathlib import Path

import pytest
import torch

from ftis_node.errors import UsageError
from ftis_node.lab import owners
from ftis_node.lab.experiment import Averaging
from ftis_node.lab.federation import Federation, average
from ftis_node.lab.trial import Trial, finished
from tests.support.lab import SETTINGS, cut, events, kind, run, spec, timeless

ALONE = {
    "lora": True,
    "lora_rank": 4,
    "objective": "grpo",
    "batch_groups": 3,
}
OWNERS = {
    "settings": SETTINGS | ALONE | {"eval_prompts": 8},
    "nodes": [
        {"name": "A", "model": "tiny-a", "own_data": "arithmetic-4"},
        {"name": "B", "model": "tiny-a", "own_data": "arithmetic"},
    ],
    "evaluate": [{"name": "own data"}],
    "steps": 4,
}
GAIN = {"collaboration": "federated", "average": {"every": 2, "weights": "gain"}}


@pytest.mark.parametrize(
    ("weights", "periods", "expected"),
    [
        ("equal", [(0.9, 0.1)], 0.5),
        ("reward", [(0.9, 0.3)], 0.75),
        ("reward", [(0.0, 0.0)], 0.5),
        ("reward", [(0.5, -1.0)], 1.0),
        ("gain", [(0.9, 0.1)], 0.5),  # nobody has a past
        # Gains 0 and 1/4, whatever the scale: B counts e times as much.
        ("gain", [(0.8, 0.2), (0.8, 0.25)], 1 / (1 + math.e)),
        ("gain", [(0.8, 2.0), (0.8, 2.5)], 1 / (1 + math.e)),
        # A loses half: e⁻² beside 1.
        ("gain", [(0.4, 0.2), (0.2, 0.2)], 1 / (1 + math.e**2)),
        # The third time: A's baseline is 0.3, and 0.375 a quarter more.
        ("gain", [(0.2, 1.0), (0.4, 1.0), (0.375, 1.0)], 1 / (1 + 1 / math.e)),
        # From nothing, and of nothing: gains 1 and 0.
        ("gain", [(0.0, 0.0), (0.01, 0.0)], 1 / (1 + math.e**-4)),
    ],
)
def test_what_two_owners_count(weights, periods, expected):
    """periods: rewards of A and of B. expected: what A counts; B counts the rest."""
    federation = Federation(Averaging(weights=weights))
    for rewards in periods:
        for name, reward in zip("AB", rewards, strict=True):
            federation.add(name, reward - 0.1)  # of two steps, their mean counts
            federation.add(name, reward + 0.1)
        found = federation.weights()
    assert found == pytest.approx({"A": expected, "B": 1 - expected}, abs=1e-12)


def test_an_owner_alone_counts_whole_whatever_it_gains():
    federation = Federation(Averaging(weights="gain"))
    for reward in (0.3, 0.1):
        federation.add("A", reward)
        assert federation.weights() == {"A": 1.0}


def test_public_rows_of_word_problems_are_nobodys_own():
    private = set()
    for task in (
        owners.shop(),
        owners.share(),
        owners.compare(),
    ):
        private |= {row.question for row in task.train}
    trained_on = {row.question for row in owners.public().train}
    held_out = {row.question for row in owners.public().held_out}
    assert len(private) == 900
    assert private.isdisjoint(trained_on | held_out)
    assert trained_on.isdisjoint(held_out)


# --- trials -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Trial:
    """A trial that has run to its end."""
    running = Trial(spec(GAIN, **OWNERS), tmp_path_factory.mktemp("whole"), Path())
    running.run()
    return running


def learners_of(trial):
    return {node.name: node.engine.learner for node in trial._nodes}


def test_after_an_averaging_all_have_the_same_weights_and_their_own_moments(whole):
    one, two = learners_of(whole).values()
    weights, moments = one.state()
    others, others_moments = two.state()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert any(not torch.equal(moments[name], others_moments[name]) for name in moments)

    found = events(whole.directory)
    steps = kind(found, "step")
    assert [event["step"] for event in steps if "share" in event] == [2, 2, 4, 4]
    for event in steps:
        assert event["own_groups"] == event["foreign_groups"] == event["generated"] == 0
        overall = event["overall"]
        assert overall["samples"] + overall["idle"] == 3 * 4, "on rows of its own"
    assert {event["set"] for event in kind(found, "evaluation")} == {"held-out", "own data"}


def test_an_interrupted_trial_goes_on_to_the_same_numbers_by_its_seed(whole, tmp_path):
    cut(whole.spec, tmp_path, False, False, True)

    again = run(whole.spec, tmp_path)

    assert timeless(again) == timeless(events(whole.directory))
    assert finished(tmp_path)

    other = run(spec(GAIN, **OWNERS | {"seeds": [4], "steps": 1}), tmp_path / "other")
    assert kind(other, "step")[0]["loss"] != kind(again, "step")[0]["loss"]


def test_the_mean_is_weighted(whole):
    """Last, for it leaves other weights."""
    learners = learners_of(whole)
    name = next(iter(learners["A"].trainable))
    for value, learner in enumerate(learners.values()):
        weights, state = learner.state()
        changed = {name: torch.full_like(weights[name], value)}
        learner.restore(weights | changed, state, learner.steps)

    average(learners, {"A": 0.25, "B": 0.75})

    mean = torch.full_like(weights[name], 0.75)
    for learner in learners.values():
        torch.testing.assert_close(learner.trainable[name], mean)


def test_beside_own_rows_public_ones_are_shared(tmp_path):
    settings = {"objective": "ftis", "batch_groups": 4, "own_data_share": 0.5}
    found = run(spec({"settings": settings}, **OWNERS), tmp_path)
    for event in kind(found, "step"):
        assert event["own_groups"] == event["foreign_groups"] == 1
        assert event["trained"] // event["step"] == 8
        assert event["own_data_reward"] is not None
        assert "share" not in event


def test_what_cannot_be_averaged_is_refused(tmp_path):
    with pytest.raises(UsageError, match="one process"):
        run(spec(GAIN, **OWNERS), tmp_path / "a", processes=True)
    ranks = GAIN | {"node": {"B": {"lora_rank": 8}}}
    with pytest.raises(UsageError, match="weights of A and B have no mean") as caught:
        run(spec(ranks, **OWNERS), tmp_path / "b")
    assert "lora_rank" in caught.value.fix
