"""Packing and the native decoder are used where they are right, in bf16 too, and refused where they are not."""

import sys
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import (
    AttentionInterface,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Qwen2ForCausalLM,
)
from transformers.models.qwen2 import modeling_qwen2

from ftis_node.errors import UsageError
from ftis_node.policy import packing, score
from ftis_node.policy.adapters import LoraConfig, get_peft_model
from ftis_node.policy.packing import Packing, pack
from ftis_node.policy.policy import Policy
from ftis_node.policy.ready import ready
from ftis_node.worker.engine import Engine
from tests.support.faults import FAULTS, in_decoder, in_packing
from tests.support.small_models import arithmetic_settings, tiny_config, tiny_policy, tiny_tokenizer

in_either_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def model(spread, dtype, layers=28, kind=Qwen2ForCausalLM):
    """As deep as real ones, and with as sharp logits where `spread` is large."""
    torch.manual_seed(0)
    config = tiny_config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        max_position_embeddings=1024,
        initializer_range=spread,
    )
    return kind(config).to(dtype)


def deep(causal_lm, **more):
    return Policy("deep", causal_lm, tiny_tokenizer(), torch.device("cpu"), **more)


def made(*args, **kwargs):
    return ready(deep(model(*args, **kwargs)))


@pytest.mark.parametrize("spread", [0.02, pytest.param(0.1, marks=pytest.mark.slow)])
@in_either_dtype
def test_deep_models_with_sharp_logits_are_packed_and_decoded_natively_in_bf16_too(spread, dtype):
    policy = made(spread, dtype)
    assert policy.packed
    assert policy.native, policy.way
    assert "Sequences are packed (log-probs differ by" in policy.way
    assert "deep generates by the native decoder (log-probs differ by" in policy.way


def repacked(laid_out, packing):
    return laid_out._replace(inputs={**laid_out.inputs, "packing": packing})


def of_the_neighbour(*args):
    """The last completion sees the first prompt in place of its own."""
    packed = pack(*args)
    packing = packed.inputs["packing"]
    owner = packing.owner.copy()
    owner[-1] = 0
    return repacked(packed, replace(packing, owner=owner))


class Leaking(Packing):
    def mask(self, window):
        mask = super().mask(window)
        width = mask.shape[2]
        mask[..., -width:] |= torch.ones(width, width, dtype=torch.bool).tril(1)
        return mask


def with_a_leak(*args):
    """Each token sees the next one of its completion."""
    packed = pack(*args)
    packing = packed.inputs["packing"]
    return repacked(packed, Leaking(**{field.name: getattr(packing, field.name) for field in fields(packing)}))


@pytest.mark.parametrize("broken", [of_the_neighbour, with_a_leak])
@in_either_dtype
def test_a_layout_that_is_wrong_is_refused_in_bf16_too(broken, dtype, monkeypatch):
    monkeypatch.setattr(score, "pack", broken)
    policy = made(0.1, dtype)
    assert not policy.packed
    assert policy.native
    assert "padded, which takes longer, for packing gives something else (log-probs differ by" in policy.way
    assert policy.causal_lm.config._attn_implementation == "sdpa"


def ways_beside(fault, make):
    """Of two fast paths the one with the fault is not taken: what the policy says of packing, and of its decoder."""
    with in_packing(fault):
        padded = make()
    assert (padded.packed, padded.native) == (False, True), padded.way
    with in_decoder(fault):
        slow = make()
    assert (slow.packed, slow.native) == (True, False), slow.way
    return padded.way, slow.way


@pytest.mark.parametrize("fault", FAULTS)
@in_either_dtype
def test_each_fault_of_a_fast_path_ends_that_path_alone(dtype, fault):
    packing, decoder = ways_beside(fault, lambda: made(0.2, dtype, 4))
    assert "padded, which takes longer, for packing gives something else (log-probs differ by" in packing
    assert "transformers' modules, which takes longer, for the native decoder gives something else" in decoder


