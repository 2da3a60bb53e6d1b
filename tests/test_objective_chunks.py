"""The objective over chunks: text that a generator with another tokenizer cut elsewhere."""

import math

import pytest
import torch

from ftis_node.objective import PRESETS, Diagnostics
from ftis_node.objective.diagnostics import TOLERANCE, WHOLE_POWER
from ftis_node.step_report import BETS
from ftis_node.swarm.claims import DISPROVED, DOUBTED, Claims
from tests.support.objective_batches import add, graded, packed, termed

LENGTHS = torch.tensor([3, 2, 4])
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4])
# Chunks of the samples' tokens: 2 + 1, 2, 1 + 1 + 2.
CHUNKS = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5, 5])


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    new = -torch.rand(9, generator=generator) * 3
    return {
        "trainer_logprobs": new.requires_grad_(),
        "start_logprobs": new.detach() + 0.1 * torch.randn(9, generator=generator),
    }


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_with_one_token_a_chunk_it_is_the_objective_over_tokens_bit_for_bit(name):
    found = []
    for chunks in (None, torch.arange(9)):
        tokens = drawn()
        terms = termed(
            PRESETS[name],
            **tokens,
            sampler_logprobs=tokens["start_logprobs"] - torch.linspace(-1, 1, 9),
            lengths=LENGTHS,
            advantages=ADVANTAGES,
            ended=torch.tensor([True, False, True]),
            own=torch.tensor([True, False, False]),
            gate=-2.0,
            chunks=chunks,
        )
        terms.value.sum().backward()
        figures = [value.detach() for value in vars(terms).values()]
        found.append([tokens["trainer_logprobs"].grad, *figures])

    for plain, chunked in zip(*found, strict=True):
        assert torch.equal(plain, chunked)


def test_by_hand():
    """Two tokens in one chunk: log ρ = −1 − 2 + 2.5 = −0.5, which is the weight of both."""
    batch = packed([[-1.0, -2.0, -0.5]], [2.0], generator=[[-2.5, -0.7]], chunks=[0, 0, 1])

    terms, gradient = graded(PRESETS["ftis"], batch)

    d = torch.tensor([-0.5, 0.2], dtype=torch.float64)
    weights = d[[0, 0, 1]].exp()
    torch.testing.assert_close(terms.importance, weights)
    torch.testing.assert_close(terms.value.detach(), (2.0 * weights.sum() / 3)[None])
    torch.testing.assert_close(gradient, 2.0 * weights / 3)
    torch.testing.assert_close(terms.divergence, (torch.expm1(-d) + d).mean()[None])
    torch.testing.assert_close(terms.sample_log_ratio, torch.tensor([-0.3], dtype=torch.float64))


@pytest.mark.parametrize(("first", "clipped"), [(-3.001, False), (-3.5, True)])
def test_gspo_says_clipped_where_its_gradient_ends(first, clipped):
    """R = 1 in the first case: log ρ of the chunks is 0.001 and −0.001."""
    batch = packed(
        [[-1.0] * 4],
        [2.0],
        generator=[[first, -0.999]],
        chunks=[0, 0, 0, 1],
        own=[False],
    )
    terms, gradient = graded(PRESETS["gspo"], batch)
    assert terms.clipped.eq(clipped).all()
    assert gradient.eq(0.0).eq(clipped).all()


@pytest.mark.parametrize("name", ["ftis", "vis", "nois", "ftis-author"])
def test_the_gradient_is_that_of_the_value(name):
    """Against finite differences of the surrogate; weights and filter are constants of the step."""
    start = drawn(3)["start_logprobs"].double()
    claims = -torch.rand(6, generator=torch.Generator().manual_seed(4)).double() * 4

    def value(new):
        terms = termed(
            PRESETS[name],
            trainer_logprobs=new,
            start_logprobs=start,
            sampler_logprobs=claims,
            chunks=CHUNKS,
            lengths=LENGTHS,
            advantages=ADVANTAGES.double(),
            ended=torch.tensor([True, False, False]),
        )
        return terms.value.sum()

    assert torch.autograd.gradcheck(value, (start.clone().requires_grad_(),), eps=1e-6, atol=1e-6)


