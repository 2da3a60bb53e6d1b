"""The engine on a built-in model and the arithmetic task: what the compute process can do, in this process."""

import inspect
import math

import numpy as np
import psutil
import pytest
import torch
from msgspec.structs import replace

from ftis_node.config.settings import OBJECTIVE_PARTS, Settings
from ftis_node.errors import UsageError
from ftis_node.host import allocator
from ftis_node.learner import choose_objective
from ftis_node.methods import METHODS
from ftis_node.objective import PRESETS
from ftis_node.packet import Completion, author_digest, decode, prompt_digest
from ftis_node.tasks import load_task
from ftis_node.tokenizer.asking import prompt_ids
from ftis_node.worker import engine as engine_module
from ftis_node.worker import messages
from ftis_node.worker.engine import Engine
from ftis_node.worker.formats import TEXT_LETTERS, packets_of
from tests.support.small_models import arithmetic_run as run_of
from tests.support.small_models import arithmetic_settings as settings
from tests.support.small_models import batch_of, completions_of, opened_engine, packed

TASK = load_task("arithmetic")


def uneven(engine, rows):
    """Groups generated now, with rewards that differ."""
    return batch_of(rows, engine.generate(rows).groups, uneven=True)


def tokens(generated):
    return [group.packet for group in generated.groups]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """For tests that do not train it."""
    return opened_engine()


def test_loading_tells_what_a_run_must_know():
    facts = Engine().load(settings(), "arithmetic")
    expected = {
        "task": "arithmetic",
        "data": TASK.data,
        "reward": "integer",
        "rows": len(TASK.train),
        "held_out": len(TASK.held_out),
        "vocabulary": 26,
        "eos": [1],
        "kind": "full",
        "device": "cpu",
    }
    assert {name: getattr(facts, name) for name in expected} == expected
    assert facts.parameters > 10_000
    assert run_of(facts).task == "arithmetic"


def test_groups_can_be_read_by_people(engine):
    generated = engine.generate([3]).groups[0]
    completions = completions_of(generated)
    (text,) = engine.texts([messages.ReadableGroup(3, generated.packet, 7)])
    assert text.question == TASK.train[3].question
    assert text.answer == TASK.train[3].answer
    tokenizer = engine.policy.tokenizer
    expected = [tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=True) for one in completions]
    assert len(expected) == 8
    assert text.completions == expected[:7]
    ids = np.full(5000, completions[0].token_ids[0], dtype="<u4")
    packet = packed(engine, [Completion(ids, np.zeros(5000, "f4"), True)])
    (long,) = engine.texts([messages.ReadableGroup(3, packet, 1)])
    (cut,) = long.completions
    assert cut.endswith("…")
    assert len(cut) <= TEXT_LETTERS + 1


def test_every_answer_arrives_as_it_was_sent(engine):
    generated = engine.generate([0, 1])
    packet = generated.groups[0].packet
    batch = batch_of([0, 1], generated.groups, uneven=True)
    answers = {
        messages.Load: Engine().load(settings(), "arithmetic"),
        messages.Generate: generated,
        messages.ScoreGroup: engine.score(0, packet),
        messages.Texts: engine.texts([messages.ReadableGroup(0, packet, 8)]),
        messages.Step: opened_engine().step(batch),
        messages.Evaluate: engine.evaluate(),
        messages.Watch: engine.watch(),
    }
    for request, answer in answers.items():
        assert messages.decoded(messages.encoded(answer), request.answer()) == answer


def test_each_request_is_a_method_of_the_engine_with_the_same_arguments():
    for op, request in messages.REQUESTS.items():
        fields = dict.fromkeys(request.__struct_fields__)
        signature = inspect.signature(getattr(Engine, op))
        assert signature.bind(None, **fields), op
        if op != "load":  # it passes the further ones on to the message
            assert [*signature.parameters] == ["self", *fields], op


