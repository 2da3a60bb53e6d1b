"""What a model needs follows from its configuration, is what a real one takes, and leads to the best plan."""

import itertools
import re
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ftis_node.config.settings import Settings
from ftis_node.fit.memory import CONTEXT_BYTES, FRAGMENTATION, MOMENT_BYTES, Setup, Workload, estimate
from ftis_node.fit.plan import MICRO_BATCH_TOKENS, Wishes, plan
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
from ftis_node.text import GB
from tests.support.small_models import tiny_tokenizer

GSM8K = Workload(prompt_tokens=512, completion_tokens=256, group=12, batch_groups=24)
SHORT = Workload(prompt_tokens=64, completion_tokens=64, group=4, batch_groups=4)
ATTENTION = ("q_proj", "v_proj")
ALL = (*ATTENTION, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIGS = {"qwen": Qwen2Config, "llama": LlamaConfig, "gemma": partial(Gemma3TextConfig, head_dim=32)}
PARAMETERS = {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "3b": 3_085_938_688, "7b": 7_615_616_512}


@pytest.fixture(autouse=True, scope="module")
def _without_hub() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftis_node.policy.measure.where_to_look", lambda source: {"local_files_only": True})
        yield


def qwen(size):
    config = known_config(f"qwen2.5-{size}")
    assert config is not None
    return geometry_of(config, f"qwen2.5-{size}")


THREE = qwen("3b")
HALF = qwen("0.5b")
MIDDLE = qwen("1.5b")

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


@pytest.mark.parametrize(("targets", "rank"), [(ATTENTION, 8), (ALL, 16), (("self_attn.o_proj", "down_proj"), 4)])
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
    assert (shape.hidden, shape.layers, shape.kv_heads, shape.head_dim) == (64, 2, 4, 16)
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


def small_policy(kind, dtype, targets, checkpointing, four_bits):
    """A packed policy of `small_config`, with LoRA of rank 8 on `targets`, trained in full if there are none."""
    model = transformers.AutoModelForCausalLM.from_config(small_config(kind)).to(dtype)
    model = prepared(model, targets, 8, checkpointing)
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


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "targets", "quantisation"),
    [
        *itertools.product(("qwen",), ("float32", "bfloat16"), ((), ATTENTION, ALL), ("none",)),
        *itertools.product(("llama", "llama, padded", "gemma"), ("bfloat16",), (ALL,), ("none",)),
        ("qwen", "bfloat16", ATTENTION, "nf4"),
    ],
)
def test_activations_are_what_a_real_pass_takes(kind, dtype, targets, quantisation, checkpointing):
    workload = Workload(prompt_tokens=48, completion_tokens=32, group=4, batch_groups=4)
    packed = not kind.endswith("padded")
    four_bits = quantisation == "nf4"
    setup = full(
        lora=bool(targets),
        dtype=dtype,
        quantisation=quantisation,
        gradient_checkpointing=checkpointing,
        micro_batch_tokens=workload.step_tokens(packed),
        generation_batch=16,
        lora_rank=8,
        lora_targets=targets,
    )
    shape = geometry_of(small_config(kind), "small")
    if not packed:
        shape = replace(shape, padded="a test")
    need = estimate(shape, workload, setup, "cpu")
    policy = small_policy(kind, getattr(torch, dtype), targets, checkpointing, four_bits)
    policy = replace(policy, packed=packed)
    measured = peak_of_a_pass(policy, workload, groups=4)
    assert need.activations + max(need.one_layer, need.logits) == pytest.approx(measured, rel=0.1)
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
    ("name", "targets"),
    [pytest.param("qwen2.5-3b", ATTENTION, marks=pytest.mark.slow), ("qwen2.5-1.5b", ())],
    ids=["3b-lora-checkpointing", "1.5b-full-checkpointing"],
)
def test_real_geometries_take_what_is_predicted(name, targets):
    """Four GSM8K groups of a 3B through the very code of a step, on tensors that only know how large they are."""
    config = known_config(name)
    with torch.device("meta"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.set_attn_implementation([*ATTENTIONS][1])
        model = prepared(model, targets, 128, checkpointing=True)
    model.train()
    with FakeTensorMode():
        without_data(model)
        policy = Policy(name, model, word_tokenizer(151_665), torch.device("cpu"), packed=True)
        measured = peak_of_a_pass(policy, GSM8K, groups=4)
    setup = full(lora=bool(targets), micro_batch_tokens=4 * (512 + 12 * 256))
    need = estimate(geometry_of(config, name), GSM8K, setup, "cpu")
    bare = 2 * trained_in(model)
    predicted = need.gradients - bare + need.activations + max(need.one_layer, need.logits)
    assert predicted == pytest.approx(measured, rel=0.02)


def peak_of_generating(policy, workload, rows):
    """Bytes above the weights that so many completions at their cap take."""
    sampling = Sampling(workload.completion_tokens, 1.1, (policy.vocabulary,))
    ids = [[2] * workload.prompt_tokens] * (rows // workload.group)
    with Alive() as alive:
        generate(policy, ids, group=workload.group, sampling=sampling, batch=rows)
    return alive.peak


@pytest.mark.parametrize(
    ("group", "prompt_tokens", "completion_tokens", "words"),
    [*itertools.product((1, 4), (8,), (64,), (26, 6000)), *itertools.product((1, 4), (96,), (8,), (26, 6000))],
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
    assert (mastered.weights, mastered.master, mastered.optimiser) == (2 * n, 4 * n, 8 * n)
    assert mastered.gradients == 2 * (n + HALF.vocabulary * HALF.hidden)
    plain = on_a_card(HALF, dtype="float32")
    assert (plain.weights, plain.master, plain.optimiser) == (4 * n, 0, 8 * n)
    adapters = HALF.lora_parameters(128, ATTENTION)
    lora = on_a_card(HALF, lora=True)
    assert lora.weights == 2 * (n + adapters)
    assert (lora.master, lora.gradients, lora.optimiser) == (4 * adapters, 2 * adapters, 8 * adapters)
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


# --- plan -----------------------------------------------------------------------------------------------------------


def planned(shape, gb, workload=GSM8K, device="cuda", *, may=(), fastest="bfloat16", **wishes):
    """A plan; may: what it may choose besides, `eight_bit` or `four_bit`. fastest: the dtype of the device."""
    choices = {"eight_bit": "optimiser" in wishes} | dict.fromkeys(may, True)
    return plan(shape, int(gb * GB), workload, Wishes(**wishes), device, **choices, dtype=fastest)


EIGHT_BIT = ("eight_bit",)
FOUR_BIT = ("four_bit",)


def test_every_step_of_the_order_is_taken_as_memory_shrinks():
    seen = []
    for gb in np.arange(40, 4, -0.02):
        p = planned(MIDDLE, gb, SHORT, may=EIGHT_BIT)
        smaller = (p.micro_batch_tokens < 1280, p.generation_batch < 48, p.fits)
        step = (p.lora, p.optimiser, p.gradient_checkpointing, *smaller)
        if step not in seen[-1:]:
            seen.append(step)
    assert seen == [
        (False, "adamw", False, False, False, True),
        (False, "adamw", True, False, False, True),
        (False, "adamw8bit", False, False, False, True),
        (False, "adamw8bit", True, False, False, True),
        (True, "adamw", False, False, False, True),
        (True, "adamw", True, False, False, True),
        (True, "adamw", True, False, True, True),
        (True, "adamw", True, True, True, True),
        (True, "adamw", True, True, True, False),
    ]


def test_four_bits_are_taken_where_two_bytes_would_crawl():
    """What 8 and 12 GB allow on GSM8K: 3B and 7B, with at least 48 completions at a time."""
    crawling = planned(THREE, 8)
    assert crawling.quantisation == "none"
    assert crawling.generation_batch < 48
    for shape, gb in ((THREE, 8), (qwen("7b"), 12)):
        chosen = planned(shape, gb, may=FOUR_BIT)
        assert (chosen.fits, chosen.lora, chosen.quantisation) == (True, True, "nf4")
        assert chosen.generation_batch >= 48
        assert chosen.micro_batch_tokens >= 2048
        assert chosen.reasons[0].startswith("LoRA on weights of four bits (NF4), because")
    asked = planned(THREE, 24, quantisation="nf4")
    assert (asked.lora, asked.quantisation) == (True, "nf4")
    assert "as it was asked for" in asked.reasons[0]
    assert "1.6 times" in asked.reasons[1]
    for none in (
        planned(THREE, 16, may=FOUR_BIT),  # it fits
        planned(THREE, 8, may=FOUR_BIT, quantisation="none"),
        planned(THREE, 8, device="cpu", may=FOUR_BIT),  # slow there
    ):
        assert none.quantisation == "none"
    assert planned(THREE, 16, fastest="float16").dtype == "float16"


def rank(chosen):
    """Where it stands in the order of ways, the best least."""
    return chosen.lora, chosen.optimiser == "adamw8bit", chosen.gradient_checkpointing, -chosen.micro_batch_tokens


@pytest.mark.parametrize(
    ("gb", "tokens", "checkpointing"), [(90, 16_384, False), (24, 4_096, False), (16, 16_384, True)]
)
def test_smaller_micro_batches_are_taken_before_checkpointing(gb, tokens, checkpointing):
    chosen = planned(THREE, gb, lora=True)
    assert (chosen.micro_batch_tokens, chosen.gradient_checkpointing, chosen.fits) == (tokens, checkpointing, True)
    text = " ".join(chosen.reasons)
    assert ("Micro-batches of 4,096 tokens, because 16,384 would keep 64.5 GB" in text) == (tokens == 4_096)
    assert ("Gradient checkpointing, because 2,048 tokens would keep 7.95 GB" in text) == checkpointing
    listed = text.count("; LoRA") + text.count(": LoRA")
    assert listed == (gb < 90) + checkpointing, "sizes of one way are not listed"


def test_a_cpu_takes_smaller_micro_batches_before_checkpointing_too():
    chosen = planned(HALF, 6, Workload(200, 96, 8, 4), "cpu", lora=True, dtype="float32")
    assert (chosen.micro_batch_tokens, chosen.gradient_checkpointing, chosen.fits) == (1_024, False, True)


def test_they_are_no_smaller_where_prompts_would_be_read_too_often():
    long = Workload(prompt_tokens=1_500, completion_tokens=100, group=12, batch_groups=24)
    plans = [planned(MIDDLE, gb, long, lora=True) for gb in np.arange(10, 60, 0.5)]
    sizes = {p.micro_batch_tokens for p in plans if not p.gradient_checkpointing}
    assert sizes == {16_384, 12_288, 8_192, 6_144}, "4,096 hold one prompt for 7 rows"


@pytest.mark.parametrize(
    ("device", "wishes", "tokens"), [("cpu", {}, 2_048), ("cuda", {"micro_batch_tokens": 8_192}, 8_192)]
)
def test_they_are_no_smaller_on_a_cpu_nor_where_a_size_is_wished_for(device, wishes, tokens):
    for gb in np.arange(30, 60, 2):
        chosen = planned(THREE, gb, device=device, lora=True, **wishes)
        assert chosen.micro_batch_tokens == tokens


@given(
    shape=st.sampled_from([HALF, MIDDLE, THREE]),
    workload=st.builds(Workload, *(st.integers(1, 4096),) * 2, st.integers(2, 64), st.integers(1, 64)),
    low=st.floats(0.5, 160),
    more=st.floats(0, 80),
    eight_bit=st.booleans(),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_more_memory_is_never_worse(shape, workload, low, more, eight_bit, device):
    may = EIGHT_BIT if eight_bit else ()
    less, much = (planned(shape, gb, workload, device, may=may) for gb in (low, low + more))
    assert much.fits or not less.fits
    assert rank(much) <= rank(less)
    for p in (less, much):
        assert p.fits == (p.memory.total <= p.budget)
        assert p.generation_batch % workload.group == 0
        assert p.micro_batch_tokens >= 64


def test_wishes_are_kept_whether_they_fit_or_not():
    wishes = {
        "lora": False,
        "dtype": "float32",
        "optimiser": "adamw8bit",
        "gradient_checkpointing": False,
        "micro_batch_tokens": 1000,
        "generation_batch": 100,
    }
    for gb in (1, 24, 500):
        chosen = planned(HALF, gb, **wishes)
        assert {name: getattr(chosen, name) for name in wishes} == wishes
        assert chosen.reasons[0] == "Full training, as it was asked for or settled before."
        assert chosen.fits == (gb > 1)


@pytest.mark.parametrize("gb", [4, 8, 12, 24, 80])
def test_some_of_a_gpu_stays_free(gb):
    need = planned(replace(THREE, decoded=0), gb, lora=True).memory  # graphs keep nothing of it
    bare = CONTEXT_BYTES["cuda"] + round((1 + FRAGMENTATION) * replace(need, overhead=0).total)
    assert need.total - bare == max(300 << 20, round(0.02 * bare))


def test_where_nothing_fits_it_says_how_much_would_do():
    small = planned(THREE, 4)
    assert (small.fits, small.micro_batch_tokens, small.generation_batch) == (False, GSM8K.longest, GSM8K.group)
    enough = re.search("so (.*?) GB", small.reasons[-1])
    assert enough is not None
    assert planned(THREE, float(enough[1])).fits


def test_small_models_compute_in_fp32_and_a_cpu_in_what_it_multiplies_fastest():
    tiny = geometry("tiny-a")
    assert planned(tiny, 24).dtype == "float32"
    assert planned(HALF, 64, device="cpu").dtype == "bfloat16"
    on_cpu = planned(HALF, 64, device="cpu", fastest="float32")
    assert (on_cpu.dtype, on_cpu.memory.master, on_cpu.lora) == ("float32", 0, True)
    assert on_cpu.reasons[0].startswith("LoRA, because without a GPU")
    assert not planned(tiny, 64, device="cpu").lora
    assert CONTEXT_BYTES["cpu"] <= on_cpu.memory.overhead


def test_a_micro_batch_is_no_larger_than_the_step():
    short = planned(HALF, 80, SHORT)
    assert short.micro_batch_tokens == 4 * (64 + 4 * 64)
    assert short.generation_batch == 48
    assert planned(HALF, 80).micro_batch_tokens == MICRO_BATCH_TOKENS["cuda"]


def test_on_a_cpu_8_bit_adamw_is_used_only_where_it_is_wished_for():
    for gb in range(5, 41):
        assert planned(MIDDLE, gb, SHORT, "cpu", may=EIGHT_BIT).optimiser == "adamw"
    assert planned(HALF, 1, device="cpu", optimiser="adamw8bit").optimiser == "adamw8bit"
