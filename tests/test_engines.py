"""The native engine's tokens and log-probs are transformers' own, for what it decodes itself and for all else."""

from dataclasses import replace
from functools import cache, partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    OpenAIGPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from ftis_node.errors import FtisError, UsageError
from ftis_node.packet import Completion
from ftis_node.policy.adapters import LoraConfig, get_peft_model
from ftis_node.policy.generate import cache as cache_module
from ftis_node.policy.generate import native as native_module
from ftis_node.policy.generate import prefill as prefill_module
from ftis_node.policy.generate.cache import closing_up
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.measure import geometry_of
from ftis_node.policy.policy import Policy
from ftis_node.policy.ready import ready
from tests.support.small_models import (
    KINDS,
    PROMPTS,
    logprob_errors,
    logprobs_of,
    seeded,
    tiny_config,
    tiny_policy,
    tiny_tokenizer,
    twin,
)

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GREEDY = Sampling(14, 0.8, (1, 4, 9), greedy=True)
LLAMAS = ("llama", "llama biased", "llama stretched")
DECODED = ("qwen2", "tied", "ungrouped", "lora", *LLAMAS, "mistral", "sliding qwen2", "qwen3", "gemma3")
OTHERS = ("gpt2", "gemma2", "lfm2", "capped gemma3", "dora", "dynamic")
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LAYERS = ["sliding_attention", "full_attention"]
NARROW = {"head_dim": 16, "sliding_window": 5, "layer_types": LAYERS}


CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama stretched": LlamaConfig(**SIZES, rope_parameters=STRETCHED),
    "dynamic": LlamaConfig(**SIZES, rope_parameters=DYNAMIC, max_position_embeddings=64),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "sliding qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=3, layer_types=LAYERS),
    "gemma3": Gemma3TextConfig(**SIZES, **NARROW),
    "capped gemma3": Gemma3TextConfig(**SIZES, **NARROW, final_logit_softcapping=3.0),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "gpt2": GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3),
    "gemma2": Gemma2Config(
        **SIZES, head_dim=8, sliding_window=4, final_logit_softcapping=3.0, attn_logit_softcapping=2.0
    ),
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "dora": tiny_config(vocab_size=40),
}
# What is the same everywhere in a new model is made uneven: parameters with such names, between these bounds.
UNEVEN = {
    "llama biased": ("bias", -2, 2),
    "gemma3": ("norm", -0.5, 1),
    "capped gemma3": ("norm", -0.5, 1),
    "qwen3": ("k_norm", 0.5, 2),
}
TINY = {name: KINDS[name] for name in ("tied", "lora")}
TINY |= {"qwen2": KINDS["padded"], "ungrouped": {"num_key_value_heads": 4}}


