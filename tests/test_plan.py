"""What a model needs follows from its configuration, is what a real one takes, and leads to the best plan."""

import itertools
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ftis_node.config.settings import Settings
from ftis_node.fit.memory import MOMENT_BYTES, Setup, Workload, estimate
from ftis_node.lab.bench.model import word_tokenizer
from ftis_node.learner.optimiser import Optimiser
from ftis_node.policy import score
from ftis_node.policy.adapters import LoraConfig, get_peft_model
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.load import checkpoint_activations
from ftis_node.policy.measure import geometry, geometry_of, known_config
from ftis_node.policy.names import ALIASES
from ftis_node.policy.nf4 import quantise
from ftis_node.policy.packing import ATTENTIONS, Prefixed
from ftis_node.policy.policy import Policy
from ftis_node.policy.ready import ready
from tests.support.geometries import GSM8K, HALF, SHORT, THREE, planned
from tests.support.small_models import tiny_tokenizer

ATTENTION = ("q_proj", "v_proj")
ALL = (*ATTENTION, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIGS = {
    "qwen": Qwen2Config,
    "llama": LlamaConfig,
    "gemma": partial(Gemma3TextConfig, head_dim=32),
}
PARAMETERS = {
    "0.5b": 494_032_768,
    "1.5b": 1_543_714_304,
    "3b": 3_085_938_688,
    "7b": 7_615_616_512,
}


@pytest.fixture(autouse=True, scope="module")
def _without_hub() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftis_node.policy.measure.where_to_look", lambda source: {"local_files_only": True})
        yield


TINYLLAMA = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
)
# On an H100 with the kernels of `policy.kernels`, less what generation kept; docs/performance.md. GB of 1e9 bytes.
MEASURED = (
    (THREE, {"lora": True, "micro_batch_tokens": 4_096}, 14.4),
    (
        THREE,
        {"lora": True, "quantisation": "nf4", "gradient_checkpointing": True, "micro_batch_tokens": 8_192},
        4.32,
    ),
    (geometry_of(TINYLLAMA, ""), {"micro_batch_tokens": 16_384}, 36.4),
)


@pytest.mark.parametrize(("shape", "how", "measured"), MEASURED)
def test_fused_kernels_keep_what_was_measured(shape, how, measured):
    setup = full(**{"fused": True, "gradient_checkpointing": False} | how)
    need = estimate(shape, Workload(60, 256, 12, 24), setup, "cuda")
    gigabytes = (need.training - need.overhead) / 1e9
    assert 1 < gigabytes / measured < 1.15


# --- geometry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", PARAMETERS)
def test_the_sizes_of_qwen_are_known_without_a_network(size):
    shape = geometry(f"qwen2.5-{size}")
    assert shape.parameters == PARAMETERS[size]
    assert shape.heads * shape.head_dim == shape.hidden


def test_coder_and_instruct_have_the_shape_of_their_base():
    for alias, hub_id in ALIASES.items():
        config = known_config(alias)
        by_id = known_config(hub_id)
        assert config.to_dict() == by_id.to_dict()
    for unknown in ("tiny-a", "someone/their-model"):
        assert known_config(unknown) is None


def test_a_built_in_model_is_measured_like_any_other():
    model = Qwen2ForCausalLM(small_config("qwen"))
    shape = geometry_of(model.config, "small")
    assert shape.parameters == model.num_parameters()
    assert model.config._attn_implementation == "sdpa"
    assert shape.largest == 128 * 384
    assert geometry("tiny-a").parameters == 75_968


@pytest.mark.parametrize(
    ("targets", "rank"),
    [
        (ATTENTION, 8),
        (ALL, 16),
        (("self_attn.o_proj", "down_proj"), 4),
    ],
)
def test_lora_parameters_are_as_many_as_pefts(targets, rank):
    model = LlamaForCausalLM(small_config("llama"))
    shape = geometry_of(model.config, "small")
    tuned = prepared(model, targets, rank)
    assert shape.lora_parameters(rank, targets) == trained_in(tuned)


