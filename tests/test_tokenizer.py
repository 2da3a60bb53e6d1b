"""Tokenizers that read one another's ids share a fingerprint, and only they; and all of a family end alike."""

import json
import shutil
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from ftis_node.errors import UsageError
from ftis_node.lab.bench.model import word_tokenizer
from ftis_node.tasks.rewards import TAGS
from ftis_node.tasks.templates import PLAIN, REASONING
from ftis_node.tokenizer.asking import end_ids
from ftis_node.tokenizer.fingerprint import backend_of, fingerprint, refuse_unwritable, unwritable
from tests.support.small_models import GPT2, QWEN, tiny_tokenizer

real = pytest.mark.skipif(not QWEN.is_dir(), reason=f"the real Qwen2.5 tokenizer is not at {QWEN}")
VARIANTS = {"base": "tokenizer_config.json"} | {
    kind: f"tokenizer_config.{kind}.json" for kind in ("instruct", "coder-instruct")
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> dict[str, Any]:
    """The Qwen2.5 tokenizer with the configs of its base, Instruct and Coder-Instruct models."""
    tokenizers = {}
    for kind, config in VARIANTS.items():
        folder = tmp_path_factory.mktemp(kind)
        for name in ("vocab.json", "merges.txt"):
            shutil.copyfile(QWEN / name, folder / name)
        shutil.copyfile(QWEN / config, folder / "tokenizer_config.json")
        tokenizers[kind] = AutoTokenizer.from_pretrained(folder)
    return tokenizers


def from_state(state, **options):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **options)


def bpe_state():
    """A small BPE tokenizer as its JSON; every part of it is meant to be changed."""
    vocabulary = {word: index for index, word in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    made = Tokenizer(BPE(vocabulary, [("a", "b"), ("b", "c"), ("ab", "c")]))
    made.normalizer = NFC()
    made.pre_tokenizer = Whitespace()
    made.decoder = Fuse()
    made.add_special_tokens(["<|im_end|>"])
    state = json.loads(made.to_str())
    return state


@pytest.fixture(scope="module")
def prints(qwen) -> dict[str, str]:
    return {kind: fingerprint(tokenizer) for kind, tokenizer in qwen.items()}


@real
def test_qwens_base_instruct_and_coder_share_one_fingerprint(qwen, prints):
    assert qwen["base"].eos_token != qwen["instruct"].eos_token
    assert qwen["base"].chat_template != qwen["instruct"].chat_template
    assert len(prints) == 3
    assert len(set(prints.values())) == 1


@real
def test_qwens_base_and_instruct_end_alike_and_not_at_a_word_of_html(qwen):
    assert {end_ids(tokenizer) for tokenizer in qwen.values()} == {(151643, 151645)}
    assert "</s>" in qwen["base"].get_vocab(), "an ordinary word of this vocabulary, which ends nothing"


@real
@pytest.mark.skipif(not GPT2.is_dir(), reason=f"the GPT-2 tokenizer is not at {GPT2}")
def test_tokenizers_of_different_families_differ(prints):
    gpt2 = GPT2Tokenizer.from_pretrained(GPT2)
    assert len({prints["base"], fingerprint(gpt2), fingerprint(tiny_tokenizer())}) == 3


def test_chat_template_padding_side_and_default_eos_do_not_matter():
    expected = fingerprint(from_state(bpe_state()))
    for options in (
        {"chat_template": "{{ messages }}"},
        {"padding_side": "left"},
        {"eos_token": "<|im_end|>"},
        {"pad_token": "<|im_end|>"},
        {"model_max_length": 17},
        {"clean_up_tokenization_spaces": True},
    ):
        assert fingerprint(from_state(bpe_state(), **options)) == expected, options
    padded = from_state(bpe_state(), pad_token="<|im_end|>")
    padded(["a", "a b c"], padding=True, truncation=True, max_length=5)
    assert fingerprint(padded) == expected, "calls that pad and truncate leave it as it is"


def test_merges_mean_the_same_in_either_spelling():
    spelt = bpe_state()
    spelt["model"]["merges"] = [" ".join(pair) for pair in spelt["model"]["merges"]]
    assert fingerprint(from_state(spelt)) == fingerprint(from_state(bpe_state()))


MODEL = ("model",)
END = ("added_tokens", 0)
MEANINGFUL = {
    "merges in another order": (MODEL, {"merges": [["b", "c"], ["a", "b"], ["ab", "c"]]}),
    "another merge": (MODEL, {"merges": [["a", "b"], ["b", "c"], ["a", "bc"]]}),
    "swapped ids": (("model", "vocab"), {"a": 1, "b": 0}),
    "an end that is an ordinary word": (END, {"special": False}),
    "another end": (END, {"content": "<|the_end|>"}),
    "no normalizer": ((), {"normalizer": None}),
    "another pre-tokenizer": ((), {"pre_tokenizer": {"type": "WhitespaceSplit"}}),
    "another decoder": ((), {"decoder": None}),
}


def changed(name):
    """The small tokenizer with one of these changes."""
    place, change = MEANINGFUL[name]
    whole = part = bpe_state()
    for key in place:
        part = part[key]
    part |= change
    return from_state(whole)


@pytest.mark.parametrize("change", MEANINGFUL)
def test_whatever_changes_ids_or_text_changes_the_fingerprint(change):
    assert fingerprint(changed(change)) != fingerprint(from_state(bpe_state()))


def test_the_fingerprint_of_the_built_in_models_never_changes():
    # Every run file of the built-in task holds it: another value is another protocol.
    assert fingerprint(tiny_tokenizer()) == "0a944553b01c75652c005f180e0730f48bffa09b246e35b49f7aa2ab2e10312a"


def test_a_tokenizer_that_cannot_be_read_is_refused():
    with pytest.raises(UsageError, match="slow tokenizer"):
        fingerprint(object())


def test_the_own_eos_and_the_familys_others_end_a_completion():
    assert end_ids(tiny_tokenizer()) == (1,)
    assert end_ids(word_tokenizer(5)) == (0,)
    state = bpe_state()
    assert end_ids(from_state(state)) == (6,)
    assert end_ids(from_state(state, eos_token="abc")) == (5, 6)


def test_a_tokenizer_without_an_end_is_refused():
    with pytest.raises(UsageError, match="end-of-sequence") as caught:
        end_ids(changed("another end"))
    assert "eos_token" in caught.value.fix


def test_letters_that_a_tokenizer_has_nothing_for_are_named():
    small = backend_of(tiny_tokenizer())
    tags = "".join(TAGS)
    assert unwritable(small, PLAIN.replace("{question}", "") + tags) == ""
    assert unwritable(small, f"Who? {tags}") == "o?", "its tags have the other letters"


def test_a_model_is_refused_where_most_of_every_question_gets_lost():
    for prompts in ([], ["9+5="], ["Q: 9+5=", REASONING], ["q7"], ["What is 9+5?", "1"]):
        refuse_unwritable(backend_of(tiny_tokenizer()), "tiny", prompts)
    with pytest.raises(UsageError, match="can write no question"):
        refuse_unwritable(backend_of(tiny_tokenizer()), "tiny", ["What is 9+5?", REASONING])
    refuse_unwritable(backend_of(word_tokenizer(9)), "words", ["w8 w2 w7 w3"])


@real
def test_a_real_tokenizer_has_something_for_everything(qwen):
    text = REASONING.replace("{question}", "数 \U0001f600 \\frac{1}{2} e\u0301 \u095c") + "".join(TAGS)
    assert unwritable(backend_of(qwen["base"]), text) == ""
