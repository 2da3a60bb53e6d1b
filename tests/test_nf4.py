"""Frozen weights in four bits beside LoRA layers, and float16 with its loss scale; on the CPU, by bitsandbytes."""

import copy
import ctypes
import gc
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from ftis_node.errors import UsageError
from ftis_node.fit.memory import NF4_BLOCK, NF4_BYTES, Setup, Workload, estimate
from ftis_node.host.quiet import without
from ftis_node.learner.loss_scale import GROW_AFTER, LARGEST, LossScale
from ftis_node.policy import nf4
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.load import load_policy, make_policy
from ftis_node.policy.measure import geometry_of
from ftis_node.worker.planning import settle
from tests.support.learners import OWN, assert_same, learner, weights_of
from tests.support.small_models import arithmetic_settings, logprob_errors, seeded, tiny_config, tiny_tokenizer


def small(dtype, width=32):
    """A random model over the tokenizer of `OWN`, LoRA beside weights of four bits."""
    settings = arithmetic_settings(model="small", lora=True, lora_rank=4, quantisation="nf4", dtype=str(dtype)[6:])
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(tiny_config(vocab_size=32, hidden_size=width, intermediate_size=2 * width))
    return make_policy(model.to(dtype).eval(), tiny_tokenizer(), settings)


def packed_modules(model):
    """The linear modules of four bits."""
    return [module for module in model.modules() if isinstance(module, nf4.NF4Linear)]


def held(module):
    """Bytes of a weight of four bits and its scales."""
    return sum(t.nbytes for t in (module.packed, module._scales.absmax, module._scales.state2.absmax))


def test_a_weight_comes_back_to_within_the_published_error_and_takes_half_a_byte():
    linear = torch.nn.Linear(512, 384)
    torch.nn.init.normal_(linear.weight)
    packed = nf4.NF4Linear(linear, torch.device("cpu"))
    error = (packed.dense() - linear.weight).pow(2).mean().sqrt()
    assert 0.08 < error.item() < 0.10, "of the deviation of normal values, in blocks of 64"
    assert held(packed) == pytest.approx(NF4_BYTES * 512 * 384, rel=0.01)


def test_gradients_are_those_of_the_dequantised_weight():
    linear = torch.nn.Linear(76, 50)
    packed = nf4.NF4Linear(linear, torch.device("cpu"))
    x = torch.randn(7, 76, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    packed(x).square().sum().backward()
    torch.nn.functional.linear(twin, packed.dense(), linear.bias).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(128, 96), (64, 64), (76, 50)])
def test_a_decoders_product_is_that_of_the_dequantised_weight(sizes, dtype):
    linear = torch.nn.Linear(*sizes).to(dtype)
    packed = nf4.NF4Linear(linear, torch.device("cpu"))
    for rows in (1, 4, 48, 300):
        x = torch.randn(rows, sizes[0]).to(dtype)
        with torch.no_grad():
            wanted = torch.nn.functional.linear(x, packed.dense(), linear.bias)
            torch.testing.assert_close(packed.product(x, linear.bias), wanted, rtol=0, atol=0)


def test_tokens_are_decoded_without_dequantising_here(monkeypatch):
    policy = small(torch.float32, 64)
    calls = []
    dense = nf4.NF4Linear.dense

    def counted(module):
        calls.append(module)
        return dense(module)

    monkeypatch.setattr(nf4.NF4Linear, "dense", counted)
    for tokens in (1, 12):
        generate(policy, [[2, 3]], group=2, sampling=Sampling(tokens, 1.0, ()), generator=seeded(0))
    assert len(calls) == 2 * len(packed_modules(policy.model)), "to read the prompt, each time"


@pytest.mark.parametrize("broken", [lambda product: product * 1.1, lambda product: 1 / 0])
def test_a_fused_kernel_that_is_wrong_or_fails_is_not_used(broken, monkeypatch):
    real = nf4.fused
    monkeypatch.setattr(nf4, "fused", lambda *args, **options: broken(real(*args, **options)))
    policy = small(torch.bfloat16, 64)
    assert not policy.native
    assert "native decoder" in policy.way


