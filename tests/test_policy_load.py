"""A model is found by its name and loaded as asked, or the person is told what to do instead."""

import ctypes
import json
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2ForCausalLM

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.host import processor
from ftis_node.policy import load
from ftis_node.policy.load import load_policy
from ftis_node.policy.measure import geometry
from ftis_node.policy.names import ALIASES, BUILT_IN_DIR, built_in, resolve
from ftis_node.worker.restore import find_checkpoint, settings_for
from tests.support.small_models import tiny_config, tiny_tokenizer

ROOT = Path(__file__).parent.parent


def settings(model, **changes):
    return Settings(model=str(model), device="cpu", **changes)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny model as transformers saves it, with dropout in its config."""
    Qwen2ForCausalLM(tiny_config(vocab_size=40, attention_dropout=0.5)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_larger_model_has_the_dtype_that_the_processor_multiplies(monkeypatch):
    torchs_own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert processor.multiplies_bfloat16() == torchs_own

    def dtype_of(model, **asked):
        settled, *_ = settings_for(None, model, {"device": "cpu"} | asked, "")
        return settled.dtype

    for has, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(processor, "multiplies_bfloat16", lambda has=has: has)
        assert dtype_of("qwen2.5-0.5b") == dtype
        assert dtype_of("qwen2.5-0.5b", dtype="float16") == "float16"
        assert dtype_of("tiny-a") is None


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_short_name_means_a_hub_id_and_each_another():
    assert len(ALIASES) == len(set(ALIASES.values())) == 16
    for alias, hub in ALIASES.items():
        words = [word.upper() if word[0].isdigit() else word.capitalize() for word in alias.split("-")]
        assert resolve(alias) == hub == f"Qwen/{'-'.join(words)}"
    assert resolve("Qwen2.5-Coder-1.5B-Instruct") == "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    assert resolve("someone/their-model") == "someone/their-model"


def test_built_in_models_come_with_the_package():
    assert built_in() == ("tiny-a", "tiny-b", "tiny-bpe", "tiny-c", "tiny-chars", "tiny-numbers")
    assert resolve("tiny-b") == str(BUILT_IN_DIR / "tiny-b")


def test_a_local_folder_is_itself(folder, monkeypatch):
    assert resolve(str(folder)) == str(folder.resolve())
    monkeypatch.chdir(folder.parent)
    assert resolve(f"./{folder.name}") == str(folder.resolve())


@pytest.mark.parametrize("name", ["zzzz", "a/b/c", "/no/such", "./nowhere", "owner/"])
def test_a_name_like_no_other_is_told_what_names_there_are(name):
    with pytest.raises(UsageError) as caught:
        resolve(name)
    assert "tiny-a" in caught.value.fix
    assert "Qwen/" in caught.value.fix


# --- the hub --------------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_without_asking_the_hub(folder, monkeypatch):
    asked = []

    def look_up(*args, **kwargs):
        asked.append(args)
        raise OSError("no name service")

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    assert load_policy(settings(folder)).parameters() > 0
    assert not asked
    with pytest.raises(UserError):
        load_policy(settings("nobody-at-all/no-such-model"))
    assert asked, "the test would see it"


# --- what is loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "dtype"),
    [
        (None, torch.float32),
        ("bfloat16", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_weights_have_the_dtype_that_is_asked_for(wanted, dtype, saved, folder):
    Qwen2ForCausalLM(tiny_config(vocab_size=40)).to(getattr(torch, saved)).save_pretrained(folder)
    policy = load_policy(settings(folder, dtype=wanted))
    assert {parameter.dtype for parameter in policy.model.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("wanted", "device"),
    [
        ("auto", "cuda:0"),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
    ],
)
def test_a_gpu_has_its_number(wanted, device, monkeypatch):
    """torch refuses to limit the memory of one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load.choose_device(wanted) == torch.device(device)


