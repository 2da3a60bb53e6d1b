"""Scoring gives the log-probs and gradients of a plain softmax, in chunks, whatever shares the batch."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ftis_node.errors import UsageError
from ftis_node.lab.bench.model import word_tokenizer
from ftis_node.policy import packing, score
from ftis_node.policy.packing import ATTENTIONS, Prefixed, pack
from ftis_node.policy.policy import Policy
from ftis_node.policy.ready import ready
from tests.pretend.device import by_sequence
from tests.support import small_models
from tests.support.small_models import KINDS, PROMPTS, logprobs_of, of_kind, plain_logprobs, twin

assert_close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-5)
IDS = [
    [1],
    [4, 4, 9, 22, 1],
    [3, 0, 25, 8, 8, 8, 8, 1],
    [2, 3],
]
COMPLETIONS = [np.array(ids, np.uint32) for ids in IDS]
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def gradients(policy, logprobs):
    """Gradients of an uneven sum of the log-probs, by parameter."""
    policy.model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 2, logprobs.numel())
    (logprobs * weights).sum().backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def assert_gradients_close(ours, plain, loosely=1.0):
    assert ours
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, atol=2e-4 * loosely, rtol=1e-4 * loosely, msg=name)


def scored(policy, groups, temperature):
    return score.completion_logprobs(policy, groups, temperature)[0]


def of_copies(policy, groups, temperature):
    """Plain log-probs, every completion with a copy of its prompt."""
    prompts = []
    completions = []
    for group in groups:
        prompts += [group.prompt] * len(group.completions)
        completions += group.completions
    return plain_logprobs(policy, prompts, completions, temperature)


def group(prompt, *completions):
    return Prefixed(prompt, [np.array(ids) for ids in completions])


GROUPS = [
    group([5, 9, 14], [1], [4, 4, 9, 22, 1], [3, 2]),
    group([20], [7]),
    group([7, 7, 8, 3, 2, 25, 11], [2, 3, 4], [2, 3, 5]),
]
ONE_TOKEN = [group([5, 9], [1], [3]), group([4], [2])]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@of_each_kind
def test_a_prompt_shared_by_its_group_gives_a_plain_softmax_over_the_valid_vocabulary(kind, temperature):
    shared = of_kind(kind)
    apart = replace(twin(of_kind(kind)), packed=False)
    assert shared.packed

    ours, entropy = score.completion_logprobs(shared, GROUPS, temperature)

    assert ours.dtype == torch.float32
    plain = of_copies(apart, GROUPS, temperature)
    assert_close(ours, plain)

    padded, padded_entropy = score.completion_logprobs(apart, GROUPS, temperature)
    assert_close(padded, plain)
    assert_close(entropy, padded_entropy)

    assert_gradients_close(gradients(shared, ours), gradients(apart, plain))


@of_each_kind
def test_given_tokens_are_read_and_not_predicted(kind):
    packed = of_kind(kind)
    padded = replace(twin(of_kind(kind)), packed=False)
    long = np.array([4, 4, 9, 22, 1, 8, 3])
    given = np.isin(np.arange(7), [1, 2, 4])
    groups = [
        Prefixed([5, 9], [long[:5], np.array([3, 2])], [given[:5], None]),
        Prefixed([7], [long], [given]),
    ]
    predicted = np.concatenate(
        [
            ~given[:5],
            [True, True],
            ~given,
        ]
    )

    plain = of_copies(padded, groups, 0.7)[torch.from_numpy(predicted)]
    ours = scored(packed, groups, 0.7)
    assert ours.shape == (2 + 2 + 4,)
    assert_close(ours, plain)
    assert_close(scored(padded, groups, 0.7), plain)
    assert_gradients_close(gradients(packed, ours), gradients(padded, plain))


def test_groups_of_one_token_completions_only_can_be_scored():
    policy = of_kind("full")
    assert_close(scored(policy, ONE_TOKEN, 1.0), of_copies(policy, ONE_TOKEN, 1.0))


def in_blocks(monkeypatch, tokens, columns, kept=0):
    """Logits of so many tokens by so many columns at a time; kept: bytes of them that may be."""
    monkeypatch.setitem(score.BLOCK_TOKENS, "cpu", tokens)
    monkeypatch.setitem(score.BLOCK_BYTES, "cpu", 4 * tokens * columns)
    monkeypatch.setattr(score, "CHUNK_BYTES", kept)


@pytest.mark.parametrize("block", [(1, 7), (3, 26), (4096, 26)])
def test_the_entropy_is_that_of_what_each_token_was_drawn_from(block, monkeypatch):
    policy = of_kind("padded")
    in_blocks(monkeypatch, *block)

    _, entropy = score.completion_logprobs(policy, [group([5, 9], [4, 4, 9])], 0.7)

    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[5, 9, 4, 4]])).logits
    of_tokens = logits[0, 1:, : policy.vocabulary] / 0.7
    drawn_from = torch.distributions.Categorical(logits=of_tokens)
    assert_close(entropy, drawn_from.entropy())
    assert not entropy.requires_grad


def other_model(config):
    """A small random model of another family, as it is loaded."""
    torch.manual_seed(0)
    policy = Policy(
        config.model_type,
        transformers.AutoModelForCausalLM.from_config(config),
        small_models.tiny_tokenizer(),
        torch.device("cpu"),
    )
    return ready(policy)


SIZES = {
    "vocab_size": 26,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WIDE = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.3}
LAYERS = ["sliding_attention", "full_attention"]
GPT2 = {"vocab_size": 26, "n_embd": 32, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        (transformers.GPT2Config(**GPT2, initializer_range=0.3), True),  # learned positions and dropout
        (transformers.PhiConfig(**WIDE, resid_pdrop=0.5, attention_dropout=0.5), True),  # a bias in the head
        (transformers.LlamaConfig(**WIDE, attention_dropout=0.5), True),
        (transformers.MistralConfig(**WIDE, sliding_window=4), True),
        (transformers.Gemma2Config(**WIDE, head_dim=8, sliding_window=4, final_logit_softcapping=3.0), False),
        (transformers.Gemma2Config(**WIDE, head_dim=8, sliding_window=64, attn_logit_softcapping=0.5), False),
        (transformers.GraniteConfig(**WIDE, logits_scaling=3.0), True),
        (transformers.CohereConfig(**WIDE, logit_scale=0.5), True),
        (transformers.BloomConfig(vocab_size=26, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3), False),
        (transformers.Phi3Config(**WIDE, sliding_window=3, pad_token_id=0), True),
        # in one layer
        (transformers.Qwen2Config(**WIDE, use_sliding_window=True, sliding_window=9, max_window_layers=1), True),
        (transformers.Gemma3TextConfig(**WIDE, head_dim=8, sliding_window=2, layer_types=LAYERS), True),
        (transformers.Olmo3Config(**WIDE, sliding_window=4, layer_types=LAYERS), True),
    ],
    ids=lambda part: getattr(part, "model_type", ""),
)
def test_other_families_are_packed_where_that_is_right_and_padded_where_not(config, packed):
    policy = other_model(config)
    assert policy.packed == packed
    other = twin(policy)
    policy.model.train()  # no dropout is left that training could switch on

    ours = scored(policy, GROUPS, 1.3)
    plain = of_copies(other, GROUPS, 1.3)
    torch.testing.assert_close(ours, plain, atol=5e-5, rtol=1e-4)
    assert_gradients_close(gradients(policy, ours), gradients(other, plain), loosely=10.0)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 64])
@pytest.mark.parametrize("groups", [GROUPS, ONE_TOKEN], ids=["", "one token each"])
def test_attention_over_sequences_as_they_lie_is_that_over_tables(groups, window, monkeypatch):
    """FlashAttention, in whose place a loop over the sequences computes what its documentation says."""
    monkeypatch.setattr(packing, "varlen_attn", by_sequence)
    layout = pack(groups, torch.device("cpu"))
    torch.manual_seed(0)
    tokens = layout.inputs["input_ids"].numel()
    inputs = [torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]

    lie = layout.inputs["packing"]
    runs, tables = (way(lie, *inputs, 0.3, window) for way in ATTENTIONS.values())

    assert_close(runs, tables, atol=1e-6)
    weights = torch.randn(runs.shape)
    slopes = [torch.autograd.grad((out * weights).sum(), inputs) for out in (runs, tables)]
    assert_close(*slopes, atol=1e-5)


def test_dropout_that_is_only_a_number_is_switched_off_too():
    """OPT hands its own attribute to a function; in training mode it would come back."""
    config = transformers.OPTConfig(
        **SIZES,
        ffn_dim=48,
        word_embed_proj_dim=32,
        dropout=0.5,
    )
    policy = other_model(config)
    with torch.no_grad():
        before = scored(policy, GROUPS, 1.0)
        policy.model.train()
        after = scored(policy, GROUPS, 1.0)
    assert torch.equal(after, before)


def test_a_model_that_cannot_be_scored_is_refused_with_a_sentence():
    few_positions = transformers.GPT2Config(**GPT2, n_positions=8)
    with pytest.raises(UsageError, match="cannot be scored"):
        other_model(few_positions)

    llama_4 = transformers.Llama4TextConfig(
        **WIDE,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
    )
    with pytest.raises(UsageError, match=r"layers come with its head only.*for example Llama 3"):
        other_model(llama_4)


@pytest.mark.parametrize(
    ("tokens", "columns", "kept"),
    [
        (1, 26, 0),
        (3, 1, 0),
        (15, 25, 0),
        (16, 13, 0),
        (17, 26, 1 << 20),
        (3, 26, 1 << 20),
    ],
)
def test_the_blocks_of_the_logits_do_not_matter(tokens, columns, kept, monkeypatch):
    policy = of_kind("padded")
    whole = logprobs_of(policy, PROMPTS, COMPLETIONS, 0.5)
    expected = gradients(policy, whole)

    in_blocks(monkeypatch, tokens, columns, kept)
    parts = logprobs_of(policy, PROMPTS, COMPLETIONS, 0.5)

    assert_close(parts, whole, atol=1e-6, rtol=1e-6)
    assert_gradients_close(gradients(policy, parts), expected, loosely=0.1)


def test_a_token_as_good_as_certain_keeps_its_gradient_in_half_precision():
    """Its slope is 1 − p, which is lost if p is rounded first."""
    half = partial(torch.tensor, dtype=torch.bfloat16, requires_grad=True)
    hidden = half([[8.0, 1.0]])
    weight = half([[1.0, 0.0], [0.0, 1.0]])

    logprob, _ = score._Head.apply(hidden, weight, None, torch.tensor([0]), 2, 1.0, None)
    logprob.sum().backward()

    slope = 1 - 1 / (1 + np.exp(-7.0))
    assert float(hidden.grad[0, 0]) == pytest.approx(slope, rel=0.01)
    assert float(weight.grad[0, 0]) == pytest.approx(8 * slope, rel=0.01)


some_ids = partial(st.lists, st.integers(0, 25), min_size=1)
samples = st.tuples(some_ids(max_size=10), some_ids(max_size=8))


@settings(max_examples=30)
@given(st.lists(samples, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_sample_scores_the_same_alone_and_in_any_company(batch, rng):
    policy = of_kind("padded")

    def each(chosen):
        groups = [group(*sample) for sample in chosen]
        lengths = [len(completion) for _, completion in chosen]
        with torch.no_grad():
            return scored(policy, groups, 1.0).split(lengths)

    rng.shuffle(batch)
    for sample, company in zip(batch, each(batch), strict=True):
        (alone,) = each([sample])
        assert_close(company, alone, atol=5e-5)


class _Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves, _ = tree_flatten(out)
        for tensor in leaves:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_matrix_of_all_tokens_by_the_vocabulary_ever_exists(monkeypatch):
    words = 3000
    chunk = 8
    hidden = 16
    in_blocks(monkeypatch, chunk, 1000)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    policy = small_models.tiny_policy(tokenizer=word_tokenizer(words), vocab_size=words, **sizes)
    completions = list(np.arange(200).reshape(10, 20))

    with _Largest() as largest:
        with small_models.held_for_backward() as held:
            logprobs = logprobs_of(policy, [[1, 2]] * 10, completions, 1.0)
        logprobs.sum().backward()

    assert 10 * chunk < 200, "the test would see it"
    assert largest.elements <= max(chunk * 1000, words * hidden)
    assert max(held) <= words * hidden, "the head itself is kept, no logits are"