def gemma():
    """Rounding in bf16 moves its log-probs further than some faults do, as a real one's."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=26,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        query_pre_attn_scalar=16,
        initializer_range=0.4,
        eos_token_id=1,
        pad_token_id=0,
    )
    return deep(Gemma3ForCausalLM(config).bfloat16())


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_from_the_rounding_of_the_weights(fault):
    ways_beside(fault, lambda: ready(gemma()))


def test_rounding_of_the_weights_ends_no_fast_path_and_a_window_that_is_left_out_does(monkeypatch):
    policy = ready(gemma())
    assert policy.packed, policy.way
    assert policy.native, policy.way
    right = Packing.mask
    monkeypatch.setattr(Packing, "mask", lambda self, window: right(self, None))
    assert not ready(gemma()).packed


def test_a_model_that_only_generates_computes_no_gradient():
    policy = gemma()
    gradients = []
    for parameter in policy.model.parameters():
        parameter.register_hook(gradients.append)
    assert ready(policy, trains=False).native
    assert not gradients
    assert ready(policy).native
    assert gradients


class OfOneSize(Gemma3ForCausalLM):
    """A model that cannot be made with fewer layers."""

    def __init__(self, config):
        super().__init__(config)
        self.layer = self.model.layers[5]


def test_windows_that_cannot_be_tried_take_no_fast_path():
    policy = ready(deep(OfOneSize(gemma().causal_lm.config).bfloat16()))
    assert not policy.packed
    assert not policy.native
    assert policy.way.endswith("for its windows cannot be tried.")


def test_a_model_with_eyes_is_tried_too():
    text = gemma().causal_lm.config
    eyes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=eyes, mm_tokens_per_image=4)
    seeing = deep(Gemma3ForConditionalGeneration(config).bfloat16())
    with in_packing(FAULTS[1]):
        policy = ready(seeing)
    assert "0.05 is allowed" in policy.way, policy.way
    assert ready(seeing).packed


class Neighbourly(Qwen2ForCausalLM):
    """A model whose tokens look at those next to them in the row, whichever sequence they are of."""

    def __init__(self, config):
        super().__init__(config)

        def mix(module, args, out):
            has_neighbour = torch.arange(out.shape[1]) > 0
            return out + 0.5 * out.roll(1, 1) * has_neighbour[:, None]

        self.model.embed_tokens.register_forward_hook(mix)


@in_either_dtype
def test_a_model_that_depends_on_neighbours_in_the_row_is_padded(dtype):
    policy = made(0.2, dtype, 4, Neighbourly)
    assert not policy.packed, policy.way


class Scaled(Qwen2ForCausalLM):
    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        out = super().forward(input_ids, past_key_values=past_key_values, **kwargs)
        out.logits = out.logits * 0.5
        return out


@in_either_dtype
def test_a_model_that_changes_its_logits_after_the_head_is_refused_in_bf16_too(dtype):
    with pytest.raises(UsageError, match="changes its logits"):
        made(0.1, dtype, 28, Scaled)


def test_a_model_too_large_for_its_dtype_is_called_that():
    def grown(dtype, factor):
        large = model(0.1, dtype, 4)
        with torch.no_grad():
            large.model.layers[1].mlp.down_proj.weight *= factor
        return ready(deep(large))

    assert grown(torch.float32, 3e7).packed
    with pytest.raises(UsageError, match=r"deep is not finite in float16, though .* --set dtype=bfloat16"):
        grown(torch.float16, 6e4)
    with pytest.raises(UsageError, match=r"deep is not finite in float32\. .* damaged"):
        grown(torch.float32, torch.nan)


class Rival:
    """liger-kernel's functions as torch computes them: Triton needs a GPU. `off` is added to what a norm gives."""

    def __init__(self, off):
        def norm(x, weight, eps, *_):
            return functional.rms_norm(x, weight.shape, weight, eps) + off * x.detach()

        self.LigerRMSNormFunction = SimpleNamespace(apply=norm)
        self.LigerSiLUMulFunction = SimpleNamespace(apply=lambda gate, up, *_: functional.silu(gate) * up)
        self.LigerRopeFunction = SimpleNamespace(apply=None)  # a tensor on the CPU takes the model's own


@in_either_dtype
def test_fused_kernels_are_used_where_they_give_the_same(dtype, monkeypatch):
    rope = modeling_qwen2.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", rope)  # to have it back
    for off, used in ((0.5, False), (0.0, True), (0.0, True)):
        monkeypatch.setitem(sys.modules, "liger_kernel.ops", Rival(off))
        policy = ready(deep(model(0.1, dtype, 4), graphs=True))
        said = {True: "with", False: "without"}[used]
        assert f"{said} liger-kernel's fused kernels (log-probs differ by" in policy.way
        layer = policy.causal_lm.model.layers[0]
        replaced = ["forward" in vars(one) for one in (layer.input_layernorm, layer.mlp, layer)]
        assert replaced == [used, used, False]
        taken = modeling_qwen2.apply_rotary_pos_emb
        assert (getattr(taken, "__wrapped__", None) is rope) == used


@pytest.mark.parametrize("graphs", [True, False])
def test_without_liger_kernel_or_without_the_wish_modules_stay_as_they_are(graphs, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None if graphs else Rival(0.0))
    policy = ready(deep(model(0.1, torch.bfloat16, 2), graphs=graphs))
    assert ("without liger-kernel's fused kernels (" in policy.way) == graphs
    assert not any("forward" in vars(module) for module in policy.model.modules())


class Backwards(torch.autograd.Function):
    """A kernel that is right forwards only."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


@in_either_dtype
def test_a_kernel_whose_gradient_is_wrong_is_refused(dtype, monkeypatch):
    right = packing.ATTENTIONS["ftis_tables"]
    wrong = partial(packing._attention, lambda *args: Backwards.apply(right(*args)))
    AttentionInterface.register("ftis_tables", wrong)
    try:
        assert "packing gives something else (the gradient differs by" in made(0.1, dtype).way
        lora = get_peft_model(model(0.1, dtype, 2), LoraConfig(r=2, target_modules=["q_proj"]))
        assert "the gradient differs by" in ready(deep(lora)).way
    finally:
        AttentionInterface.register("ftis_tables", partial(packing._attention, right))


def test_the_way_is_told_when_a_model_is_loaded():
    told = Engine().load(arithmetic_settings(), "arithmetic").plan.reasons[-1]
    assert told.startswith("Sequences are packed (")
    assert "native decoder" in told


def test_why_a_model_is_padded_is_told(monkeypatch):
    policy = tiny_policy()

    def fail(*_, **__):
        raise TypeError("forward() got an unexpected keyword argument 'packing'")

    packed_only = partial(packing._attention, fail)
    monkeypatch.setitem(AttentionInterface._global_mapping, "ftis_tables", packed_only)
    assert "(forward() got an unexpected keyword argument" in ready(replace(policy, packed=False)).way
