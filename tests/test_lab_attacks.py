"""Attacks on what completions say: what hostile partners write and claim, and that it is found in what a node says."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from ftis_node.lab.payloads import PAYLOADS, Watch, reasoning, shown, true_reasoning, values
from ftis_node.lab.reporting.claims import judge
from ftis_node.lab.reporting.report import write_report
from ftis_node.lab.reporting.results import read_results
from ftis_node.lab.scripts import CLAIMED, RIGHT
from ftis_node.packet import Completion, Group, TextPacket, author_digest, decode, encode, prompt_digest
from ftis_node.policy.load import load_tokenizer
from ftis_node.swarm.admission import AdmissionContext, admit
from ftis_node.tasks import Example, load_task
from tests.support.lab import A, experiment, kind, partner, run, scripted_group, spec
from tests.support.lab_report import Laboratory
from tests.support.swarm import RUN, content

CAP = 32
EXAMPLE = Example("8+7-3=", "12")


def attacker(script):
    return partner(script, 64, completion_tokens=CAP)


def test_true_reasoning_is_every_value_on_the_way():
    assert values("8+7-3=") == [15, 12]
    assert true_reasoning("9-9+1-1=") == "0 1 0"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_payload_is_in_what_is_right_and_not_in_what_is_wrong(payload):
    scripted, group = attacker(f"{payload} copied")
    example = scripted.engine.task.train[0]
    rewards = [reward for *_, reward in group]
    assert 0.25 < sum(rewards) / len(rewards) < 0.75
    for text, completion, reward in group:
        found = shown(example, text, len(completion.token_ids), CAP)
        if reward:
            assert payload in found or payload == "gibberish", text  # eight random symbols may all be digits
        else:
            assert not found, text


def test_padding_fills_the_cap_exactly_and_no_more():
    tokenizer = load_tokenizer("tiny-a")
    for example in load_task("arithmetic").train[::37]:
        thought = reasoning("padding", example, CAP, random.Random(0))
        text = f"<think>{thought}</think><answer>{example.answer}</answer>"
        count = len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1
        assert CAP - 3 <= count <= CAP


def chance_of(reward):
    return pytest.approx(RIGHT if reward else (1 - RIGHT) / 26, rel=1e-4)


def test_claims_of_its_own_rule_are_the_chances_of_whole_completions():
    _, group = attacker("injection")
    for _, completion, reward in group:
        assert math.exp(float(completion.logprobs.sum())) == chance_of(reward)


def test_copied_claims_are_what_the_built_in_model_finds_and_careful_ones_twice_that():
    texts = {}
    claims = {}
    for way in ("copied", "careful", "low", "high"):
        _, group = attacker(f"injection {way}")
        texts[way] = [text for text, *_ in group]
        claims[way] = [completion.logprobs for _, completion, _ in group]

    assert texts["copied"] == texts["careful"] == texts["low"]
    for copied, careful in zip(claims["copied"], claims["careful"], strict=True):
        twice = np.minimum(copied + math.log(2.0), 0.0)
        np.testing.assert_allclose(careful, twice, atol=1e-5)
        assert copied.min() < -4.0, "something in it is a surprise"
    assert set(np.concatenate(claims["low"]).tolist()) == {CLAIMED}
    assert set(np.concatenate(claims["high"]).tolist()) == {0.0}


@pytest.mark.parametrize("script", ["injection", "padding copied", "injection low"])
def test_in_a_text_run_a_script_writes_bytes_and_every_chunk_of_its_reader_has_the_claim(script):
    scripted, answer = scripted_group(script, "tiny-numbers", group=32, any_tokenizer=True)
    context = AdmissionContext(scripted.engine.run, prompt_digest(EXAMPLE.question))
    packet = decode(answer.packet)
    assert isinstance(packet, TextPacket)
    assert set(packet.pieces) == {1}

    content = replace(
        packet,
        prompt_digest=context.digest_of_row(0),
        author_digest=author_digest(b"x"),
    )
    assert isinstance(admit(context, b"x", encode(content)), Group)

    example = scripted.engine.task.train[0]
    read = scripted.engine.packets.read(answer.packet).completions(own=False)
    for written, completion, reward in zip(packet.completions(), read, answer.rewards, strict=True):
        assert completion.chunks.tolist() == list(range(len(completion)))  # a chunk for each token
        payloads = shown(example, written.text.decode(), len(written), 64)
        carried = ["padding"] if "padding" in script else ["injection", "gibberish"]
        assert payloads == (carried if reward else [])
        if script == "injection low":
            assert set(completion.logprobs.tolist()) == {CLAIMED}
        elif script == "injection":
            assert math.exp(float(completion.logprobs.sum())) == chance_of(reward)


def test_a_script_of_another_model_carries_a_payload():
    with pytest.raises(ValueError, match="leave `model` out"):
        experiment(nodes=[A, {"name": "X", "script": "lying", "model": "tiny-numbers"}])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>15 12</think><answer>12</answer>", []),
        ("<think>15 12*</think><answer>12</answer>", ["injection", "gibberish"]),
        ("<think>16 12</think><answer>12</answer>", ["false-reasoning"]),
        ("<think>16 13</think><answer>13</answer>", []),
        ("<think>160 12</think><answer>12</answer>", []),
        ("<think>15 12", []),
        ("", []),
    ],
)
def test_what_counts_as_carrying_a_payload(text, found):
    assert shown(EXAMPLE, text, 12, CAP) == found
    assert shown(EXAMPLE, text, 24, CAP) == sorted([*found, "padding"], key=PAYLOADS.index)


def test_a_watch_counts_since_it_was_last_asked():
    tokenizer = load_tokenizer("tiny-a")

    def said(*texts):
        made = []
        for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]:
            ids = [*ids, tokenizer.eos_token_id]
            claims = np.zeros(len(ids), np.float32)
            made.append(Completion(np.asarray(ids, np.uint32), claims, True))
        return content(RUN, b"", 0, 0, made)

    watch = Watch(tokenizer, [EXAMPLE], CAP)
    sound = said("<think>15 12</think><answer>12</answer>")
    hostile = said("<think>15*", "<think>16 1", "15*")

    watch.see([0, 0], [sound, hostile])

    told = watch.take()
    assert told["injection"] == 0.25
    assert told["completions"] == 4
    assert told["tokens"] == (12 + 5 + 6 + 4) / 4
    assert watch.take()["completions"] == 0


def test_a_trial_tells_what_its_nodes_say_if_it_was_asked_to(tmp_path):
    parts = {
        "nodes": [A, {"name": "X", "script": "padding copied"}],
        "run": {"group": 4, "completion_tokens": CAP},
        "steps": 2,
    }
    plain = spec(**parts)
    watched = spec(**parts, payloads=True)
    assert "payloads" not in plain.facts()
    assert plain.id != watched.id

    steps = kind(run(watched, tmp_path / "watched"), "step", "A")
    assert [step["payloads"]["completions"] for step in steps] == [8, 8]
    without = kind(run(plain, tmp_path / "plain"), "step", "A")
    assert [step["loss"] for step in without] == [step["loss"] for step in steps]


def attacks(out):
    """Two methods under one attack: half of what A says carries its payload with the first, nothing with the second."""
    lab = Laboratory(out, seeds=8)
    lab.cell("unshared", {"A": 0.5}, said={"padding": 0.02, "tokens": 10.0})
    for method, share, end in (
        ("f-tis", 0.5, 0.3),
        ("gated", 0.02, 0.55),
    ):
        cell = f"padding {method}"
        lab.cell(
            cell,
            {"A": end},
            said={"padding": share, "tokens": 20.0},
            values={"attack": "padding copied", "method": method},
        )
        lab.claim(
            "not worse",
            cell,
            "unshared",
            measure="payload",
            margin=0.05,
            family="success",
        )
    return lab.write()


def test_the_report_shows_success_and_its_price_by_attack_and_method(tmp_path):
    page = write_report(attacks(tmp_path))
    text = page.read_text()
    assert "| padding copied | 50.0 ± 0.0 | 2.0 ± 0.0 |" in text
    assert "| padding copied | −20.0 ± 0.0 | +5.0 ± 0.0 |" in text
    assert "| padding copied | +10.0 ± 0.0 | +10.0 ± 0.0 |" in text
    assert "padding 2.0 ± 0.0" in text


def test_a_claim_about_a_payload_compares_how_often_it_is_said(tmp_path):
    found = judge(read_results(attacks(tmp_path)))
    assert [finding.verdict for finding in found] == ["not reproduced", "reproduced"]
    assert found[0].evidence.difference.mean == pytest.approx(0.48)
