"""Trials: the daemon's own code in simulated time, to the same numbers every time."""

import json
import shutil
from typing import Any

import pytest
from safetensors.torch import load_file

from ftis_node.errors import FtisError, UsageError
from ftis_node.lab import exchange
from ftis_node.lab.trial import finished
from ftis_node.store.checkpoints import Checkpoints
from ftis_node.swarm.admission import Reason, Rejection
from tests.support.lab import A, B, cut, kind, run, spec, timeless
from tests.support.learners import assert_same


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> list[dict[str, Any]]:
    """Three steps of A and B with F-TIS."""
    return run(spec(), tmp_path_factory.mktemp("shared"))


def test_in_lock_step_everybody_trains_on_half_own_and_half_foreign_groups(shared):
    for node in "AB":
        steps = kind(shared, "step", node)
        assert [e["step"] for e in steps] == [1, 2, 3]
        for e in steps:
            assert e["own_groups"] == 2
            assert e["foreign_groups"] == 2
            assert e["generated"] == 8 * e["step"]
            assert e["trained"] == 16 * e["step"]

        foreign = steps[-1]["foreign"]
        assert foreign["samples"] + foreign["idle"] == 8

        evaluations = kind(shared, "evaluation", node)
        assert [e["step"] for e in evaluations] == [0, 2, 3]
        for e in evaluations:
            assert e["prompts"] == 40
            assert e["set"] == "held-out"
    assert shared[-1]["event"] == "end"


def test_simulated_time_is_what_the_groups_cost(shared):
    times = [e["time"] for e in kind(shared, "step", "A")]
    assert times == pytest.approx([4, 8, 12]), "2 s to generate, 2 to train"


def test_time_may_be_what_the_tokens_cost(tmp_path):
    cell = {"collaboration": "alone", "pace": "free"}
    tokens = {"per": "token", "generate": 0.25, "train": 0.0}
    trial = spec(cell, nodes=[A], clock=tokens, steps=1)
    (step,) = kind(run(trial, tmp_path), "step")
    assert step["time"] % 0.25 == pytest.approx(0)
    assert 16 * 2 * 0.25 <= step["time"] <= 16 * 24 * 0.25, "16 completions of at most 24 tokens"


def test_only_a_warm_up_with_long_demonstrations_has_their_share_in_its_name():
    def warmed(task="ftis_node.lab.parity:two", **how):
        return spec(nodes=[{"name": "A", "warm": {"recipe": "tiny-a"} | how}], task=task)

    def facts(trial):
        return trial.facts()["members"][0]["warm"]

    none = warmed(long=0.0)
    assert "long" not in facts(warmed("arithmetic"))
    assert facts(none)["long"] == 0.0
    assert none.id != warmed(long=0.5).id


def test_a_trial_learns_a_task_of_the_lab(tmp_path):
    cell = {"collaboration": "alone"}
    trial = spec(cell, nodes=[A], task="ftis_node.lab.parity:two", steps=1)
    found = run(trial, tmp_path)
    assert [e["prompts"] for e in kind(found, "evaluation")] == [40, 40]
    (step,) = kind(found, "step")
    assert step["generated"] == 16
    assert step["own_groups"] == 4
    assert step["foreign_groups"] == 0
    assert step["foreign"] == {}


def test_a_clock_of_groups_names_trials_as_it_always_did():
    assert spec().facts()["clock"] == {"generate": 1.0, "train": 0.5}
    assert spec(clock={"per": "token"}).facts()["clock"]["per"] == "token"


@pytest.mark.slow
def test_processes_of_their_own_arrive_at_the_same_numbers(shared, tmp_path):
    assert timeless(run(spec(), tmp_path, processes=True)) == timeless(shared)


def weights(directory, node):
    """Of a node's newest checkpoint."""
    latest = Checkpoints(directory / "checkpoints" / node).latest()
    assert latest is not None
    return load_file(latest[0] / "trainable.safetensors")