def test_generated_groups_hold_whole_completions_of_their_rows(engine):
    rows = [5, 900, 5]
    groups = engine.generate(rows, bytes(38), 7, 3).groups
    packets = [decode(group.packet) for group in groups]
    for slot, packet in enumerate(packets):
        assert packet.round == 7
        assert packet.slot == slot
        assert packet.policy_step == 3
        assert packet.run_id == engine.run.id
        assert packet.author_digest == author_digest(bytes(38))
        prompt = prompt_ids(engine.policy.tokenizer, TASK.template, TASK.train[rows[slot]].question)
        assert packet.prompt_digest == prompt_digest(prompt)
        completions = completions_of(groups[slot])
        assert len(completions) == len(groups[slot].rewards) == 8
        for completion in completions:
            assert completion.finished == (completion.token_ids[-1] == 1)
    assert packets[0].token_ids.tolist() != packets[2].token_ids.tolist(), "drawn anew"


def test_others_score_a_group_as_its_author_does(engine):
    rows = list(range(0, 60, 3))
    groups = engine.generate(rows).groups
    assert {reward for group in groups for reward in group.rewards} == {0.0, 1.0}, "some right, some wrong"
    for row, group in zip(rows, groups, strict=True):
        assert engine.score(row, group.packet) == group.rewards


def written(engine, text, finished):
    tokenizer = engine.policy.tokenizer
    ids = tokenizer.encode(text)
    if finished:
        ids.append(tokenizer.eos_token_id)
    claims = np.zeros(len(ids), np.float32)
    return packed(engine, [Completion(np.array(ids, np.uint32), claims, finished)])


def test_what_has_an_id_without_a_row_here_is_not_trained_on(engine):
    packets = packets_of(engine.run, engine.policy.tokenizer, Settings(), vocabulary=24)
    without = packets.read(written(engine, "1)", False))
    assert list(without.completions(own=False)) == [None]
    sound = packets.read(written(engine, "1(", False))
    assert list(sound.completions(own=False)) != [None]


def test_only_a_finished_right_answer_is_rewarded(engine):
    answer = TASK.train[7].answer
    text = f"<think>{answer}</think><answer>{answer}</answer>"
    wrong = text.replace(f"<answer>{answer}", f"<answer>{answer}1")
    assert engine.score(7, written(engine, text, True)) == [1.0]
    assert engine.score(7, written(engine, text, False)) == [0.0]
    assert engine.score(7, written(engine, wrong, True)) == [0.0]


def test_a_step_on_own_groups_has_a_ratio_of_one_and_moves_the_weights():
    engine = opened_engine()
    before = engine.learner.state()[0]
    report = engine.step(uneven(engine, [1, 2, 3]))
    assert report.skipped is None
    assert math.isfinite(report.loss)
    assert report.gradient_norm > 0
    overall = report.diagnostics.overall
    assert overall["samples"] == 24
    assert (overall["ratio_p1"], overall["ratio_max"]) == pytest.approx((1, 1), abs=1e-3)
    after = engine.learner.state()[0]
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_what_a_home_remembers_comes_before_the_plan_and_after_a_person():
    kept = {"lora": True, "optimiser": "adamw"}
    assert Engine().load(settings(), "arithmetic", remembered=kept).kind == "lora"
    plan = Engine().load(settings(lora=False, micro_batch_tokens=200), "arithmetic", remembered=kept).plan
    assert not plan.lora
    assert plan.micro_batch_tokens == 200


def test_the_plan_is_for_the_runs_caps_where_they_are_known():
    engine = Engine()
    caps = {"prompt_tokens": 8000, "completion_tokens": 1000, "group": 12}
    usual = engine.load(settings(), "arithmetic").plan
    large = engine.load(settings(), "arithmetic", caps=caps).plan
    assert large.memory.total > 2 * usual.memory.total


def test_memory_that_is_too_small_is_told_and_tried_all_the_same():
    facts = Engine().load(settings(vram_gb=0.01), "arithmetic")
    assert not facts.plan.fits
    assert facts.plan.reasons


