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
from tests.support.lab import SETTINGS, A, cut, events, kind, run, spec, timeless

ALONE = {"lora": True, "lora_rank": 4, "objective": "grpo", "batch_groups": 3}
OWNERS = {
    "settings": SETTINGS | ALONE | {"eval_prompts": 8},
    "nodes": [A | {"own_data": "arithmetic-4"}, {"name": "B", "model": "tiny-a", "own_data": "arithmetic"}],
    "evaluate": [{"name": "own data"}],
    "steps": 4,
}
GAIN = {"collaboration": "federated", "average": {"every": 2, "weights": "gain"}}


@pytest.mark.parametrize(
    ("weights", "periods", "expected"),
    [
        ("equal", [{"A": 0.9, "B": 0.1}], {"A": 0.5, "B": 0.5}),
        ("reward", [{"A": 0.9, "B": 0.3}], {"A": 0.75, "B": 0.25}),
        ("reward", [{"A": 0.0, "B": 0.0}], {"A": 0.5, "B": 0.5}),
        ("reward", [{"A": 0.5, "B": -1.0}], {"A": 1.0, "B": 0.0}),
        ("gain", [{"A": 0.9, "B": 0.1}], {"A": 0.5, "B": 0.5}),  # nobody has a past
        # Gains 0 and 1/4, whatever the scale: B counts e times as much.
        ("gain", [{"A": 0.8, "B": 0.2}, {"A": 0.8, "B": 0.25}], {"A": 1 / (1 + math.e), "B": math.e / (1 + math.e)}),
        ("gain", [{"A": 0.8, "B": 2.0}, {"A": 0.8, "B": 2.5}], {"A": 1 / (1 + math.e), "B": math.e / (1 + math.e)}),
        # A loses half: e⁻² beside 1.
        ("gain", [{"A": 0.4, "B": 0.2}, {"A": 0.2, "B": 0.2}], {"A": 1 / (1 + math.e**2), "B": 1 / (1 + math.e**-2)}),
        # The third time: A's baseline is 0.3, and 0.375 a quarter more.
        ("gain", [{"A": 0.2, "B": 1.0}, {"A": 0.4, "B": 1.0}, {"A": 0.375, "B": 1.0}], {"A": 1 / (1 + 1 / math.e)}),
        # From nothing, and of nothing: gains 1 and 0.
        ("gain", [{"A": 0.0, "B": 0.0}, {"A": 0.01, "B": 0.0}], {"A": 1 / (1 + math.e**-4)}),
        ("gain", [{"A": 0.3}, {"A": 0.1}], {"A": 1.0}),
    ],
)
def test_what_owners_count(weights, periods, expected):
    federation = Federation(Averaging(weights=weights))
    for rewards in periods:
        for name, reward in rewards.items():
            federation.add(name, reward - 0.1)  # of two steps, their mean counts
            federation.add(name, reward + 0.1)
        found = federation.weights()
    assert sum(found.values()) == pytest.approx(1)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_public_rows_of_word_problems_are_nobodys_own():
    private = [row.question for made in (owners.shop(), owners.share(), owners.compare()) for row in made.train]
    public = owners.public()
    assert len(set(private)) == 900 and not set(private) & {row.question for row in (*public.train, *public.held_out)}
    assert not {row.question for row in public.train} & {row.question for row in public.held_out}


# --- trials -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Trial:
    """A trial that has run to its end."""
    running = Trial(spec(GAIN, **OWNERS), tmp_path_factory.mktemp("whole"), Path())
    running.run()
    return running


def test_after_an_averaging_all_have_the_same_weights_and_their_own_moments(whole):
    (first, state), (second, other) = (node.engine.learner.state() for node in whole._nodes)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(state[name], other[name]) for name in state)
    found = events(whole.directory)
    steps = kind(found, "step")
    assert [event["step"] for event in steps if "share" in event] == [2, 2, 4, 4]
    assert all(event["own_groups"] == event["foreign_groups"] == event["generated"] == 0 for event in steps)
    assert {event["overall"]["samples"] + event["overall"]["idle"] for event in steps} == {3 * 4}, "on rows of its own"
    assert {event["set"] for event in kind(found, "evaluation")} == {"held-out", "own data"}


def test_an_interrupted_trial_goes_on_to_the_same_numbers_by_its_seed(whole, tmp_path):
    cut(whole.spec, tmp_path, False, False, True)
    assert timeless(run(whole.spec, tmp_path)) == timeless(events(whole.directory))
    assert finished(tmp_path)
    other = run(spec(GAIN, **OWNERS | {"seeds": [4], "steps": 1}), tmp_path / "other")
    assert kind(other, "step")[0]["loss"] != kind(events(tmp_path), "step")[0]["loss"]


def test_the_mean_is_weighted(whole):
    """Last, for it leaves other weights."""
    learners = {node.name: node.engine.learner for node in whole._nodes}
    name = next(iter(learners["A"].trainable))
    for value, learner in enumerate(learners.values()):
        weights, state = learner.state()
        learner.restore(weights | {name: torch.full_like(weights[name], value)}, state, learner.steps)
    average(learners, {"A": 0.25, "B": 0.75})
    assert all(torch.allclose(one.trainable[name], torch.tensor(0.75)) for one in learners.values())


def test_beside_own_rows_public_ones_are_shared(tmp_path):
    found = run(spec({"settings": {"objective": "ftis", "batch_groups": 4, "own_data_share": 0.5}}, **OWNERS), tmp_path)
    assert {(e["own_groups"], e["foreign_groups"], e["trained"] // e["step"]) for e in kind(found, "step")} == {
        (1, 1, 8)
    }
    assert all(e["own_data_reward"] is not None and "share" not in e for e in kind(found, "step"))


def test_what_cannot_be_averaged_is_refused(tmp_path):
    with pytest.raises(UsageError, match="one process"):
        run(spec(GAIN, **OWNERS), tmp_path / "a", processes=True)
    ranks = GAIN | {"node": {"B": {"lora_rank": 8}}}
    with pytest.raises(UsageError, match="weights of A and B have no mean") as caught:
        run(spec(ranks, **OWNERS), tmp_path / "b")
    assert "lora_rank" in caught.value.fix