def anonymous():
    """Bytes of this process's memory that no file backs."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def grown_by_a_cast(folder: str, kind: str) -> int:
    """Bytes that a load takes beyond what was there before and is there after it. Call it in a process of its own:
    one that has run tests frees what they left."""
    load_policy(settings("tiny-a", lora=True, quantisation=kind))  # imports what it takes
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # freed blocks of a MB go back to the system
    if kind == "none":
        load.choose_device = lambda _: torch.device("meta")
        load.ready = lambda policy, texts: policy
    peak = [0]
    before = anonymous()
    done = threading.Event()

    def watch():
        while not done.wait(2e-3):
            peak[0] = max(peak[0], anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    policy = load_policy(settings(folder, dtype="float16", lora=True, lora_rank=2, quantisation=kind))
    done.set()
    watching.join()
    assert policy.dtype == torch.float16
    return peak[0] - max(before, anonymous())


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "kind"), [("float32", "nf4"), ("bfloat16", "none")])
def test_a_cast_goes_matrix_by_matrix(saved, kind, tmp_path):
    """Into four bits here, and whole onto a device without memory. What quantises on a CPU takes four fp32 matrices.

    On a busy machine the process holds up to 24 at times, so it is measured on a quiet one.
    """
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "initializer_range": 0.02,
    }
    model = Qwen2ForCausalLM(tiny_config(**sizes)).to(getattr(torch, saved))
    matrix = 512 * 1408 * 4
    whole = 2 * sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    code = f"from tests import test_policy_load as t; print(t.grown_by_a_cast({str(tmp_path)!r}, {kind!r}))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(told.stdout.split()[-1]) < 6 * matrix < whole / 2


def test_full_training_trains_everything_lora_its_layers_only_and_changes_nothing_at_first(folder):
    plain = load_policy(settings(folder))
    policy = load_policy(settings(folder, lora=True, lora_rank=4))
    assert all(parameter.requires_grad for parameter in plain.model.parameters())
    assert plain.kind == "full"
    assert policy.kind == "lora"
    trainable = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * 2 * 2, "A and B of q_proj and v_proj in two layers"
    assert all("lora_" in name for name in trainable)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(policy.causal_lm(input_ids=ids).logits, plain.model(input_ids=ids).logits)


def test_lora_layers_are_the_same_for_the_same_seed_and_others_for_another(folder):
    def first(seed):
        policy = load_policy(settings(folder, lora=True, seed=seed))
        return next(p for name, p in policy.model.named_parameters() if "lora_A" in name)

    made = first(1)
    assert torch.equal(made, first(1))
    assert not torch.equal(made, first(2))
    Qwen2ForCausalLM(tiny_config(vocab_size=40)).to(torch.bfloat16).save_pretrained(folder)
    assert torch.equal(made, first(1)), "whatever the weights were saved in"


@pytest.mark.parametrize("attribute", ["final_logit_softcapping", "logits_scaling", "logit_scale"])
def test_a_config_that_names_what_its_model_does_not_do_is_refused(attribute, folder):
    change_config(folder, **{attribute: 3.0})
    with pytest.raises(UsageError, match="changes its logits"):
        load_policy(settings(folder))
    change_config(folder, **{attribute: 1.0 if "scal" in attribute else None})
    load_policy(settings(folder))


def test_a_model_whose_attention_is_capped_is_loaded_with_one_that_does_it(tmp_path):
    sizes = {name: getattr(tiny_config(), name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 40,
        "eos_token_id": 1,
    }
    Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, pad_token_id=0, bos_token_id=None)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    change_config(tmp_path, attn_implementation="kernels-community/flash-attn2")
    policy = load_policy(settings(tmp_path))
    assert policy.causal_lm.config._attn_implementation == "eager"
    assert "by transformers' modules" in policy.way


def header(tensors, data=b""):
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(*shape, end=4):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [0, end]}


def forty(part, **one):
    """A part of a tokenizer that does the same forty times."""
    return {part.replace("pret", "pre_t"): {"type": "Sequence", f"{part}s": [one] * 40}}


def replaced(part, pattern, content):
    return forty(part, type="Replace", pattern=pattern, content=content)


MARKED = {
    "type": "TemplateProcessing",
    "pair": [],
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
    "special_tokens": {"x": {"id": "x", "ids": [1] * 10_000, "tokens": ["x"] * 10_000}},
}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", header(b"[" * 1_000_000)),
        ("model.safetensors", header({f"tensor{n}": tensor(1) for n in range(100_000)}, bytes(4))),
        ("model.safetensors", header({f"tensor{n}": tensor(0, end=0) for n in range(10_000)})),
        ("model.safetensors", header({"tensor": tensor(1 << 40)}, bytes(4))),
        ("config.json", {"vocab_size": 1 << 34}),
        ("config.json", b"[" * 1_000_000),
        ("tokenizer.json", b"[" * 1_000_000),
        ("tokenizer_config.json", b'{"a":' * 100_000),
        ("tokenizer.json", replaced("normalizer", {"String": "1"}, "11")),
        ("tokenizer.json", replaced("normalizer", {"Regex": "x*"}, "1")),
        ("tokenizer.json", replaced("normalizer", {"String": ""}, "1")),
        ("tokenizer.json", replaced("decoder", {"String": "1"}, "11")),
        ("tokenizer.json", forty("normalizer", type="ByteLevel")),
        ("tokenizer.json", forty("pretokenizer", type="ByteLevel", add_prefix_space=False, trim_offsets=True)),
        ("tokenizer.json", {"post_processor": MARKED}),
    ],
)
def test_row_63_a_models_files_unpack_to_no_more(file, content, folder):
    if file == "tokenizer.json":  # which other classes replace in part by their own
        change_config(folder, model_type="gptj")
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    path = folder / file
    whole = content if isinstance(content, bytes) else json.dumps(json.loads(path.read_text()) | content).encode()
    path.write_bytes(whole)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grows = isinstance(content, dict) and file == "tokenizer.json"
    with pytest.raises(UserError, match="makes texts many times longer" if grows else None):
        load_policy(settings(folder))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "in KiB"


@pytest.mark.parametrize(("name", "told"), [("toaster", "no device"), ("cuda", "CUDA")])
def test_a_device_that_is_not_there_is_refused(name, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=told):
        load.choose_device(name)


def test_without_cuda_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load.choose_device("auto").type == "cpu"


# --- folders of other kinds -----------------------------------------------------------------------------------------

# What config.json says, beside weights that are never read.
CONFIGS = {
    "'bitsand": {"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}},
    "quantised already .'w4a16'": {"compression_config": {"quant_type": "w4a16"}},
    "MLX": {"quantization": {"group_size": 64, "bits": 4}},
    "is a BertForMaskedLM": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "is a Qwen2Model": {"architectures": ["Qwen2Model"]},
}
# Files beside a sound config.json.
FILES = {
    "pickled weights .* no safetensors": {"pytorch_model-00001-of-00002.bin": b""},
    "weights in a GGUF file": {"qwen-q4.gguf": b""},
    "lacks 1 file that its index names, 'model-2.st'": {
        "model.safetensors.index.json": b'{"weight_map": {"a": "model-2.st"}}'
    },
    "sentence-transformer": {"model.safetensors": b"", "modules.json": b"[]"},
    "Git LFS": {"model.safetensors": b"version https://git-lfs.github.com/spec/v1"},
}
# Files without a config.json.
BARE = {
    "adapter for 'Qwen/Q'": {"adapter_config.json": b'{"base_model_name_or_path": "Qwen/Q"}'},
    "pipeline of diffusers": {"model_index.json": b"{}"},
    "ONNX": {"model.onnx": b""},
    "weights in a GGUF file": {"a.gguf": b""},
    "it is empty": {},
    "hub's cache": {"snapshots/x/config.json": b"{}"},
    "Ollama": {"manifests/m": b""},
}


def refused_folder(folder, told, files, config):
    """A folder with these files is refused wherever a model may be named."""
    if config is not None:
        sound = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        files = files | {"config.json": json.dumps(sound | config).encode()}
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    calls = [lambda: load_policy(settings(folder)), lambda: geometry(str(folder))]
    if config is None:
        calls.append(lambda: find_checkpoint(str(folder)))
    for call in calls:
        with pytest.raises(UsageError, match=told) as caught:
            call()
        assert caught.value.fix


@pytest.mark.parametrize(("told", "config"), CONFIGS.items())
def test_a_model_of_another_kind_is_refused_by_its_config_before_loading(told, config, tmp_path):
    refused_folder(tmp_path, told, {"model.safetensors": b""}, config)


@pytest.mark.parametrize(("told", "files"), FILES.items())
def test_other_weights_than_whole_safetensors_are_refused_before_loading(told, files, tmp_path):
    refused_folder(tmp_path, told, files, {})


@pytest.mark.parametrize(("told", "files"), BARE.items())
def test_a_folder_without_a_config_is_refused_by_what_it_is(told, files, tmp_path):
    refused_folder(tmp_path, told, files, None)


def test_the_head_gets_rows_that_lie_side_by_side(folder):
    """Torch takes 300 times as long on a CPU for bf16 rows that lie apart, as the last positions of prompts do."""
    policy = load_policy(settings(folder))
    head = policy.causal_lm.get_output_embeddings()
    seen = []
    head.register_forward_hook(lambda module, given, logits: seen.append(given[0].is_contiguous()))
    ids = torch.ones(3, 5, dtype=torch.long)
    whole = policy.causal_lm(input_ids=ids).logits[:, -1:]
    last = policy.causal_lm(input_ids=ids, logits_to_keep=1).logits
    assert seen == [True, True]
    torch.testing.assert_close(last, whole)
