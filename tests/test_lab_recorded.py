"""A partner whose groups a model sampled before: what it gives, that trials learn from it, and files that are none."""

import json

import pytest

from ftis_node.errors import UsageError
from ftis_node.lab.scripts import Recorded, read_samples
from ftis_node.packet import decode
from ftis_node.worker.messages import Generate
from tests.support.lab import A, experiment, kind, opened, run, scripted_group, spec

RECORDED = {"name": "R", "model": "tiny-a", "script": "recorded"}
GROUP = 4


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """A file with one group of a scripted partner for each row of the task: half of each is right."""
    scripted, _ = scripted_group("padding low", group=GROUP)
    rows = scripted.engine.task.train
    made = scripted._generate(Generate(list(range(len(rows)))))
    lines = []
    for example, group in zip(rows, made.groups, strict=True):
        lines.append(json.dumps({"question": example.question, "packet": group.packet.hex()}) + "\n")
    file = tmp_path_factory.mktemp("recorded") / "samples.jsonl"
    file.write_text("".join(lines))
    return file


def trial(samples, **parts):
    nodes = [A, RECORDED | {"samples": str(samples)}]
    return spec(nodes=nodes, **parts)


def test_a_node_trains_on_recorded_groups_and_the_partner_never_steps(samples, tmp_path):
    whole = trial(samples)
    assert [member.name for member in whole.learners] == ["A"], "whose steps are counted"
    found = run(whole, tmp_path)
    steps = kind(found, "step")
    assert {event["node"] for event in steps} == {"A"}
    assert all(event["foreign_groups"] == 2 for event in steps)
    assert all(event["foreign"]["samples"] for event in steps)


def test_what_is_given_is_what_was_recorded_word_for_word_and_scored_anew(samples):
    partner = Recorded(str(samples), 0)
    partner.engine = opened("tiny-a", (("group", GROUP),))
    made = partner._generate(Generate([5, 3], round=7, slots=(2, 4)))
    rows = partner.engine.task.train
    for row, slot, group in zip([5, 3], [2, 4], made.groups, strict=True):
        given = decode(group.packet)
        recorded = decode(read_samples(str(samples))[rows[row].question][0])
        assert (given.round, given.slot) == (7, slot)
        assert given.token_ids.tolist() == recorded.token_ids.tolist()
        assert given.logprobs.tolist() == recorded.logprobs.tolist()
        assert group.rewards == partner.engine.rewards(row, group.packet)


def test_a_trial_is_another_with_other_samples_and_what_it_was_without(samples, tmp_path):
    copied = tmp_path / "copy.jsonl"
    copied.write_text(samples.read_text())
    ids = [trial(samples).id, trial(copied).id]
    copied.write_text("".join(samples.read_text().splitlines(keepends=True)[1:]))
    ids.append(trial(copied).id)
    assert len(set(ids)) == 3
    assert "samples" not in json.dumps(spec().facts())


def test_a_row_without_a_group_is_told(samples, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text(samples.read_text().splitlines(keepends=True)[0])
    with pytest.raises(UsageError, match="has no group for the row"):
        run(trial(few), tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"question": "1+1="}', '{"question": "1", "packet": "xy"}', "\xff"])
def test_a_file_that_has_no_groups_is_refused(text, tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match="has no recorded groups"):
        read_samples(str(file))


@pytest.mark.parametrize("node", [RECORDED, A | {"samples": "x.jsonl"}, RECORDED | {"script": "lying", "samples": "x"}])
def test_samples_and_their_script_belong_together(node):
    with pytest.raises(ValueError, match="`samples` belongs"):
        experiment(nodes=[A, node | {"name": "R"}])