def model_of(kind):
    """A random model."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind])
        part, low, high = UNEVEN.get(kind, ("none", 0, 1))
        for name, weight in model.named_parameters():
            if part in name:
                torch.nn.init.uniform_(weight, low, high)
        if kind == "dora":
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True))
    return model.eval()


@cache
def policy_of(kind):
    if kind in TINY:
        return tiny_policy(**TINY[kind])
    return ready(Policy(kind, model_of(kind), tiny_tokenizer(), torch.device("cpu")))


def greedily(policy, group=2):
    """Groups of the most likely tokens after each prompt."""
    return generate(policy, PROMPTS, group=group, sampling=GREEDY)


def assert_same(some, others):
    for ours, theirs in zip(chain(*some), chain(*others), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.finished is theirs.finished
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def by_transformers(policy, group, sampling):
    """transformers' own `generate`, greedily, a prompt at a time."""
    made = []
    rows = policy.causal_lm.get_input_embeddings().num_embeddings
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.eos),
        pad_token_id=0,
        suppress_tokens=list(range(policy.vocabulary, rows)) or None,
    )
    for prompt in PROMPTS:
        found = policy.causal_lm.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=config,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = found.sequences[0, len(prompt) :]
        logits = torch.cat(found.logits)[:, : policy.vocabulary]
        logprobs = (logits / sampling.temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        ended = int(ids[-1]) in sampling.eos
        made.append([Completion(ids.numpy().astype(np.uint32), logprobs.numpy(), ended)] * group)
    return made


@pytest.mark.parametrize("kind", [*DECODED, *OTHERS])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(kind):
    policy = policy_of(kind)
    assert policy.native == (kind in DECODED)
    endless = by_transformers(policy, 1, replace(GREEDY, eos=(26,)))
    sampling = replace(GREEDY, eos=(int(endless[0][0].token_ids[4]), int(endless[2][0].token_ids[9])))
    ours = generate(policy, PROMPTS, group=2, sampling=sampling)
    assert min(len(completion) for group in ours for completion in group) < 14, "some end early"
    assert_same(ours, by_transformers(policy, 2, sampling))


@pytest.mark.parametrize("kind", ["qwen2", "llama biased", "gemma2", "lfm2"])
def test_sampled_logprobs_are_those_of_a_fresh_forward_pass(kind):
    policy = policy_of(kind)
    sampling = Sampling(14, 1.3, (1, 2, 3))
    groups = generate(policy, PROMPTS, group=6, sampling=sampling, generator=seeded(1))
    assert len({len(completion) for completion in chain(*groups)}) > 4
    assert logprob_errors(policy, PROMPTS, groups, sampling.temperature).max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen2", "lora", "qwen3", "gemma3"])
def test_bf16_differs_from_a_fresh_forward_pass_by_rounding_only(kind):
    policy = twin(policy_of(kind))
    policy.model.to(torch.bfloat16)
    groups = generate(policy, PROMPTS, group=8, sampling=Sampling(14, 1.0, (1,)), generator=seeded(1))
    assert logprob_errors(policy, PROMPTS, groups, 1.0).mean() < 0.03


@pytest.mark.parametrize("group", [1, 5])
def test_when_rows_are_dropped_changes_nothing(group, monkeypatch):
    prompts = [[3 + row % 20, 4, *[5] * (row % 4)] for row in range(30)]
    monkeypatch.setattr("ftis_node.policy.generate.decoder._PART", 5)
    policy = policy_of("qwen2")
    sampling = Sampling(20, 1.0, tuple(range(1, 9)), greedy=group == 1)

    def made(gaps):
        monkeypatch.setattr(native_module._Decoding, "gaps", gaps)
        return generate(policy, prompts, group=group, sampling=sampling, generator=seeded(2))

    groups = made(gaps=0.001)
    assert logprob_errors(policy, prompts, groups, 1.0).max() < 1e-4
    if sampling.greedy:
        assert_same(groups, made(gaps=2.0))


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "lfm2"])
def test_prompts_that_are_read_a_few_at_a_time_are_read_as_well(kind, monkeypatch):
    policy = policy_of(kind)
    whole = greedily(policy)
    passes = []
    watched = policy.causal_lm.register_forward_pre_hook(
        lambda _, __, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr(prefill_module, "PREFILL_TOKENS", {"cpu": 3 * max(len(prompt) for prompt in PROMPTS)})
    assert_same(greedily(policy), whole)
    watched.remove()
    assert passes[:2] == ([4, 8] if kind == "lfm2" else [3, 1]), "a cache that cannot be joined is made at once"


def test_a_device_that_cannot_do_what_the_decoder_asks_leaves_the_model_alone(monkeypatch):
    def unsupported(*_):
        raise RuntimeError("not implemented for this device")

    policy = policy_of("qwen2")
    with monkeypatch.context() as device:
        device.setattr(cache_module, "_products", unsupported)
        other = ready(twin(policy))
        assert not other.native
        ours = greedily(other)
    assert_same(ours, greedily(policy))


@pytest.mark.parametrize("kind", ["qwen2", "lora", "dynamic"])
def test_training_goes_on_after_generating(kind):
    """Tensors made in inference mode cannot take part in a backward pass."""
    policy = twin(policy_of(kind))
    generate(policy, PROMPTS, group=2, sampling=Sampling(40, 1.0, (26,)), generator=seeded(1))
    logprobs_of(policy, PROMPTS, [np.array([3, 4])] * 4, 1.0).sum().backward()


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_generating_repeats_itself_and_leaves_the_global_state_alone(kind):
    policy = policy_of(kind)
    sampling = Sampling(10, 1.0, (1,))
    before = torch.get_rng_state()
    made = [generate(policy, PROMPTS, group=4, sampling=sampling, generator=seeded(seed)) for seed in (7, 7, 8)]
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(made[0], made[1])
    with pytest.raises(AssertionError):
        assert_same(made[0], made[2])


def test_weights_that_diverged_are_told_from_a_dtype_that_is_too_small():
    policy = twin(policy_of("qwen2"))
    policy.model.to(torch.float16)
    with torch.no_grad():
        policy.causal_lm.get_output_embeddings().weight.fill_(6e4)
        policy.causal_lm.get_input_embeddings().weight.mul_(1e3)
    with pytest.raises(UsageError, match=r"not finite in float16, though its weights are.*--set dtype=bfloat16"):
        greedily(policy)
    with torch.no_grad():
        policy.causal_lm.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(FtisError, match="diverged"):
        greedily(policy)


def test_a_model_whose_past_is_of_its_own_kind_is_refused():
    small = {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    }
    config = Mamba2Config(vocab_size=40, hidden_size=32, num_hidden_layers=2, **small)
    policy = Policy("m", AutoModelForCausalLM.from_config(config), tiny_tokenizer(), torch.device("cpu"))
    older = OpenAIGPTConfig(vocab_size=40, n_embd=32, n_layer=2, n_head=2)
    for refused in (
        partial(ready, policy),
        partial(geometry_of, config, "m"),
        partial(geometry_of, older, "m"),
    ):
        with pytest.raises(UsageError, match="m keeps its past in a way of its own"):
            refused()


@given(alive=st.lists(st.booleans(), min_size=1, max_size=40))
def test_closing_up_keeps_every_row_and_moves_none_that_need_not(alive):
    order = closing_up(np.array(alive))
    assert sorted(order.tolist()) == np.flatnonzero(alive).tolist()
    stay = order == np.arange(len(order))
    assert stay.sum() == sum(alive[: len(order)])
