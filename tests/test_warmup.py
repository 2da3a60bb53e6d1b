"""The warm-up: reproducible to the byte, blind to the held-out prompts, and its teacher errs on purpose."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from ftis_node.lab import warmup
from ftis_node.tasks import Example, load_task, score

SHORT = tuple(dataclasses.replace(recipe, steps=8) for recipe in warmup.RECIPES)


def test_the_same_seed_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warmup, "RECIPES", SHORT)
    files = [*(f"{r.name}/model.safetensors" for r in SHORT), "tiny-a/tokenizer.json", "manifest.json"]
    for folder in ("one", "two"):
        warmup.main(["--out", str(tmp_path / folder)])
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file
    warmup.main(["--out", str(tmp_path / "three"), "--seed", "9", "--only", "tiny-a"])
    weights = [(tmp_path / folder / "tiny-a" / "model.safetensors").read_bytes() for folder in ("one", "three")]
    assert weights[0] != weights[1]
    assert "tiny-a: step 8 of 8" in capsys.readouterr().out


def test_one_model_can_be_made_again_without_losing_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "RECIPES", SHORT)
    warmup.main(["--out", str(tmp_path)])
    before = (tmp_path / "manifest.json").read_bytes()
    warmup.main(["--out", str(tmp_path), "--only", "tiny-a"])
    assert (tmp_path / "manifest.json").read_bytes() == before
    assert sorted(json.loads(before)["models"]) == ["tiny-a", "tiny-b", "tiny-c"]


def test_held_out_prompts_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: set[str] = set()
    completion = warmup.Teacher.completion

    def watched(self: warmup.Teacher, question: str) -> str:
        shown.add(question)
        return completion(self, question)

    monkeypatch.setattr(warmup.Teacher, "completion", watched)
    task = load_task("arithmetic")
    warmup.warm_up(dataclasses.replace(SHORT[0], steps=60), task)
    assert len(shown) > 1000
    assert shown <= {example.question for example in task.train}


def test_a_teacher_keeps_the_format_and_is_right_about_half_of_the_time() -> None:
    teacher = warmup.Teacher(random.Random(3), forgetful=4)
    verdicts = [score("integer", teacher.completion(e.question), e.answer) for e in load_task("arithmetic").train]
    assert all(verdict.formatted for verdict in verdicts)
    assert 0.3 < sum(verdict.reward for verdict in verdicts) / len(verdicts) < 0.7


def test_every_completion_of_a_teacher_fits_the_cap_of_the_task() -> None:
    task = load_task("arithmetic")
    teacher, words = warmup.Teacher(random.Random(4), forgetful=3), warmup.build_tokenizer()
    lengths = [len(words.encode(teacher.completion(e.question))) + 1 for e in task.train]
    assert max(lengths) <= task.completion_tokens


def test_pass_at_1_counts_strictly_right_answers() -> None:
    task, words = load_task("arithmetic"), warmup.build_tokenizer()
    model = warmup.build_model(SHORT[0], words)
    assert warmup.greedy_pass_at_1(model, words, task, (Example("1+1+1=", "3"),)) == 0.0
