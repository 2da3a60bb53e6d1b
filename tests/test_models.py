"""The three built-in models are what their manifest says, and share one tokenizer that gives back the very text."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

import ftis_node
from ftis_node.lab.recipes import RECIPES
from ftis_node.lab.warmup import TAGS, WORDS, build_tokenizer, greedy_pass_at_1
from ftis_node.tasks import load_task

MODELS = Path(ftis_node.__file__).parent / "models"
MANIFEST = json.loads((MODELS / "manifest.json").read_text())
NAMES = [recipe.name for recipe in RECIPES]


@cache
def tokenizer(name: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODELS / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_the_one_of_the_manifest(name: str) -> None:
    entry = MANIFEST["models"][name]
    assert hashlib.sha256((MODELS / name / "model.safetensors").read_bytes()).hexdigest() == entry["sha256"]
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name)
    assert sum(p.numel() for p in model.parameters()) == entry["parameters"]
    assert model.config.model_type == "qwen2"
    assert model.config.vocab_size == len(tokenizer(name)) == len(WORDS) == 26
    assert 0.2 <= entry["pass_at_1"] <= 0.55, "a model that RL can improve"


def test_the_manifest_belongs_to_the_data_of_the_task() -> None:
    assert MANIFEST["task_data"] == load_task("arithmetic").data
    assert sorted(MANIFEST["models"]) == NAMES


def test_the_models_are_small_to_ship() -> None:
    assert sum(file.stat().st_size for file in MODELS.rglob("*") if file.is_file()) <= 4_000_000


def test_tiny_a_solves_what_the_manifest_says() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / "tiny-a")
    task = load_task("arithmetic")
    measured = greedy_pass_at_1(model, tokenizer("tiny-a"), task, task.held_out)
    assert measured == pytest.approx(MANIFEST["models"]["tiny-a"]["pass_at_1"], abs=0.02)


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_tokenizers_are_identical(name: str) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / name / file).read_bytes() == (MODELS / NAMES[0] / file).read_bytes()


def test_only_padding_and_end_are_special() -> None:
    words = tokenizer("tiny-a")
    assert set(words.all_special_tokens) == {"<|pad|>", "<|end|>"}
    assert words.pad_token_id != words.eos_token_id
    for tag in TAGS:
        assert len(words.encode(tag)) == 1


@pytest.mark.parametrize(
    "text",
    ["<think>15 12</think><answer>12</answer>", "8+7-3=", "1 2 345", "<think> 1\n 2</think> \n<answer>-1,234</answer>"],
)
def test_text_comes_back_as_it_was(text: str) -> None:
    words = tokenizer("tiny-a")
    ids = words.encode(text)
    padded = [words.pad_token_id, *ids, words.eos_token_id, words.pad_token_id]
    assert words.decode(padded, skip_special_tokens=True) == text
    assert words.encode(words.decode(ids)) == ids


def test_every_prompt_of_the_task_is_made_of_known_words() -> None:
    task = load_task("arithmetic")
    prompts = [task.prompt(e) for e in (*task.train, *task.held_out)]
    ids = tokenizer("tiny-a")(prompts)["input_ids"]
    assert {len(row) for row in ids} == {6}
    assert tokenizer("tiny-a").batch_decode(ids) == prompts


def test_the_tokenizer_that_is_built_is_the_one_that_is_loaded() -> None:
    built, loaded = build_tokenizer(), tokenizer("tiny-a")
    assert json.loads(built.backend_tokenizer.to_str()) == json.loads(loaded.backend_tokenizer.to_str())
