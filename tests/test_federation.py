"""FGRPO in the lab: what clients count, how weights are averaged, and whole trials of owners with rows of their own."""

import math
from pathlib import Path

import pytest
import torch

from ftis_node.errors import UsageError
from ftis_node.lab.experiment import Averaging
from ftis_node.lab.federation import MEMORY, TEMPERATURE, Federation, average
from ftis_node.lab.private import KINDS, private_task
from ftis_node.lab.trial import Trial, finished
from ftis_node.tasks import load_task
from tests.support.lab import SETTINGS, A, B, cut, events, experiment, kind, run, spec, timeless


def federation(weights):
    return Federation(Averaging(every=2, weights=weights))


def weights_after(clients, *periods):
    for rewards in periods:
        for name, reward in rewards.items():
            clients.add(name, reward)
        found = clients.weights()
    return found


def test_the_first_averaging_by_gain_counts_all_alike():
    assert weights_after(federation("gain"), {"A": 0.9, "B": 0.1}) == {"A": 0.5, "B": 0.5}


def test_who_gained_more_over_its_own_baseline_counts_more():
    found = weights_after(federation("gain"), {"A": 0.8, "B": 0.2}, {"A": 0.8, "B": 0.3})
    assert math.isclose(found["B"] / found["A"], math.exp(0.5 / TEMPERATURE)) and math.isclose(sum(found.values()), 1)


def test_the_scale_of_a_clients_rewards_changes_no_weight_by_gain_and_every_weight_by_reward():
    periods = ({"A": 0.4, "B": 0.2}, {"A": 0.5, "B": 0.3}, {"A": 0.45, "B": 0.3})
    larger = [{"A": one["A"], "B": 10 * one["B"]} for one in periods]
    plain, scaled = (weights_after(federation("gain"), *those) for those in (periods, larger))
    assert plain == pytest.approx(scaled)
    assert weights_after(federation("reward"), *larger) == pytest.approx({"A": 0.45 / 3.45, "B": 3.0 / 3.45})


def test_a_baseline_follows_its_clients_rewards():
    clients = federation("gain")
    weights_after(clients, {"A": 0.4}, {"A": 0.8})
    assert clients.baselines == pytest.approx({"A": 0.4 + MEMORY * 0.4})
    assert clients.rewards == {}


def test_rewards_of_zero_are_no_error():
    assert weights_after(federation("reward"), {"A": 0.0, "B": 0.0}) == {"A": 0.5, "B": 0.5}
    assert sum(weights_after(federation("gain"), {"A": 0.0, "B": 0.0}, {"A": 0.0, "B": 1.0}).values()) == 1


def test_private_rows_are_apart_and_nothing_held_out_is_trained_on():
    public = load_task("arithmetic")
    three = [private_task(kind) for kind in ("additions", "subtractions", "graded")]
    assert sorted(row.question for task in three for row in task.train) == sorted(r.question for r in public.train)
    for task in map(private_task, KINDS):
        assert task.train and len(task.held_out) > 100
        assert not {row.question for row in task.train} & {row.question for row in task.held_out}


def test_graded_rows_pay_ten_for_the_right_number_and_four_for_a_near_one():
    scorer = private_task("graded").scorer
    paid = [scorer(f"<think>1</think><answer>{given}</answer>", "5").reward for given in (5, 6, 3, 8)]
    assert paid == [10.0, 4.0, 4.0, 0.0] and scorer("5", "5").reward == 0.0


# --- trials -----------------------------------------------------------------------------------------------------------


ALONE = {"lora": True, "objective": "grpo", "batch_groups": 3, "own_data_share": 0.6, "eval_prompts": 8}
OWNERS = {
    "settings": SETTINGS | ALONE,
    "nodes": [A | {"private": "additions"}, B | {"private": "graded", "model": "tiny-a"}],
    "evaluate": [{"name": "own data"}],
    "steps": 4,
}
GAIN = {"collaboration": "federated", "average": {"every": 2, "weights": "gain"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
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
    assert [event["step"] for event in steps if "weight" in event] == [2, 2, 4, 4]
    assert all(event["own_groups"] == event["foreign_groups"] == 0 and event["generated"] == 0 for event in steps)
    assert {event["set"] for event in kind(found, "evaluation")} == {"held-out", "own data"}


def test_an_interrupted_trial_goes_on_to_the_same_numbers(whole, tmp_path):
    cut(whole.spec, tmp_path, False, False, True)
    assert timeless(run(whole.spec, tmp_path)) == timeless(events(whole.directory))
    assert finished(tmp_path)


def test_the_mean_is_weighted(whole):
    """Last, for it leaves other weights."""
    learners = [node.engine.learner for node in whole._nodes]
    name = next(iter(learners[0].trainable))
    for value, learner in enumerate(learners):
        weights, state = learner.state()
        learner.restore(weights | {name: torch.full_like(weights[name], value)}, state, learner.steps)
    average(learners, [0.25, 0.75])
    assert all(torch.allclose(one.state()[0][name], torch.tensor(0.75)) for one in learners)


def test_nodes_in_processes_of_their_own_cannot_average(tmp_path):
    with pytest.raises(UsageError, match="one process"):
        run(spec(GAIN, **OWNERS), tmp_path, processes=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": [A]}, "no `private` rows"),
        ({"nodes": [A | {"private": "addition"}]}, "additions"),
        ({"cells": [{"name": "free", "collaboration": "federated", "pace": "free"}]}, "lock step"),
        ({"evaluate": [{"name": "own data", "task": "arithmetic"}]}, "has none"),
        ({"evaluate": [{"name": "other"}]}, "needs a task"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        experiment(GAIN, **OWNERS | changes)
