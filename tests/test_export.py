"""Exported models: what plain transformers and peft make of them is what the node trained."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from msgspec.structs import asdict
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftis_node.config.run import load_run_file
from ftis_node.errors import UsageError, UserError
from ftis_node.export.model import export
from ftis_node.node.progress import Progress
from ftis_node.observe.metrics import MetricsLog
from ftis_node.policy import load
from ftis_node.policy.names import BUILT_IN_DIR
from ftis_node.store.checkpoints import Checkpoints
from ftis_node.tasks import load_evaluation
from ftis_node.worker.checkpoint import ALPHA, WEIGHTS
from ftis_node.worker.restore import hold, load_trained, settings_for
from tests.support.begun import checkpoint_of
from tests.support.cli import answer, refused
from tests.support.small_models import change_weights, engine_in, opened_engine, plain_logprobs, saved_by

QUESTIONS = load_evaluation("arithmetic").asked(60)
BASE = BUILT_IN_DIR / "tiny-a"
Homes = dict[str, Path]


def make_home(path, *, lora):
    """A home with the checkpoint of an engine whose weights were changed, and a log as a daemon writes it."""
    engine, facts = engine_in(path, lora=lora, eval_prompts=60)
    before = asdict(engine.evaluate())
    change_weights(engine)
    checkpoints = Checkpoints(path / "checkpoints")
    directory = checkpoints.begin(12)
    engine.save(str(directory))
    progress = Progress(step=12, own_groups_used=200)
    progress.foreign_groups_used.update({"12D3KooWa": 50, "12D3KooWb": 38})
    checkpoints.commit(directory, {"model": f"tiny-a ({facts.kind})", "progress": progress.facts()})
    log = MetricsLog(path / "metrics.jsonl")
    written = facts.settings.model_dump(mode="json") | {"mask": "token" if lora else None}  # by an earlier version
    start = {"settings": written, "versions": {"torch": "1.2.3"}}
    log.write("started", step=0, **start)
    log.write("evaluation", step=0, **before)
    log.write("evaluation", step=9, **before)
    log.write("started", step=6, **start)  # a kill took the weights of step 9
    log.write("evaluation", step=12, **asdict(engine.evaluate()))
    log.write("evaluation", step=99, **before)
    log.close()
    return path


@pytest.fixture(scope="module")
def homes(tmp_path_factory) -> Homes:
    return {
        "full": make_home(tmp_path_factory.mktemp("full"), lora=False),
        "lora": make_home(tmp_path_factory.mktemp("lora"), lora=True),
    }


def exported(home, to, *flags):
    """What `export --json` prints."""
    return answer("export", "--checkpoint", home, "--to", to, *flags)


def not_exported(home, to, *flags):
    return refused("export", "--checkpoint", home, "--to", to, *flags)


def on_cpu(found):
    return settings_for(found, found.model, {"device": "cpu"}, "")[0]


def plain(folder, base=BASE):
    """Loaded without any of this package's code."""
    if (folder / "adapter_config.json").exists():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    return AutoModelForCausalLM.from_pretrained(folder).eval()


KINDS = [
    ("full", (), "full"),
    ("lora", (), "merged"),
    ("lora", ("--merged",), "merged"),
    ("lora", ("--adapter",), "adapter"),
]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_the_umask_gives_a_model_its_mode(homes, umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        for kind, flags in (("full", ()), ("lora", ("--adapter",))):
            exported(homes[kind], tmp_path / kind, *flags)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.glob("*/*")}
    assert "model.safetensors" in modes, modes
    assert set(modes.values()) == {mode}, modes


@pytest.mark.parametrize(("kind", "flags", "form"), KINDS)
def test_plain_libraries_compute_the_same(homes, kind, flags, form, tmp_path):
    told = exported(homes[kind], tmp_path / "out", *flags)
    assert told["kind"] == form
    assert told["step"] == 12
    assert told["base_model"] == "tiny-a"
    assert told["dtype"] == "float32"
    found = checkpoint_of(homes[kind])
    policy = load_trained(on_cpu(found), found)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = plain(tmp_path / "out")
    prompts = [tokenizer(example.question)["input_ids"] for example in QUESTIONS[:8]]
    completions = [tokenizer(f"<think></think><answer>{i}</answer>")["input_ids"] + [1] for i in range(8)]
    ours = plain_logprobs(policy, prompts, completions, 1.0)
    theirs = plain_logprobs(replace(policy, model=model), prompts, completions, 1.0)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    untrained = replace(policy, model=AutoModelForCausalLM.from_pretrained(BASE).eval())
    assert not torch.allclose(plain_logprobs(untrained, prompts, completions, 1.0), ours, atol=0.01)