def test_a_node_samples_from_the_very_weights_that_score_it():
    settings = arithmetic_settings(model="tiny-a", lora=True, quantisation="nf4", dtype="float32")
    policy = load_policy(settings)
    assert policy.native
    assert policy.packed
    assert nf4.elements(policy.model) > 0
    assert policy.parameters() - policy.trainable() == 75_968
    prompts = [policy.tokenizer.encode(text) for text in ("12+7=", "3-4=")]
    sampling = Sampling(10, 1.0, (policy.tokenizer.eos_token_id,))
    made = generate(policy, prompts, group=8, sampling=sampling, generator=seeded(0))
    assert float(logprob_errors(policy, prompts, made, 1.0).max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_changes_the_layers_beside_and_goes_on_bit_for_bit(dtype):
    policy = small(dtype)
    original = learner(policy)
    before = weights_of(original)
    for _ in range(2):
        report = original.step(OWN)
        assert report.skipped is None
        assert 0 < report.gradient_norm < math.inf
    assert all("lora_" in name for name in before)
    after = weights_of(original)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    frozen = packed_modules(policy.model)
    kept = packed_modules(original.policy.model)
    for one, other in zip(frozen, kept, strict=True):
        assert torch.equal(one.dense(), other.dense())
    state = copy.deepcopy(original.state())
    original.step(OWN)
    resumed = learner(small(dtype))
    resumed.restore(*state, steps=2)
    resumed.step(OWN)
    assert_same(weights_of(resumed), weights_of(original))
    assert_same(resumed.state()[1], original.state()[1])


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(UsageError, match=r"NF4 .* is for frozen weights, and full training"):
        arithmetic_settings(lora=False, quantisation="nf4")
    with pytest.raises(UsageError, match="has no linear modules for NF4"):
        nf4.quantise(torch.nn.Sequential(torch.nn.Embedding(3, 4)), torch.nn.Identity(), torch.device("cpu"), "m")
    nf4.kernels.cache_clear()
    with without("bitsandbytes"), pytest.raises(UsageError, match=r"NF4 needs bitsandbytes.*pip install"):
        nf4.kernels()


def test_without_bitsandbytes_the_plan_says_so_before_anything_is_loaded():
    nf4.kernels.cache_clear()
    settings = arithmetic_settings(model="tiny-a", lora=True, quantisation="nf4")
    load = Workload(16, 16, 4, 4)
    with without("bitsandbytes"), pytest.raises(UsageError, match="NF4 needs bitsandbytes"):
        settle(settings, load, {})
    assert settle(settings, load, {})[1].quantisation == "nf4"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_of_the_file_of_16_bits_stays_mapped(tmp_path):
    config = tiny_config(vocab_size=32, hidden_size=64, intermediate_size=128)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)

    def mapped():
        return str(tmp_path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    settings = arithmetic_settings(model=str(tmp_path), lora=True, dtype="bfloat16")
    dense = load_policy(settings)
    assert mapped(), "frozen weights of 16 bits are read from their file, in place of a copy"
    del dense
    gc.collect()
    assert not mapped()
    packed = load_policy(settings.model_copy(update={"quantisation": "nf4"}))
    assert not mapped()
    assert packed.native


class _Allocator(ctypes.Structure):
    """glibc's `struct mallinfo2`; `arena` are bytes for blocks that have no pages of their own."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("others", ctypes.c_size_t * 9),
    )


def allocated():
    """Megabytes that C's allocator has from the system for blocks that have no pages of their own."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocator
    return mallinfo().arena / 1e6


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
def test_small_tensors_that_stay_do_not_make_each_dense_weight_take_new_memory():
    packed = nf4.NF4Linear(torch.nn.Linear(1024, 2048), torch.device("cpu"))
    x = torch.randn(10, 1024, requires_grad=True)
    packed(x)
    before = allocated()
    kept = []
    for _ in range(20):
        kept.append(packed(x))
        kept.append(torch.zeros(20_000))
    assert allocated() - before < 3 * 8.4, "twenty dense weights take 168 MB"


def test_memory_is_what_is_predicted():
    """The weights of a model whose sizes are powers of two, counted in tensors."""
    config = tiny_config(vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    shape = geometry_of(config, "small")
    settings = arithmetic_settings(model="m", lora=True, lora_rank=8, lora_targets=("q_proj",), quantisation="nf4")
    policy = make_policy(Qwen2ForCausalLM(config), tiny_tokenizer(), settings)
    weights = sum(p.nbytes for p in policy.model.parameters())
    weights += sum(map(held, packed_modules(policy.model)))
    setup = Setup(
        dtype="float32",
        quantisation="nf4",
        micro_batch_tokens=1024,
        generation_batch=4,
        lora=True,
        lora_rank=8,
        lora_targets=("q_proj",),
    )
    workload = Workload(48, 32, 4, 4)
    need = estimate(shape, workload, setup, "cpu")
    assert need.weights == pytest.approx(weights, rel=0.01)
    dense = estimate(shape, workload, replace(setup, quantisation="none"), "cpu")
    assert need.one_layer - dense.one_layer == pytest.approx((4 + 4 / NF4_BLOCK) * 256 * 512)


# --- float16 --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU's float16 overflows at another scale"
)
def test_an_overflow_halves_the_scale_and_the_step_is_taken_all_the_same():
    subject = learner(small(torch.float16))
    subject.loss_scale.value = 2.0**21  # two halvings above what these gradients bear
    report = subject.step(OWN)
    assert report.skipped is None
    assert subject.loss_scale.value == 2.0**19
    expected = learner(small(torch.float16)).step(OWN)
    assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=0.05)


def test_the_scale_grows_after_good_steps_and_is_kept_by_a_checkpoint():
    scale = LossScale(torch.float16)
    scale.value = LARGEST
    assert scale.overflowed(math.inf, ())
    assert scale.value == LARGEST / 2
    for _ in range(GROW_AFTER - 1):
        scale.fine()
    other = LossScale(torch.float16)
    other.restore(scale.state())
    assert other.value == LARGEST / 2
    other.fine()
    assert other.value == LARGEST
    assert not scale.overflowed(1.0, ())


def test_other_dtypes_have_no_scale():
    scale = LossScale(torch.bfloat16)
    assert not scale.overflowed(math.inf, ())
    assert scale.value == 1
    assert scale.state() == {}
