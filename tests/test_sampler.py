"""Tokens come as often as their probability says, rare ones too, and whatever the numbers no id is out of range."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from ftis_node.policy.generate import sampler
from ftis_node.policy.generate.sampler import choose, noise_of
from tests.support.small_models import seeded


def draw(logits, count, *, temperature, greedy=False, seed=0):
    """So many tokens from each row."""
    uniform = None if greedy else noise_of([seed], len(logits), count)
    token, logprob = choose(logits, uniform, temperature, logits.shape[1])
    return token.expand(-1, count), logprob.expand(-1, count)


def at(probabilities, uniform):
    """The tokens that these numbers give."""
    tokens, _ = choose(probabilities.log(), uniform, 1.0, probabilities.shape[1])
    return tokens


@pytest.mark.parametrize("vocabulary", [2, 7, 26, 300, 2048])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_many_draws_pass_a_chi_square_test(vocabulary, temperature):
    draws = 400_000
    logits = 2 * torch.randn(1, vocabulary, generator=seeded(vocabulary))

    tokens, _ = draw(logits, draws, temperature=temperature, seed=1)

    counts = np.bincount(tokens[0].numpy(), minlength=vocabulary)
    probabilities = torch.softmax(logits[0].double() / temperature, 0)
    expected = draws * probabilities.numpy()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    expected *= counts.sum() / expected.sum()
    assert chisquare(counts, expected).pvalue > 1e-3


@given(vocabulary=st.integers(1, 700), seed=st.integers(0, 1 << 32), spread=st.floats(0, 40))
def test_a_number_gives_the_token_where_the_distribution_passes_it(vocabulary, seed, spread):
    random = seeded(seed)
    probabilities = (spread * torch.randn(3, vocabulary, generator=random)).softmax(-1)
    uniform = torch.rand(3, 50, dtype=torch.float64, generator=random)

    tokens = at(probabilities, uniform)

    ends = probabilities.double().cumsum(1)
    ends /= ends[:, -1:].clone()
    starts = ends - probabilities
    assert (starts.gather(1, tokens) <= uniform + 1e-6).all()
    assert (uniform <= ends.gather(1, tokens) + 1e-6).all()
    assert (probabilities.gather(1, tokens) > 0).all()


@pytest.mark.parametrize("vocabulary", [3, 100, 2048])
def test_the_ends_of_the_unit_interval_never_give_an_impossible_token(vocabulary):
    certain = vocabulary // 2
    probabilities = torch.zeros(1, vocabulary)
    probabilities[0, certain] = 1.0
    uniform = torch.tensor([[0.0, 5e-324, 0.5, 1 - 2.0**-53]], dtype=torch.float64)
    assert (at(probabilities, uniform) == certain).all()


def test_a_token_below_the_resolution_of_fp32_is_still_drawn():
    """Behind a mass of 1 an fp32 sum does not see it; its own interval is as wide as its probability."""
    probabilities = torch.zeros(1, 4096)
    probabilities[0, 0] = 1.0
    probabilities[0, 4000] = 1e-9
    uniform = torch.tensor([[1 - 0.5e-9, 1 - 2e-9]], dtype=torch.float64)
    assert at(probabilities, uniform).tolist() == [[4000, 0]]


def test_several_chunks_are_as_good_as_one(monkeypatch):
    logits = torch.randn(10, 33, generator=seeded(0))
    tokens, logprobs = draw(logits, 3, temperature=1.3, seed=1)

    monkeypatch.setattr(sampler, "CHUNK_BYTES", 4 * 33 * 4)
    same_tokens, same_logprobs = draw(logits, 3, temperature=1.3, seed=1)

    assert torch.equal(tokens, same_tokens)
    torch.testing.assert_close(logprobs, same_logprobs)
    expected = (logits / 1.3).log_softmax(-1).gather(1, tokens)
    torch.testing.assert_close(logprobs, expected)


def test_the_numbers_of_a_prompt_follow_from_its_seed_alone():
    both = noise_of([5, 9], 3, 40)
    second = noise_of([9], 3, 40)
    assert both.dtype == torch.float64
    assert both.shape == (6, 40)
    assert torch.equal(both[3:], second)
    assert not torch.equal(both[:3], second)
    assert both.min() >= 0
    assert both.max() < 1
    assert float(both.mean()) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_become_logprobs_that_are_none(wrong, greedy):
    logits = torch.full((2, 70), wrong)
    tokens, logprobs = draw(logits, 4, temperature=1.0, greedy=greedy)
    assert (tokens >= 0).all()
    assert (tokens < 70).all()
    assert not torch.isfinite(logprobs).any()
