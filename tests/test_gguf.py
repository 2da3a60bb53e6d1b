"""GGUF files: the model is the file's as transformers reads it, and what is no sound file is refused by name.

Those in `tests/gguf` are of random models as llama.cpp's converter writes them. Names in the fuzzer's corpus say why a
file is refused.
"""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from ftis_node.errors import UsageError, UserError
from ftis_node.policy.load import load_tokenizer
from ftis_node.policy.names import lasting, public_name, resolve

FILES = Path(__file__).parent / "gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("file", sorted(FILES.glob("*.gguf")), ids=lambda file: file.stem)
def test_a_file_becomes_the_folder_of_its_model(file):
    folder = resolve(str(file))
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(FILES, gguf_file=file.name, dtype=torch.float32)
    ids = torch.arange(99)[None]
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=0.1, rtol=0.02)
    words = load_tokenizer(str(file))
    assert len(words) == 262
    assert words("ab<|im_end|><|fim_prefix|>").input_ids == [256, 259, 261]
    assert resolve(lasting(str(file))) == folder
    assert public_name(str(file)) == file.name


@pytest.mark.parametrize("file", sorted(FILES.glob("../fuzz/corpus/gguf/*")), ids=str)
def test_what_is_no_sound_model_is_refused_by_name(file):
    with pytest.raises(UsageError, match=file.name):
        resolve(str(file))


def test_what_keeps_a_file_from_becoming_a_folder_is_told(tmp_path, monkeypatch):
    file = FILES / "llama.gguf"

    def refused(name, words):
        with pytest.raises(UserError, match=words):
            resolve(str(name))

    refused(f"{file},tokenizer={tmp_path}", "holds no tokenizer")
    refused("/proc/self/mem", "cannot be read")
    wordless = tmp_path / "wordless.gguf"
    wordless.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.mould"))
    refused(wordless, "wordless.gguf cannot be turned into a folder: its tokenizer is of the kind None")
    textual = tmp_path / "textual.gguf"  # its base of positions is the text that named its kind of tokenizer
    textual.write_bytes(wordless.read_bytes().replace(b"tokenizer.ggml.mould", b"llama.rope.freq_base"))
    refused(textual, "textual.gguf cannot be turned into a folder: its rope.freq_base is no number")
    whole = tmp_path / "whole.gguf"  # a norm's type, after its name, dimension and size, is that of whole numbers
    data = bytearray(file.read_bytes())
    place = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 12
    data[place : place + 4] = GGMLQuantizationType.I32.to_bytes(4, "little")
    whole.write_bytes(data)
    refused(whole, "the tensor 'output_norm.weight' is of the type I32, which is not read")
    with monkeypatch.context() as meanwhile:
        (tmp_path / "torch.py").write_text("raise SystemExit(3)")
        meanwhile.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        refused(file, "the process ended with 3")
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
        refused(file, "are free in")
    with monkeypatch.context() as meanwhile:
        meanwhile.setitem(sys.modules, "gguf", None)
        refused(file, "the package gguf, which is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(wordless))
    refused(file, "cannot be written")