@pytest.mark.parametrize(
    ("way", "objective"),
    [
        ("vertical", "gated"),
        pytest.param("horizontal", "hacpo", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_trial_goes_on_to_the_same_numbers_and_weights(tmp_path, way, objective):
    """With the gate's level."""
    cell = {"collaboration": way, "settings": {"objective": objective}}
    whole = spec(cell, steps=4, keep=True)
    straight = tmp_path / "straight"
    events = run(whole, straight)
    interrupted = tmp_path / "cut"
    cut(whole, interrupted, False, True, True)
    assert not finished(interrupted)
    with (interrupted / "events.jsonl").open("ab") as log:
        log.write(b'{"event": "step", "node": "A", "st')  # as a kill leaves it

    again = run(whole, interrupted)

    assert timeless(again) == timeless(events)
    assert finished(interrupted)
    for node in "AB":
        assert_same(weights(straight, node), weights(interrupted, node))


def test_horizontal_groups_are_made_of_everybodys_parts(tmp_path):
    found = run(spec({"collaboration": "horizontal"}, steps=2), tmp_path)
    mixed = []
    for e in kind(found, "step"):
        assert (e["own_groups"], e["foreign_groups"]) == (4, 4), "a part of each of the four groups, from both"
        assert e["generated"] == 8 * e["step"]
        assert e["trained"] == 16 * e["step"]
        for side in ("own", "foreign"):
            assert e[side]["samples"] + e[side]["idle"] == 8
        mixed.append(e["own"]["samples"] > 0 < e["foreign"]["samples"])
    assert any(mixed), "advantages are over the merged group, so both halves of it carry a signal"


def test_a_listener_generates_nothing_and_takes_everything(tmp_path):
    nodes = [A, B, {"name": "L", "model": "tiny-b"}]
    listens = {"node": {"L": {"own_share": 0.0}}}

    found = run(spec(listens, nodes=nodes, steps=2), tmp_path)

    last = kind(found, "step", "L")[-1]
    assert last["generated"] == 0
    assert last["own_groups"] == 0
    assert last["foreign_groups"] == 4
    assert kind(found, "step", "A")[-1]["own_groups"] == 2


def test_a_trial_may_end_when_all_of_its_fastest_nodes_are_there(tmp_path):
    free = {"pace": "free", "speed": {"B": 0.25}}
    found = run(spec(free, steps=30, target=0.05, until="target"), tmp_path)
    last = kind(found, "evaluation", "A")[-1]
    assert last["pass_at_1"] >= 0.05
    assert kind(found, "step") == [], "A is there before the first step"

    assert spec(free, until="target").facts()["until"] == 0.7
    assert "until" not in spec(free).facts()
    assert "until" not in spec(until="target").facts(), "in lock step all take their steps"


def test_other_problems_are_looked_at_before_and_after(tmp_path):
    also = [{"name": "harder", "task": "arithmetic-4", "prompts": 20}]

    found = run(spec(nodes=[A], evaluate=also, steps=1), tmp_path)

    evaluations = kind(found, "evaluation")
    assert [(e["set"], e["step"], e["prompts"]) for e in evaluations] == [
        ("held-out", 0, 40),
        ("harder", 0, 20),
        ("held-out", 1, 40),
        ("harder", 1, 20),
    ]


def test_a_packet_that_admission_refuses_ends_the_trial(tmp_path, monkeypatch):
    refusal = Rejection(Reason.MALFORMED, "it is not sound")
    monkeypatch.setattr(exchange, "admit_target", lambda *_: refusal)
    with pytest.raises(FtisError, match="was refused: malformed"):
        run(spec(steps=1), tmp_path)


def test_models_of_different_tokenizers_share_no_trial(tmp_path):
    other = {"name": "N", "model": "tiny-numbers"}
    trial = spec(nodes=[A, other], steps=1)
    with pytest.raises(UsageError, match=r"Node N shares no run.*tokenizer"):
        run(trial, tmp_path)


@pytest.mark.parametrize("script", ["random-reasoning", "lying"])
def test_a_scripted_partner_is_admitted_and_trains_nothing(tmp_path, script):
    partner = {"name": "X", "script": script}
    found = run(spec(nodes=[A, partner], steps=2), tmp_path)
    assert {e["node"] for e in found if "node" in e} == {"A"}
    last = kind(found, "step", "A")[-1]
    assert last["foreign_groups"] == 2
    divergence = last["foreign"]["divergence_mean"]
    if script == "lying":
        assert divergence < 0, "a lie looks near"
    else:
        assert divergence > 10


def test_a_seed_decides_the_prompts_of_horizontal_groups_too(tmp_path):
    outcomes = []
    for seed in (0, 1):
        place = tmp_path / str(seed)
        found = run(spec({"collaboration": "horizontal"}, seeds=[seed], steps=1), place)
        facts = json.loads((place / "trial.json").read_text())
        rewards = [e["own_reward"] for e in kind(found, "step")]
        outcomes.append((facts["rounds"], rewards))
    assert outcomes[0] != outcomes[1]


def test_a_checkpoint_that_is_gone_means_beginning_anew(tmp_path):
    made = spec(steps=2)
    cut(made, tmp_path, True)
    shutil.rmtree(tmp_path / "checkpoints" / "B")

    found = run(made, tmp_path)

    assert [e["step"] for e in kind(found, "step", "A")] == [1, 2]
