"""GGUF files of trained models: read again, here and by transformers, they are what was trained."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ftis_node.export.model import export
from ftis_node.policy.gguf.folder import FACTS, read
from ftis_node.policy.load import load_tokenizer
from ftis_node.policy.names import resolve
from ftis_node.store.checkpoints import Checkpoints
from ftis_node.tokenizer.fingerprint import fingerprint
from ftis_node.worker.checkpoint import WEIGHTS
from ftis_node.worker.restore import settings_for
from tests.support.begun import checkpoint_of
from tests.support.cli import answer, refused
from tests.support.small_models import change_weights, opened_engine, saved_by

BASES = Path(__file__).parent / "gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def trained(base, home, *, lora=True):
    """A home with a checkpoint of a model whose weights were changed."""
    engine = opened_engine(
        model=str(base),
        lora=lora,
        lora_rank=4,
        lora_targets="all-linear",
    )
    change_weights(engine)
    saved_by(engine, home, 7, str(base))
    return home


def folder_in(base, to):
    """The model of a GGUF file as a folder of a hub."""
    shutil.copytree(resolve(str(base)), to)
    (to / FACTS).unlink()
    return to


@torch.no_grad()
def logits(folder, **more):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)
    return model(torch.arange(99)[None]).logits


def tensors(file):
    """By the package's own reader."""
    return {one.name: dequantize(one.data, one.tensor_type) for one in GGUFReader(file).tensors}


def written(home, to, *flags):
    """The tensors of the file that `export --gguf` writes."""
    told = answer("export", "--checkpoint", home, "--gguf", to, *flags)
    assert told["files"] == {to.name: to.stat().st_size}
    assert not list(to.parent.glob(".*.partial"))
    return tensors(to)


@pytest.mark.parametrize("file", sorted(BASES.glob("*.gguf")), ids=lambda file: file.stem)
def test_a_file_is_read_as_what_was_trained(file, tmp_path):
    base = folder_in(file, tmp_path / "base")
    home = trained(base, tmp_path / "home")
    to = tmp_path / "made.gguf"
    written(home, to)
    found = checkpoint_of(home)
    settings, _ = settings_for(found, str(base), {"device": "cpu"}, "")
    export(found, settings, tmp_path / "plain")
    expected = logits(tmp_path / "plain")
    torch.testing.assert_close(logits(tmp_path, gguf_file=to.name), expected, atol=0.02, rtol=0.02)
    torch.testing.assert_close(logits(resolve(str(to))), expected, atol=0.2, rtol=0.02)  # in bfloat16
    assert not torch.allclose(expected, logits(base), atol=0.5)
    assert fingerprint(load_tokenizer(str(to))) == fingerprint(load_tokenizer(str(base)))
    facts = read(to).facts
    theirs = read(file).facts
    different = {key for key in theirs if facts.get(key, theirs[key]) != theirs[key]}
    assert different <= {"general.name", "general.file_type", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"}


def test_a_file_of_a_file_keeps_its_facts(tmp_path):
    file = BASES / "llama.gguf"
    to = tmp_path / "made.gguf"
    home = trained(file, tmp_path / "home")
    whole = written(home, to, "--dtype", "q8_0")
    facts = read(to).facts
    theirs = read(file).facts
    assert facts.pop("general.file_type") == 7
    assert facts.pop("general.quantization_version") == 2
    assert facts == {key: value for key, value in theirs.items() if key in facts}
    exact = written(home, tmp_path / "exact.gguf", "--dtype", "float32")
    assert whole.keys() == exact.keys()
    before = tensors(file)
    layers = written(home, tmp_path / "layers.gguf", "--adapter")
    alpha = read(tmp_path / "layers.gguf").facts["adapter.lora.alpha"]
    assert len(layers) == 2 * 7 * 2, "two of seven matrices in each of two layers"
    answer("export", "--checkpoint", home, "--to", tmp_path / "layers", "--adapter")
    card = (tmp_path / "layers" / "README.md").read_text()
    assert "write the file's folder there as `base_model_name_or_path`" in card
    code = card.split("```python")[1].split("```")[0]
    names = {"FOLDER_OF_THE_FILE": BASES, "FOLDER": tmp_path / "layers"}
    exec(code, names)
    found = names["model"](torch.arange(99)[None]).logits
    torch.testing.assert_close(found, logits(tmp_path, gguf_file="exact.gguf"), atol=0.25, rtol=0.02)
    for name in {name.rpartition(".lora_")[0] for name in layers}:
        down = layers[f"{name}.lora_a"]
        up = layers[f"{name}.lora_b"]
        np.testing.assert_allclose(before[name] + alpha / len(down) * up @ down, exact[name], atol=0.01)
        np.testing.assert_allclose(whole[name], exact[name], atol=0.05)


def test_what_cannot_be_a_file_is_refused(tmp_path, monkeypatch):
    base = folder_in(BASES / "qwen2.gguf", tmp_path / "base")
    home = trained(base, tmp_path / "home", lora=False)
    to = tmp_path / "made.gguf"
    words = ("export", "--checkpoint", home)
    assert "One place" in refused(*words).what
    assert "One place" in refused(*words, "--gguf", to, "--to", tmp_path / "folder").what
    assert "is for --gguf" in refused(*words, "--to", to, "--dtype", "q8_0").what
    assert "cannot be written" in refused(*words, "--gguf", base / "config.json" / "x.gguf").what
    to.write_text("letters")
    assert "is there" in refused(*words, "--gguf", to).what
    assert "is no GGUF file" in refused(*words, "--gguf", to, "--overwrite").what
    assert to.read_text() == "letters"
    to.unlink()
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
        assert "1 MB are free" in refused(*words, "--gguf", to).what
    large = {name: value + 1e5 for name, value in load_file(checkpoint_of(home).weights).items()}
    checkpoints = Checkpoints(home / "checkpoints")
    directory = checkpoints.begin(8)
    save_file(large, directory / WEIGHTS)
    checkpoints.commit(directory, {"model": f"{base} (full)"})
    assert "too large for f16" in refused(*words, "--gguf", to).what
    shutil.rmtree(home / "checkpoints" / "step-00000008")
    config = json.loads((base / "config.json").read_text())
    for changed, what in (
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "phi"}, "architecture is 'phi'"),
    ):
        (base / "config.json").write_text(json.dumps(config | changed))
        error = refused(*words, "--gguf", to)
        assert what in error.what
        assert "--model FILE.gguf" in error.fix
    (base / "config.json").write_text(json.dumps(config))
    assert not to.exists()
    assert not list(tmp_path.glob(".*.partial"))