def trained_in(model):
    """How many numbers of a model are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_another_architecture_has_a_geometry_too():
    falcon = transformers.FalconConfig(hidden_size=64, num_attention_heads=4)
    assert not geometry_of(falcon, "falcon").packed
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100)
    shape = geometry_of(gpt2, "gpt2")
    assert shape.hidden == 64
    assert shape.layers == 2
    assert shape.kv_heads == 4
    assert shape.head_dim == 16
    assert shape.lora_parameters(2, ["c_attn"]) == 2 * 2 * (64 + 192)


SLOWER = {
    "Qwen3_5Text": {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Olmo3": {"sliding_window": 4},
    "Gemma2": {},
    "Gemma3nText": {
        "intermediate_size": [64] * 2,
        "activation_sparsity_pattern": [0.0] * 2,
        "num_kv_shared_layers": 0,
    },
}


@pytest.mark.parametrize("kind", SLOWER)
def test_a_model_that_takes_longer_says_so_and_what_it_costs(kind):
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = getattr(transformers, f"{kind}Config")
    shape = geometry_of(config(**sizes | SLOWER[kind]), "m")
    text = " ".join(planned(shape, 8, SHORT).reasons)
    assert "Transformers' modules generate" in text
    assert "30 to 50 ms a token" in text
    assert ("2.2 to 3.9 times the compute" in text) == (shape.padded != "")
    assert shape.padded or kind not in ("Qwen3_5Text", "Lfm2")
    assert "modules generate" not in " ".join(planned(HALF, 8).reasons)


# --- memory ---------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Bytes of the tensors made under it that are alive, and the most there were at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._see((args, kwargs), counts=False)  # what was there before
        out = func(*args, **(kwargs or {}))
        self._see(out, counts=True)
        self.peak = max(self.peak, self.now)
        return out

    def _see(self, values, counts):
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes() if counts else 0
                self.now += self.sizes[storage._cdata]
                weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key):
        self.now -= self.sizes.pop(key)


def small_config(kind, words=26):
    return CONFIGS[kind.partition(",")[0]](
        vocab_size=words,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=1 if kind == "gemma" else 2,
    )


def small_policy(kind, dtype, targets, four_bits):
    """A packed policy of `small_config`, with LoRA of rank 8 on `targets`, trained in full if there are none."""
    model = transformers.AutoModelForCausalLM.from_config(small_config(kind)).to(dtype)
    model = prepared(model, targets, 8)
    if four_bits:
        quantise(model, model.get_base_model().get_output_embeddings(), torch.device("cpu"), "small")
    policy = ready(Policy("small", model, tiny_tokenizer(), torch.device("cpu")))
    assert policy.packed
    policy.model.train()
    return policy


def prepared(model, targets, rank, checkpointing=False):
    """Trained in full if there are no targets, with adapters on them if there are."""
    if checkpointing:
        checkpoint_activations(model)
    if not targets:
        return model
    model.requires_grad_(False)
    lora = LoraConfig(r=rank, target_modules=list(targets), task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def peak_of_a_pass(policy, workload, groups):
    """Bytes above weights and gradients that a forward and a backward pass take. A padded one has some padding."""
    cap = workload.completion_tokens
    lengths = [cap + policy.packed] * workload.group
    if not policy.packed:
        lengths[0] = cap - 1
    completions = [np.ones(length, np.int64) for length in lengths]
    batch = [Prefixed([2] * workload.prompt_tokens, completions)] * groups
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with Alive() as alive:
        logprobs, _ = score.completion_logprobs(policy, batch, 1.0)
        logprobs.sum().backward()
    return alive.peak


@pytest.mark.parametrize(
    ("kind", "dtype", "targets", "quantisation"),
    [
        *itertools.product(("qwen",), ("float32", "bfloat16"), ((), ATTENTION, ALL), ("none",)),
        *itertools.product(("llama", "llama, padded", "gemma"), ("bfloat16",), (ALL,), ("none",)),
        ("qwen", "bfloat16", ATTENTION, "nf4"),
    ],
)
def test_activations_are_what_a_real_pass_takes(kind, dtype, targets, quantisation):
    """All are kept, and then those at the bounds of layers."""
    workload = Workload(prompt_tokens=48, completion_tokens=32, group=4, batch_groups=4)
    packed = not kind.endswith("padded")
    four_bits = quantisation == "nf4"
    setup = full(
        lora=bool(targets),
        dtype=dtype,
        quantisation=quantisation,
        micro_batch_tokens=workload.step_tokens(packed),
        generation_batch=16,
        lora_rank=8,
        lora_targets=targets,
    )
    shape = geometry_of(small_config(kind), "small")
    if not packed:
        shape = replace(shape, padded="a test")
    policy = small_policy(kind, getattr(torch, dtype), targets, four_bits)
    policy = replace(policy, packed=packed)
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(policy.causal_lm)
        need = estimate(shape, workload, replace(setup, gradient_checkpointing=checkpointing), "cpu")
        measured = peak_of_a_pass(policy, workload, groups=4)
        assert need.activations + max(need.one_layer, need.logits) == pytest.approx(measured, rel=0.1), checkpointing
    if four_bits:
        policy.model.eval()
        generating = peak_of_generating(policy, workload, rows=16)
        assert generating <= 1.1 * (need.kv_cache + need.sampling)


def without_data(model):
    """Gives a model of the meta device tensors that have a size and a dtype, and no memory. Call it in a fake mode."""
    made = {}

    def like(old):
        if not isinstance(old, torch.nn.Parameter):
            return torch.empty(old.shape, dtype=old.dtype)
        # peft makes its layers in fp32 on the meta device, and in the model's dtype on any other
        empty = torch.empty(old.shape, dtype=torch.bfloat16)
        return torch.nn.Parameter(empty, requires_grad=old.requires_grad)

    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, old in kept.items():
                if old is None:
                    continue
                if old not in made:
                    made[old] = like(old)
                kept[name] = made[old]


@pytest.mark.parametrize(
    ("name", "layers", "targets"),
    [
        pytest.param("qwen2.5-3b", 36, ATTENTION, marks=pytest.mark.slow),
        pytest.param("qwen2.5-1.5b", 28, (), marks=pytest.mark.slow),
        ("qwen2.5-1.5b", 4, ()),
    ],
)
def test_real_geometries_take_what_is_predicted(name, layers, targets):
    """Four GSM8K groups of a 3B through the very code of a step, on tensors that only know how large they are."""
    config = known_config(name)
    config.num_hidden_layers = layers
    words = 151_665
    if layers == 4:  # a real head's blocks of logits take longer than all else
        words = config.vocab_size = 10_000
    with torch.device("meta"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.set_attn_implementation([*ATTENTIONS][1])
        model = prepared(model, targets, 128, checkpointing=True)
    model.train()
    with FakeTensorMode():
        without_data(model)
        policy = Policy(name, model, word_tokenizer(words), torch.device("cpu"), packed=True)
        measured = peak_of_a_pass(policy, GSM8K, groups=4)
    setup = full(lora=bool(targets), micro_batch_tokens=4 * (512 + 12 * 256))
    need = estimate(geometry_of(config, name), GSM8K, setup, "cpu")
    bare = 2 * trained_in(model)
    predicted = need.gradients - bare + need.activations + max(need.one_layer, need.logits)
    assert predicted == pytest.approx(measured, rel=0.02)


def peak_of_generating(policy, workload, rows):
    """Bytes above the weights that so many completions at their cap take."""
    sampling = Sampling(workload.completion_tokens, 1.1, (policy.vocabulary,))
    ids = [[2 + row % 2, *[2] * (workload.prompt_tokens - 1)] for row in range(rows // workload.group)]
    with Alive() as alive:
        generate(policy, ids, group=workload.group, sampling=sampling, batch=rows)
    return alive.peak


@pytest.mark.parametrize(
    ("group", "prompt_tokens", "completion_tokens", "words"),
    [*itertools.product((1, 4), (8,), (24,), (26, 6000)), *itertools.product((1, 4), (96,), (8,), (26, 6000))],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_generating_takes_no_more_than_planned(dtype, group, prompt_tokens, completion_tokens, words):
    workload = Workload(prompt_tokens, completion_tokens, group, batch_groups=4)
    config = small_config("qwen", words)
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    policy = ready(Policy("small", model, word_tokenizer(words), torch.device("cpu")))
    assert policy.native
    need = estimate(geometry_of(config, "small"), workload, full(dtype=dtype, generation_batch=32), "cpu")
    taken = peak_of_generating(policy, workload, rows=32) / (need.kv_cache + need.sampling)
    assert (0.9 if group == 1 else 0) < taken < 1.1, "prompts that no other row has are planned"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_update_takes_in_passing_what_the_optimiser_does(dtype):
    config = small_config("qwen", 8000)  # as in real models, the embedding is the largest parameter by far
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    trained = dict(model.named_parameters())
    optimiser = Optimiser(trained, Settings(), 1e-4)
    for _ in range(2):  # the first makes the optimiser's state
        for parameter in trained.values():
            parameter.grad = torch.zeros_like(parameter)
        with Alive() as alive:
            optimiser.step(norm=1.0, scale=1.0)
    need = estimate(geometry_of(config, "small"), SHORT, full(dtype=dtype), "cpu")
    assert need.update == pytest.approx(alive.peak, rel=0.1)


def full(**changes):
    """A setup that trains in full in bf16, but for what is changed."""
    usual = {
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "micro_batch_tokens": 4096,
        "generation_batch": 288,
        "lora_rank": 128,
        "lora_targets": ATTENTION,
    }
    return Setup(**usual | changes)


def on_a_card(shape, **changes):
    """What GSM8K needs on a GPU."""
    return estimate(shape, GSM8K, full(**changes), "cuda")


def test_what_the_weights_need_follows_from_their_number():
    n = HALF.parameters
    mastered = on_a_card(HALF)
    assert mastered.weights == 2 * n
    assert mastered.master == 4 * n
    assert mastered.optimiser == 8 * n
    assert mastered.gradients == 2 * (n + HALF.vocabulary * HALF.hidden)
    plain = on_a_card(HALF, dtype="float32")
    assert plain.weights == 4 * n
    assert plain.master == 0
    assert plain.optimiser == 8 * n
    adapters = HALF.lora_parameters(128, ATTENTION)
    lora = on_a_card(HALF, lora=True)
    assert lora.weights == 2 * (n + adapters)
    assert lora.master == 4 * adapters
    assert lora.gradients == 2 * adapters
    assert lora.optimiser == 8 * adapters
    eight_bit = on_a_card(HALF, optimiser="adamw8bit")
    assert eight_bit.optimiser == round(MOMENT_BYTES["adamw8bit"] * n)


def test_the_cache_holds_every_row_at_its_longest():
    need = on_a_card(THREE, lora=True)
    assert need.kv_cache == 288 * 768 * 36 * 2 * 2 * 128 * 2
    grown = on_a_card(replace(THREE, decoded=0), lora=True)
    assert grown.kv_cache == 1.5 * need.kv_cache


def test_a_sequence_is_not_cut_however_small_the_micro_batch():
    for packed in (True, False):
        assert GSM8K.split(64, packed) == GSM8K.split(768, packed) == (512, 256)
        prompts, completions = GSM8K.split(16_384, packed)
        assert completions % 256 == 0
        assert prompts + completions <= 16_384
    whole_group = 512 + 12 * 256
    assert GSM8K.split(whole_group, True) == (512, 12 * 256)
    assert GSM8K.split(whole_group, False) == (4 * 512, 4 * 256), "each with its prompt"
