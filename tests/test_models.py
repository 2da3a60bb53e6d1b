"""The built-in models are what their manifest says; three share one tokenizer, and three have one each.

Every tokenizer gives back the very text.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import transformers
from tokenizers import pre_tokenizers

import ftis_node
from ftis_node.config.settings import Settings
from ftis_node.lab.recipes import RECIPES
from ftis_node.lab.vocabularies import TAGS, TOKENIZERS, WORDS
from ftis_node.lab.warmup import greedy_pass_at_1
from ftis_node.policy.load import load_policy
from ftis_node.tasks import load_task
from ftis_node.tokenizer.asking import end_ids
from ftis_node.tokenizer.fingerprint import fingerprint

MODELS = Path(ftis_node.__file__).parent / "models"
MANIFEST = json.loads((MODELS / "manifest.json").read_text())
NAMES = [recipe.name for recipe in RECIPES]
KINDS = {recipe.name: recipe.tokenizer for recipe in RECIPES}
SAME = [name for name in NAMES if KINDS[name] == "words"]
OTHER = [name for name in NAMES if KINDS[name] != "words"]
# Of what text runs may carry: tags, numbers that tokenizers cut differently, line ends, accents in two forms, emoji.
ANSWER = "<think>15 12</think><answer>12</answer>"
TEXTS = [ANSWER, "8+7-3=", "1 2 345", "<think> 1\n 2</think> \n<answer>-1,234</answer>"]
ANY_TEXTS = [*TEXTS, "", " 0  07 100", "\r\n\t", "é e\u0301 北京 🙂🏽", "<|end|> <|pad|>", "\x00\x7f"]


@cache
def tokenizer(name):
    return transformers.AutoTokenizer.from_pretrained(MODELS / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_the_one_of_the_manifest(name):
    entry = MANIFEST["models"][name]
    assert hashlib.sha256((MODELS / name / "model.safetensors").read_bytes()).hexdigest() == entry["sha256"]
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name)
    assert sum(p.numel() for p in model.parameters()) == entry["parameters"]
    assert model.config.model_type == ("qwen2" if name in SAME else "llama")
    assert model.config.vocab_size == len(tokenizer(name))
    assert 0.2 <= entry["pass_at_1"] <= 0.55, "a model that RL can improve"


def test_the_manifest_belongs_to_the_data_of_the_task():
    assert MANIFEST["task_data"] == load_task("arithmetic").data
    assert list(MANIFEST["models"]) == NAMES


def test_the_models_are_small_to_ship():
    sizes = {name: sum(file.stat().st_size for file in (MODELS / name).iterdir()) for name in NAMES}
    assert sum(sizes[name] for name in SAME) <= 2_000_000
    assert sum(sizes[name] for name in OTHER) <= 3_000_000


of_each_tokenizer = pytest.mark.parametrize("name", ["tiny-a", *OTHER])


@of_each_tokenizer
def test_a_model_solves_what_the_manifest_says(name):
    policy = load_policy(Settings(model=name, device="cpu"))
    task = load_task("arithmetic")
    cap = task.completion_tokens if name in SAME else task.text.completion_tokens
    measured = greedy_pass_at_1(policy.model, policy.tokenizer, task, task.held_out, cap)
    assert measured == pytest.approx(MANIFEST["models"][name]["pass_at_1"], abs=0.02)


@pytest.mark.parametrize("name", SAME[1:])
def test_the_tokenizers_are_identical(name):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / name / file).read_bytes() == (MODELS / SAME[0] / file).read_bytes()


def test_the_kinds_of_tokenizer_differ_pairwise():
    assert [KINDS[name] for name in ("tiny-a", *OTHER)] == list(TOKENIZERS)
    assert len({fingerprint(tokenizer(name)) for name in ("tiny-a", *OTHER)}) == 4
    cuts = {name: [tokenizer(name).decode([i]) for i in tokenizer(name).encode(ANSWER)] for name in OTHER}
    assert cuts["tiny-chars"] == list(ANSWER)
    assert "|".join(cuts["tiny-numbers"]) == "<think|>|15| |12|</|think|><|answer|>|12|</|answer|>"
    assert cuts["tiny-bpe"] == ["<think>15", " 12", "</think><answer>", "12</answer>"]


@of_each_tokenizer
def test_only_padding_and_end_are_special(name):
    words = tokenizer(name)
    assert set(words.all_special_tokens) == {"<|pad|>", "<|end|>"}
    assert words.pad_token_id != words.eos_token_id
    assert end_ids(words) == (words.eos_token_id,)
    if name == "tiny-a":
        assert len(words) == len(WORDS) == 26
        assert {len(words.encode(tag)) for tag in TAGS} == {1}


@pytest.mark.parametrize("name", OTHER)
def test_every_byte_comes_back(name):
    words = tokenizer(name)
    for text in ANY_TEXTS:
        ids = words.encode(text, split_special_tokens=True)
        assert words.decode(ids) == text
        assert not set(ids) & {words.pad_token_id, words.eos_token_id}, "special tokens' spelling is plain text"
    assert len(set(words.get_vocab()) & set(pre_tokenizers.ByteLevel.alphabet())) == 256


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(text):
    words = tokenizer("tiny-a")
    ids = words.encode(text)
    padded = [words.pad_token_id, *ids, words.eos_token_id, words.pad_token_id]
    assert words.decode(padded, skip_special_tokens=True) == text
    assert words.encode(words.decode(ids)) == ids


@of_each_tokenizer
def test_a_prompt_of_the_task_is_six_tokens(name):
    task = load_task("arithmetic")
    prompts = [task.prompt(e) for e in (*task.train, *task.held_out)]
    ids = tokenizer(name)(prompts)["input_ids"]
    assert {len(row) for row in ids} == {6}
    assert tokenizer(name).batch_decode(ids) == prompts


@of_each_tokenizer
def test_the_tokenizer_that_is_built_is_the_one_that_is_loaded(name):
    built = TOKENIZERS[KINDS[name]]()
    loaded = tokenizer(name)
    assert json.loads(built.backend_tokenizer.to_str()) == json.loads(loaded.backend_tokenizer.to_str())