def test_the_vanilla_surrogate_counts_a_chunk_once():
    batch = packed([[-1.0, -2.0]], [1.0], generator=[[-3.1]], chunks=[0, 0])
    terms = termed(PRESETS["vis"], **batch)
    assert terms.value.item() == pytest.approx(math.exp(0.1) / 2)


def test_figures_of_chunked_samples_are_of_whole_samples_and_the_others_of_tokens():
    """Of three samples the second, of author a as the first, is not chunked; the third is b's."""
    diagnostics = Diagnostics()
    claims = torch.tensor([-1.0, -0.5, -2.0, -0.1, -0.2, -3.0])
    batch = drawn() | {"sampler_logprobs": claims, "lengths": LENGTHS, "advantages": ADVANTAGES}
    terms = termed(PRESETS["ftis"], **batch, chunks=CHUNKS)
    add(diagnostics, terms, batch, ["a", "a", "b"], chunked=torch.tensor([True, False, True]))
    diagnostics.unreadable["b"] = 2
    diagnostics.unreadable_judged["b"] = 1

    sources = diagnostics.summary().sources

    starts = batch["start_logprobs"].split(LENGTHS.tolist())
    first, second, third = (start.sum().item() for start in starts)
    first += 1.5  # log W of the whole sample
    second += 2.0
    third += 3.3

    def bet(log_weight, tokens):
        return math.log(0.5 + 0.5 * math.exp(log_weight - tokens * TOLERANCE))

    weight = min(math.exp(WHOLE_POWER * first), 2.0)
    ratio = min(math.exp(second), 2.0)
    lost = math.log(0.5)  # the judged one that cannot be read
    of_a = {
        "chunked": 1,
        "chunk_judged": 1,
        "judged_tokens": 2,
        "chunk_excess": weight - 1,
        "chunk_excess_squares": (weight - 1) ** 2,
        "chunk_bet_0.5": bet(first, 3),
        "bet_0.5": 2 * bet(second, 1),  # both tokens have their chunk's ratio
        "excess": 2 * (ratio - 1),
    }
    of_b = {"chunk_bet_0.5": bet(third, 4) + lost, "unreadable": 2, "excess": 0}
    for source, expected in (("a", of_a), ("b", of_b)):
        found = {name: sources[source][name] for name in expected}
        assert found == pytest.approx(expected, abs=1e-6)
    assert "unreadable" not in sources["a"]


def of_samples(log_weights):
    """The figures of chunked samples of ten tokens with these log W."""
    x = (WHOLE_POWER * log_weights).exp().clamp(max=2) - 1
    weights_less_one = (log_weights - 10 * TOLERANCE).expm1()
    bets = {f"chunk_bet_{bet}": float((bet * weights_less_one).log1p().sum()) for bet in BETS}
    count = float(len(x))
    return {
        "samples": count,
        "tokens": 10 * count,
        "chunked": count,
        "chunk_judged": count,
        **bets,
        "chunk_excess": float(x.sum()),
        "chunk_excess_squares": float(x.square().sum()),
        "excess": 0.0,
        "excess_squares": 0.0,
        "surprising": 0.0,
        "likelihood": -1.0,
    }


def test_claims_over_whole_samples_doubt_a_liar_and_no_honest_author():
    generator = torch.Generator().manual_seed(1)
    honest = Claims()
    liar = Claims()
    for _ in range(500):  # log W is normal with E[W] = 1
        logs = torch.randn(100, generator=generator) - 0.5
        honest.add(of_samples(logs))
        assert honest.paid < DOUBTED
        liar.add(of_samples(logs + 10 * 0.2))
    assert liar.paid >= DISPROVED
    assert "whole samples" in liar.evidence
    assert liar.mean_weight > 1.1
    assert honest.mean_weight < 1
    assert honest.mean_likelihood == pytest.approx(-1)


def test_honest_tokens_do_not_hide_lies_in_chunks():
    claims = Claims()
    claims.add(of_samples(torch.full((64,), 1.0)))

    fine = {
        "samples": 1000.0,
        "tokens": 10_000.0,
        "excess": -800.0,
        "excess_squares": 900.0,
        "surprising": 0.0,
        "likelihood": -1.0,
    }
    claims.add(fine | {f"bet_{bet}": -50.0 for bet in BETS})

    assert claims.paid >= DISPROVED