def test_evaluation_is_greedy_and_leaves_no_trace(engine):
    own = engine.random.get_state()
    everybodys = torch.get_rng_state()
    first = engine.evaluate()
    second = engine.evaluate()
    assert replace(first, seconds=second.seconds) == second
    assert first.prompts == 40
    assert 0 <= first.pass_at_1 <= first.formatted <= 1
    assert first.pass_at_1 <= first.lenient
    assert torch.equal(engine.random.get_state(), own)
    assert torch.equal(torch.get_rng_state(), everybodys)


def test_memory_that_nobody_uses_is_given_back_after_a_phase(engine, monkeypatch):
    memory = psutil.Process().memory_info
    blocks = [torch.ones(25_000) for _ in range(2_000)]
    full = memory().rss
    blocks = blocks[::100]  # those that stay lie between what is free
    allocator.trim()
    assert memory().rss < full - 150e6
    calls = []
    monkeypatch.setattr(engine_module, "trim", lambda: calls.append("given back"))
    engine.generate([0])
    assert calls == []  # a step generates in many small calls
    engine.evaluate()
    assert calls == ["given back"]
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    allocator.trim()  # no glibc


def test_evaluation_takes_all_that_is_held_out_at_most():
    result = opened_engine(eval_prompts=100_000).evaluate()
    assert result.prompts == len(TASK.held_out)
    assert 0.2 <= result.pass_at_1 <= 0.6


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_after_restore_everything_goes_on_as_it_would_have(lora, tmp_path):
    original = opened_engine(lora=lora)
    original.step(uneven(original, [1, 2, 3]))
    original.save(str(tmp_path))
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors"}
    expected = original.generate([8, 9])
    report = original.step(uneven(original, [4]))

    resumed = opened_engine(lora=lora, seed=99)
    resumed.step(uneven(resumed, [30]))
    resumed.restore(str(tmp_path), steps=1)
    assert tokens(resumed.generate([8, 9])) == tokens(expected)
    again = resumed.step(uneven(resumed, [4]))
    assert again.loss == report.loss
    assert again.gradient_norm == report.gradient_norm
    for name, value in original.learner.state()[0].items():
        assert torch.equal(value, resumed.learner.state()[0][name]), name


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others_whoever_else_draws():
    made = []
    for seed in (5, 5, 6):
        engine = opened_engine(seed=seed)
        torch.rand(3 + len(made))
        made.append(tokens(engine.generate([1, 2])))
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_another_models_checkpoint_is_refused(tmp_path):
    donor = opened_engine(model="tiny-b")
    donor.step(uneven(donor, [1]))
    donor.save(str(tmp_path))
    with pytest.raises(UsageError, match="another model") as caught:
        opened_engine().restore(str(tmp_path), steps=1)
    assert "--home" in caught.value.fix


def objective_of(task="gsm8k", **changes):
    return choose_objective(Settings(**changes), task, completion_tokens=256)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_itself_but_that_the_tasks_filter_stands_in_for_the_papers(preset):
    chosen = objective_of("arithmetic", objective=preset)
    plain = PRESETS[preset]
    assert objective_of(objective=preset) == plain
    if not {"divergence", "reduction", "threshold"} & METHODS[preset]().keys():
        assert chosen == plain.replace(divergence="k1", reduction="sum", threshold=1.0)
    else:
        assert chosen == plain


def test_any_part_can_be_put_in_place_of_a_presets():
    changes = {
        "advantage": "mean",
        "divergence": "k2",
        "reduction": "max",
        "threshold": 7.0,
        "gate": 0.1,
        "importance": "truncated",
        "truncation": 3.0,
        "epsilon": 0.1,
        "aggregation": "token",
        "inner_steps": 3,
        "ratio": "sequence",
    }
    assert set(changes) == set(OBJECTIVE_PARTS)
    for task in ("arithmetic", "gsm8k"):
        assert objective_of(task, objective="nois", **changes) == PRESETS["nois"].replace(**changes)
    assert objective_of(objective="ftis", threshold="none").threshold is None


def test_a_fixed_divisor_is_the_runs_cap():
    assert objective_of(aggregation="fixed").divisor == 256
    assert objective_of().divisor is None
