"""The warm-up: reproducible to the byte, blind to the held-out prompts, and its teacher errs on purpose."""

import dataclasses
import itertools
import json
import random

import pytest
import torch

from ftis_node.lab import parity, sums, warmup
from ftis_node.lab.parity import demonstrations
from ftis_node.lab.recipes import LARGER, RECIPES
from ftis_node.lab.starts import Start, make_start
from ftis_node.lab.teacher import Teacher
from ftis_node.lab.vocabularies import TOKENIZERS
from ftis_node.tasks import Example, load_task, score
from ftis_node.tasks.arithmetic import arithmetic

SHORT = tuple(dataclasses.replace(recipe, steps=4) for recipe in warmup.RECIPES)


@pytest.fixture
def short(monkeypatch):
    """Four steps a model, which is measured with few prompts."""
    monkeypatch.setattr(warmup, "RECIPES", SHORT)
    task = load_task("arithmetic")
    monkeypatch.setattr(warmup, "load_task", lambda name: dataclasses.replace(task, held_out=task.held_out[:20]))


def test_the_same_seed_gives_the_same_bytes(tmp_path, short, capsys):
    one = tmp_path / "one"
    two = tmp_path / "two"
    for folder in (one, two):
        warmup.main(["--out", str(folder)])
    assert "tiny-a: pass@1" in capsys.readouterr().out
    names = [recipe.name for recipe in SHORT]
    for name in names:
        for file in ("model.safetensors", "tokenizer.json"):
            assert (one / name / file).read_bytes() == (two / name / file).read_bytes()

    manifest = (one / "manifest.json").read_text()
    assert manifest == (two / "manifest.json").read_text()
    assert list(json.loads(manifest)["models"]) == names


def test_another_seed_gives_another_model(tmp_path):
    task = load_task("arithmetic")
    recipe = SHORT[0]
    for seed in (0, 9):
        warmup.save(recipe, *warmup.warm_up(recipe, task, seed), task, tmp_path / str(seed))
    assert weights_in(tmp_path / "0" / "tiny-a") != weights_in(tmp_path / "9" / "tiny-a")


def weights_in(folder):
    return (folder / "model.safetensors").read_bytes()


def test_held_out_prompts_are_never_shown(monkeypatch):
    shown = set()
    completion = Teacher.completion

    def watched(self, question):
        shown.add(question)
        return completion(self, question)

    monkeypatch.setattr(Teacher, "completion", watched)
    task = load_task("arithmetic")
    warmup.warm_up(dataclasses.replace(SHORT[0], steps=30), task)
    assert len(shown) > 500
    assert shown <= {example.question for example in task.train}


def test_a_teacher_keeps_the_format_and_is_right_about_half_of_the_time():
    never_errs = Teacher(random.Random(3), 4, style="swapped", errors=0)
    assert never_errs.completion("8+7-3=")[7:21] == "7+8=15 3-15=12"

    teacher = Teacher(random.Random(3), forgetful=4)
    verdicts = []
    for example in load_task("arithmetic").train:
        text = teacher.completion(example.question)
        verdicts.append(score("integer", text, example.answer))

    assert all(verdict.formatted for verdict in verdicts)
    rewards = [verdict.reward for verdict in verdicts]
    assert 0.3 < sum(rewards) / len(rewards) < 0.7


def fits(task, kind, pairs, *, tokens):
    """Questions and their answers, in a tokenizer of a kind, are within a task's caps; tokens: of an answer."""
    tokenizer = TOKENIZERS[kind]()
    for ids in tokenizer([text for _, text in pairs])["input_ids"]:
        assert len(ids) + 1 <= tokens
    for question, text in pairs:
        prompt = task.prompt(Example(question, ""))
        assert len(text.encode()) < task.text.completion_bytes
        assert len(prompt.encode()) <= task.text.prompt_bytes


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("style", "operands", "longest"),
    [
        ("terse", 3, "9+9+9="),
        ("backwards", 3, "9+9+9="),
        ("swapped", 3, "9+9+9="),
        ("spelled", 4, "9+9+9+9="),
    ],
)
def test_every_completion_of_a_teacher_fits_the_caps_of_the_task(kind, style, operands, longest):
    task = arithmetic(operands)
    teacher = Teacher(random.Random(4), forgetful=3, style=style)
    examples = task.train[:: 1 if operands == 3 else 10]
    questions = [longest, *(example.question for example in examples)]
    tokens = task.text.completion_tokens
    if kind == "words" and style in ("terse", "backwards"):
        tokens = task.completion_tokens
    pairs = [(question, teacher.completion(question)) for question in questions]
    fits(task, kind, pairs, tokens=tokens)