def test_a_folder_is_complete_and_tells_nothing_of_this_machine(homes, tmp_path):
    private = [str(place).encode() for place in (homes["lora"], BASE, tmp_path)]
    for flags, weights in (
        ((), "model.safetensors"),
        (("--adapter",), "adapter_model.safetensors"),
    ):
        out = tmp_path / weights
        told = exported(homes["lora"], out, *flags)
        assert told["files"] == {file.name: file.stat().st_size for file in out.iterdir()}
        assert told["files"].keys() >= {weights, "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
        assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 1
        with safe_open(out / weights, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        for file in out.iterdir():
            assert file.suffix in (".safetensors", ".json", ".md")
            content = file.read_bytes()
            assert not any(place in content for place in private)
    adapter = json.loads((tmp_path / "adapter_model.safetensors" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "tiny-a"
    assert set(adapter["target_modules"]) == set(ALL.split(","))


def test_the_card_tells_how_the_model_came_about(homes, tmp_path):
    exported(homes["lora"], tmp_path / "out", "--adapter")
    text = (tmp_path / "out" / "README.md").read_text()
    front = text.split("---\n")[1]
    for line in ('base_model: "tiny-a"', 'library_name: "peft"', '"arxiv:2605.22537"'):
        assert line in front
    run = load_run_file(homes["lora"] / "run.toml").run
    for told in (
        f"| run | {run.id.hex()} |",
        f"| task | arithmetic; reward `integer`; sha256 of the data {run.data[:16]}",
        "200 of its own, 88 foreign, of 2 other authors",
        "| steps | 12 |",
        "rank 16, alpha 16",
        "torch 1.2.3",
        "| objective | ftis with mask token |",
        "learning rate 0.003",
        "licence of that model applies",
    ):
        assert told in text
    rate = r"[\d.]+% \(95 %: [\d.]+% to [\d.]+%, n = 60\) at step"
    assert re.search(rf"\| greedy pass@1, held-out questions \| {rate} 0; {rate} 12 \|", text), text
    assert "at step 99" not in text


def test_a_stranger_s_template_stays_in_its_fence(homes, tmp_path):
    home = shutil.copytree(homes["full"], tmp_path / "home")
    run = (home / "run.toml").read_text()
    (home / "run.toml").write_text(run.replace('"{question}"', '"```\\n# Buy {question}"'))
    log = home / "metrics.jsonl"
    log.write_text(log.read_text().replace('"ftis"', '"graft"'))
    exported(home, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "````\n```\n# Buy {question}\n````" in text
    assert "trained with the objective graft" in text
    assert "F-TIS" not in text
    assert "arxiv" not in text


@pytest.mark.parametrize(
    "how",
    [
        ("--dtype", "bfloat16"),
        ("--set", "dtype=bfloat16"),
    ],
)
def test_a_checkpoint_far_from_its_home_is_enough(homes, how, tmp_path):
    place = shutil.copytree(homes["full"] / "checkpoints" / "step-00000012", tmp_path / "step-00000012")
    assert exported(place, tmp_path / "out", *how)["dtype"] == "bfloat16"
    assert plain(tmp_path / "out").dtype == torch.bfloat16
    assert "| steps | 12 |" in (tmp_path / "out" / "README.md").read_text()


def test_what_was_trained_beside_four_bits_says_so(homes, tmp_path, monkeypatch):
    monkeypatch.delattr(load, "ready")  # nothing is generated, so no fast path is tried
    found = replace(checkpoint_of(homes["lora"]), quantisation="nf4")
    export(found, on_cpu(found), tmp_path / "out")
    assert "in four bits (NF4); these layers belong to" in (tmp_path / "out" / "README.md").read_text()


def test_large_models_are_cut(homes, tmp_path):
    found = checkpoint_of(homes["full"])
    settings = on_cpu(found)
    told = export(found, settings, tmp_path / "out", shard_bytes=100_000)
    shards = [name for name in told.files if name.startswith("model-0")]
    assert len(shards) > 2
    assert "model.safetensors.index.json" in told.files
    export(found, settings, tmp_path / "whole")
    expected = plain(tmp_path / "whole").state_dict()
    cut = plain(tmp_path / "out").state_dict()
    assert cut.keys() == expected.keys()
    assert all(torch.equal(cut[name], expected[name]) for name in cut)


def test_a_folder_is_replaced_only_if_it_is_told_to_and_a_model(homes, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    exported(homes["full"], out)  # an empty one is as good as none
    before = (out / "model.safetensors").read_bytes()
    error = not_exported(homes["lora"], out)
    assert "not empty" in error.what
    assert "--overwrite" in error.fix
    assert (out / "model.safetensors").read_bytes() == before
    exported(homes["lora"], out, "--overwrite", "--adapter")
    assert not (out / "model.safetensors").exists()
    assert (out / "adapter_config.json").exists()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to-mother.txt").write_text("dear")
    error = not_exported(homes["full"], tmp_path / "letters", "--overwrite")
    assert "does not look like a model" in error.what
    error = not_exported(homes["full"], homes["full"], "--overwrite")
    assert "checkpoint itself" in error.what
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["letters", "out"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    exported(homes["full"], Path("."))


@pytest.mark.parametrize("name", ["thesis.tex", "notes", "raw/data.csv", "link.json"])
def test_a_folder_with_more_than_a_model_is_not_replaced(homes, name, tmp_path):
    """A config.json makes no model of somebody's work."""
    out = shutil.copytree(BASE, tmp_path / "out")
    (out / name).parent.mkdir(exist_ok=True)
    if name == "link.json":
        (out / name).symlink_to(BASE / "config.json")
    else:
        (out / name).write_text("three years of work")
    error = not_exported(homes["full"], out, "--overwrite")
    assert f"holds '{name.partition('/')[0]}', no part of a model" in error.what
    assert (out / name).exists()
    assert (out / "config.json").exists()


def test_the_base_model_is_not_replaced(homes, tmp_path):
    base = shutil.copytree(BASE, tmp_path / "models" / "base")
    for to in (base, base.parent):
        assert "holds the base model" in not_exported(homes["lora"], to, "--model", base, "--overwrite").what
    assert (base / "model.safetensors").exists()


def test_mistakes_are_told_before_anything_is_written(homes, tmp_path):
    out = tmp_path / "out"
    for place in (homes["full"], checkpoint_of(homes["full"]).path):
        assert "trained in full" in not_exported(place, out, "--adapter").what
    assert "is a model" in not_exported("tiny-a", out).what
    for flags in (("--adapter", "--model", "tiny-b"), ("--model", "tiny-b")):
        assert "does not fit tiny-b" in not_exported(homes["lora"], out, *flags).what
    (tmp_path / "file").write_text("")
    assert "cannot be written" in not_exported(homes["full"], tmp_path / "file" / "o").what
    assert "not a directory" in not_exported(homes["full"], tmp_path / "file").what
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("adapter", [False, True])
def test_a_checkpoint_removed_meanwhile_says_try_again(homes, tmp_path, adapter):
    found = checkpoint_of(shutil.copytree(homes["lora"], tmp_path / "home"))
    settings = on_cpu(found)
    with hold(found) as held:
        shutil.rmtree(found.path)
        assert export(held, settings, tmp_path / "held", adapter=adapter).step == 12, "in hand, it stays"
    shutil.rmtree(tmp_path / "held")
    with pytest.raises(UserError) as caught:
        export(found, settings, tmp_path / "out", adapter=adapter)
    assert not isinstance(caught.value, UsageError)
    assert "Try again" in caught.value.fix
    with pytest.raises(UserError, match="Try again"), hold(found):
        pass
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_layers_that_hold_no_numbers_are_not_merged(homes, tmp_path):
    home = shutil.copytree(homes["lora"], tmp_path / "home")
    old = checkpoint_of(home).path
    weights = {name: torch.full_like(value, torch.nan) for name, value in load_file(old / WEIGHTS).items()}
    checkpoints = Checkpoints(home / "checkpoints")
    directory = checkpoints.begin(13)
    save_file(weights, directory / WEIGHTS, metadata={ALPHA: "16"})
    checkpoints.commit(directory, {"model": "tiny-a (lora)", "progress": Progress(step=13).facts()})
    assert "cannot be merged" in not_exported(home, tmp_path / "out").what
    assert not (tmp_path / "out").exists()


SIZES = {
    "vocab_size": 26,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=2),
    "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=26, n_embd=32, n_layer=2, n_head=4),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8),
}
ALL = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
TRAINED = {
    ("llama", "all-linear"): set(ALL.split(",")),
    ("qwen2", "self_attn.o_proj"): {"o_proj"},
    ("phi3", ALL): {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    ("gpt2", "c_attn"): {"c_attn"},
    ("gpt2", "all-linear"): {"c_attn", "c_proj", "c_fc"},
    ("gemma2", "q_proj"): {"q_proj"},
    ("gemma3", "q_proj,v_proj"): {"q_proj", "v_proj"},
}


@pytest.mark.parametrize(("kind", "targets"), list(TRAINED))
def test_every_target_that_trains_reads_back_in_peft_and_transformers(kind, targets, tmp_path):
    torch.manual_seed(1)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(MODELS[kind]()).save_pretrained(base)
    for file in BASE.glob("token*"):
        shutil.copy(file, base)
    engine = opened_engine(model=str(base), lora=True, lora_targets=targets, lora_rank=4)
    change_weights(engine)
    saved_by(engine, tmp_path / "home", 1, str(base))
    found = checkpoint_of(tmp_path / "home")
    assert {name.rpartition(".")[2] for name in found.lora_targets} == TRAINED[kind, targets]
    sample = ([[3, 4]], [[5, 6, 7]], 1.0)
    expected = plain_logprobs(engine.policy, *sample)
    settings = on_cpu(found)
    for adapter in (True, False):
        out = tmp_path / f"adapter-{adapter}"
        export(found, settings, out, adapter=adapter)
        policy = replace(engine.policy, model=plain(out, base))
        ours = plain_logprobs(policy, *sample)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
