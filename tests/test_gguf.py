"""GGUF files: the model is the file's, the tokenizer the hub's, and what a stranger wrote is refused by name."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ftis_node.errors import UsageError
from ftis_node.policy.gguf.convert import convert
from ftis_node.policy.gguf.folder import blocks, told_of
from ftis_node.policy.gguf.header import Unreadable, read_header
from ftis_node.policy.gguf.words import LISTS
from ftis_node.policy.load import load_tokenizer
from ftis_node.policy.names import lasting, public_name, resolve, same_model
from ftis_node.tokenizer.fingerprint import fingerprint
from tests.support import gguf_files as made
from tests.support.cli import answer, refused

ROWS = 272
SIZES: dict[str, Any] = {
    **{"vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2},
    **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}
SHORT = ("--prompt-tokens", 16, "--completion-tokens", 32)
OWN_HEADS = {"attention.key_length": 32}
# By llama.cpp's names: transformers' names, what else a configuration says, and how the file says it.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "llama": ("Llama", {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 32}, OWN_HEADS),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}, {**OWN_HEADS, "attention.sliding_window": 64}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64, "num_hidden_layers": 7},
        {**OWN_HEADS, "attention.sliding_window": 64, "rope.freq_base": 1e6},
    ),
    "phi3": ("Phi3", {}, {}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ftis-node" / "gguf"


def file_of(path: Path, family: str = "qwen2", kind: str = "F32", **more: Any) -> tuple[Path, Any]:
    name, own, facts = FAMILIES[family]
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    model = made.random_model(getattr(transformers, f"{name}ForCausalLM"), config(**SIZES | own))
    return made.of_model(path, family, model, facts | more, kind), model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_holds_the_very_model_of_the_file(tmp_path: Path, family: str) -> None:
    file, model = file_of(tmp_path / "m.gguf", family)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(file, None, folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(100)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-3)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert again.config.tie_word_embeddings == model.config.tie_word_embeddings


def test_a_file_becomes_a_folder_once_and_its_tokenizer_is_the_hubs(tmp_path: Path, cache: Path) -> None:
    file, _ = file_of(tmp_path / "m.gguf", kind="Q8_0", **{"general.file_type": 7})
    (cache / "left.partial").mkdir(parents=True)
    folder = Path(resolve(str(file)))
    assert folder.parent == cache and told_of(folder).startswith("a GGUF file (qwen2, Q8_0, ")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors"), "a tied head stays tied"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [259, 257]
    ours = load_tokenizer(str(file))
    state = json.loads(ours.backend_tokenizer.to_str())
    flags = {entry["content"]: entry["special"] for entry in state["added_tokens"]}
    assert len(ours) == 262 and ours.bos_token is None and ours("ab<|im_end|>").input_ids == [256, 259]
    assert flags == dict(zip(made.OWN, (True, True, True, False, False), strict=True))
    hub = tmp_path / "hub"
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state))).save_pretrained(hub)
    other = f"{file},tokenizer={hub}"
    assert fingerprint(load_tokenizer(other)) == fingerprint(ours) and resolve(other) != str(folder)
    # The same bytes under another name, as Ollama keeps them, are the same folder; and names last.
    blob = shutil.copyfile(file, tmp_path / "sha256-0123")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(blob)) == str(folder) and (folder / "model.safetensors").stat().st_mtime_ns == before
    assert (public_name(str(file)), lasting(str(file))) == ("m.gguf", str(file.resolve()))
    assert same_model(str(file), lasting(str(file))) and not same_model(str(file), str(blob))
    assert answer("fit", "--model", file, "--device", "cpu", *SHORT)["parameters"] > 0


def test_a_head_that_was_rounded_in_another_way_is_tied_and_another_is_not(tmp_path: Path) -> None:
    for noise, tied in ((0.01, True), (2.0, False)):
        file, model = file_of(tmp_path / "m.gguf", "llama")
        with torch.no_grad():
            embedding = model.model.embed_tokens.weight
            model.lm_head.weight.copy_(embedding + noise * embedding.std() * torch.randn_like(embedding))
        facts = {"context_length": 128}
        folder = tmp_path / str(noise)
        folder.mkdir()
        convert(made.of_model(file, "llama", model, facts), None, folder)
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied


WRONG = {
    "page": (b"<!DOCTYPE html>", "is a web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1", "pointer of git-lfs"),
    "weights": (struct.pack("<Q", 64) + b"{}", "no GGUF file"),
    "empty": (b"", "no GGUF file"),
    "cut": (b"GGUF\3\0", "no sound GGUF"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_called_what_they_are(tmp_path: Path, name: str) -> None:
    data, why = WRONG[name]
    (tmp_path / "m.gguf").write_bytes(data)
    assert why in refused("fit", "--model", tmp_path / "m.gguf").what


@pytest.mark.parametrize(
    ("family", "facts", "why"),
    [
        ("qwen2", {"split.count": 3}, "one of 3 parts"),
        ("qwen2", {"general.type": "adapter"}, "is an adapter"),
        ("clip", {}, "reads pictures"),
        ("mamba", {}, "architecture 'mamba'"),
    ],
)
def test_files_that_are_no_whole_model_are_refused(tmp_path: Path, family: str, facts: Any, why: str) -> None:
    file = made.written(tmp_path / "m.gguf", family, facts, {"a": torch.ones(1)})
    assert why in refused("fit", "--model", file).what


def test_names_of_files_that_are_not_there_or_lie_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no file models"):
        resolve("models/m.gguf")
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UsageError, match="It holds a GGUF file: name that"):
        resolve(str(tmp_path))
    with pytest.raises(UsageError, match="holds no tokenizer"):
        resolve(f"{tmp_path}/m.gguf,tokenizer={tmp_path}")


HOSTILE = {
    "fields": (made.hostile(counts=(0, 1 << 40)), "claims"),
    "tensors": (made.hostile([made.ARCHITECTURE], counts=(1 << 40, 1)), "claims"),
    "list": (made.hostile([made.ARCHITECTURE, made.listed("a", 0, 1 << 40)]), "claims"),
    "texts": (made.hostile([made.ARCHITECTURE, made.listed("a", 8, 1 << 18, bytes(99))]), "claims"),
    "lists": (made.hostile([made.ARCHITECTURE, made.listed("a", 9, 1)]), "list of an unknown kind"),
    "twice": (made.hostile([made.ARCHITECTURE] * 2), "twice"),
    "text": (made.hostile([struct.pack("<Q", 1 << 62)], counts=(0, 1)) + bytes(99), "a text of"),
    "huge": (made.hostile([made.ARCHITECTURE], [made.placed("a", [1 << 31, 1 << 31])]), "larger than the file"),
    "dimensions": (made.hostile([made.ARCHITECTURE], [made.placed("a", [1] * 5)]), "5 dimensions"),
    "offset": (made.hostile([made.ARCHITECTURE], [made.placed("a", [8], 0, 1 << 62)]), "beyond its end"),
    "over": (made.hostile([made.ARCHITECTURE], [made.placed("a", [8]), made.placed("b", [8])]) + bytes(99), "over one"),
    "kind": (made.hostile([made.ARCHITECTURE], [made.placed("a", [8], 999)]), "unknown quantisation"),
    "nameless": (made.hostile(), "architecture"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_file_claims_is_checked_before_it_is_believed(name: str) -> None:
    data, why = HOSTILE[name]
    with pytest.raises(Unreadable, match=why):
        read_header(data, blocks(), LISTS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"block_count": 1 << 30}, "contradict"),
        ({"feed_forward_length": 64}, "has the shape"),
        ({"attention.head_count": 0}, "no size"),
        ({"rope.scaling.type": "longrope"}, "scaled by"),
        ({"tokenizer.ggml.pre": "of-another-world"}, "tokenizer splits texts"),
        ({"tokenizer.ggml.tokens": ["a" * 2000]}, "a token of more"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    file, _ = file_of(tmp_path / "m.gguf", **change)
    with pytest.raises(Unreadable, match=why):
        convert(file, None, tmp_path)