@pytest.mark.parametrize(("task", "width"), [(parity.one(), 1), (parity.two(), 2)])
def test_demonstrations_of_parities_are_right_new_and_as_often_long_as_asked(task, width):
    def counts(question):
        columns = [question[column::width] for column in range(width)]
        return "".join(str(bits.count("1") % (2 * width)) for bits in columns)

    pairs = demonstrations(task, 0.25, random.Random(5), 400)

    assert len(dict(pairs)) > 390
    for example in (*task.train, *task.held_out):
        assert example.answer == counts(example.question)

    held_out = {example.question[:-1] for example in task.held_out}
    lengths = {"/": [], "=": []}  # of thoughts, by how the question ends
    for question, text in pairs:
        assert score("exact", text, counts(question)).reward
        assert question[:-1] not in held_out
        lengths[question[-1]].append(text.index("</think>") - len("<think>"))

    full = len(pairs[0][0]) - 1
    assert lengths["/"] == [full] * (200 * (width - 1)), "of one column nobody asks for a long one"
    told = lengths["="]
    assert 0.17 < told.count(full) / len(told) < 0.33
    assert set(told) == {width, full}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_the_labs_tasks_are_answered_with_fits_their_caps(kind):
    rng = random.Random(6)
    teacher = Teacher(rng, 4, style="spelled", errors=0.6)
    eight = sums.eight()
    answered = {eight: [(e.question, teacher.completion(e.question)) for e in eight.train[:400]]}
    for task in (parity.one(), parity.two()):
        answered[task] = demonstrations(task, 1.0, rng, 50)
    for task, pairs in answered.items():
        tokens = task.completion_tokens if kind == "words" else task.text.completion_tokens
        fits(task, kind, pairs, tokens=tokens)
        assert max(len(question) for question, _ in pairs) <= task.prompt_tokens


def test_sums_of_eight_are_right_never_negative_and_their_teacher_is_so_about_half_of_the_time():
    task = sums.eight()
    for example in (*task.train[:500], *task.held_out):
        terms = example.question.removesuffix("=").replace("-", "+-").split("+")
        assert len(terms) == 8
        values = list(itertools.accumulate(map(int, terms)))
        assert min(values) >= 0
        assert example.answer == str(values[-1])
    assert not set(task.train) & set(task.held_out)

    for seed in range(4):
        teacher = Teacher(random.Random(seed), 4, style="spelled", errors=LARGER[0].errors)
        right = 0.0
        for example in task.train[:300]:
            text = teacher.completion(example.question)
            right += score("integer", text, example.answer).reward
        assert 0.3 < right / 300 < 0.65


def test_small_batches_and_a_rise_of_the_rate_make_other_warm_ups_and_older_names_stay():
    task = sums.eight()
    recipes = [dataclasses.replace(LARGER[0], steps=1, rise=rise) for rise in (1, 2, 4)]
    recipes.append(dataclasses.replace(recipes[0], batch=LARGER[0].batch // 2))

    models = [warmup.warm_up(recipe, task)[0] for recipe in recipes]

    one, two, four, few = (next(model.parameters()).detach() for model in models)
    half_a_step = one - two
    a_quarter = two - four
    assert half_a_step.abs().max() > 1e-4
    assert 100 * (half_a_step - 2 * a_quarter).abs().max() < 1e-4
    assert not torch.equal(one, few)
    assert len({Start(recipe, "0/A").name for recipe in recipes}) == 4
    assert Start(RECIPES[0], "0/A").name == "tiny-a-d7303de1df43"


def test_a_warm_up_is_made_on_the_task_of_the_lab_that_its_trial_has(tmp_path):
    recipe = dataclasses.replace(RECIPES[0], steps=2, long=0.5)
    starts = [Start(recipe, "1/B", task) for task in ("ftis_node.lab.parity:one", "ftis_node.lab.parity:two")]
    for start in starts:
        make_start(start, tmp_path)
    assert len({weights_in(tmp_path / start.name) for start in starts}) == 2
