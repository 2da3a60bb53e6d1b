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
        claims = tokens["start_logprobs"] - torch.linspace(-1, 1, 9)
        samples = {"ended": torch.tensor([True, False, True]), "own": torch.tensor([True, False, False])}
        tokens |= {"sampler_logprobs": claims, "lengths": LENGTHS, "advantages": ADVANTAGES, **samples}
        terms = termed(PRESETS[name], **tokens, gate=-2.0, chunks=chunks)
        terms.value.sum().backward()
        found.append([tokens["trainer_logprobs"].grad, *(value.detach() for value in vars(terms).values())])
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
    batch = packed([[-1.0] * 4], [2.0], generator=[[first, -0.999]], chunks=[0, 0, 0, 1], own=[False])
    terms, gradient = graded(PRESETS["gspo"], batch)
    assert terms.clipped.eq(clipped).all() and gradient.eq(0.0).eq(clipped).all()


@pytest.mark.parametrize("name", ["ftis", "vis", "nois", "ftis-author"])
def test_the_gradient_is_that_of_the_value(name):
    """Against finite differences of the surrogate; weights and filter are constants of the step."""

    def value(new):
        terms = termed(PRESETS[name], trainer_logprobs=new, **samples)
        return terms.value.sum()

    start = drawn(3)["start_logprobs"].double()
    ended = torch.tensor([True, False, False])
    claims = -torch.rand(6, generator=torch.Generator().manual_seed(4)).double() * 4
    samples = {"lengths": LENGTHS, "advantages": ADVANTAGES.double(), "ended": ended}
    samples |= {"start_logprobs": start, "sampler_logprobs": claims, "chunks": CHUNKS}
    assert torch.autograd.gradcheck(value, (start.clone().requires_grad_(),), eps=1e-6, atol=1e-6)


def test_the_vanilla_surrogate_counts_a_chunk_once():
    terms = termed(PRESETS["vis"], **packed([[-1.0, -2.0]], [1.0], generator=[[-3.1]], chunks=[0, 0]))
    assert terms.value.item() == pytest.approx(math.exp(0.1) / 2)


def summed(objective, claims, chunks, chunked):
    diagnostics = Diagnostics("own")
    batch = drawn() | {"sampler_logprobs": claims, "lengths": LENGTHS, "advantages": ADVANTAGES}
    terms = termed(objective, **batch, chunks=chunks)
    add(diagnostics, terms, batch, ["a", "a", "b"], chunked=torch.tensor(chunked))
    diagnostics.unreadable["b"] = 2
    diagnostics.unreadable_judged["b"] = 1
    return diagnostics.summary().sources


def test_figures_of_chunked_samples_are_of_whole_samples_and_the_others_of_tokens():
    claims = torch.tensor([-1.0, -0.5, -2.0, -0.1, -0.2, -3.0])
    sources = summed(PRESETS["ftis"], claims, CHUNKS, [True, False, True])
    start = drawn()["start_logprobs"]
    assert (sources["a"]["chunked"], sources["a"]["chunk_judged"], sources["a"]["judged_tokens"]) == (1, 1, 2)
    weight = min(math.exp(WHOLE_POWER * float(start[:3].sum() + 1.5)), 2.0)
    assert sources["a"]["chunk_excess"] == pytest.approx(weight - 1, abs=1e-6)
    assert sources["a"]["chunk_excess_squares"] == pytest.approx((weight - 1) ** 2, abs=1e-6)
    whole = math.exp(float(start[:3].sum() + 1.5) - 3 * TOLERANCE)
    assert sources["a"]["chunk_bet_0.5"] == pytest.approx(math.log(0.5 + 0.5 * whole), abs=1e-6)
    whole = math.exp(float(start[5:].sum() + 3.3) - 4 * TOLERANCE)
    lost = math.log(0.5)  # the judged one that cannot be read
    assert sources["b"]["chunk_bet_0.5"] == pytest.approx(math.log(0.5 + 0.5 * whole) + lost, abs=1e-6)
    bets = sum(math.log(0.5 + 0.5 * math.exp(float(start[3:5].sum() + 2.0) - TOLERANCE)) for _ in range(2))
    assert sources["a"]["bet_0.5"] == pytest.approx(bets, abs=1e-6), "both have their chunk's ratio"
    ratio = min(math.exp(float(start[3:5].sum() + 2.0)), 2.0)
    assert sources["a"]["excess"] == pytest.approx(2 * (ratio - 1), abs=1e-5)
    assert "unreadable" not in sources["a"] and sources["b"]["unreadable"] == 2
    assert sources["b"]["excess"] == 0


def of_samples(log_weights):
    """The figures of chunked samples of ten tokens with these log W."""
    x = (WHOLE_POWER * log_weights).exp().clamp(max=2) - 1
    count = float(len(x))
    return {
        "samples": count,
        "tokens": 10 * count,
        "chunked": count,
        "chunk_judged": count,
        **{f"chunk_bet_{bet}": float((bet * (log_weights - 10 * TOLERANCE).expm1()).log1p().sum()) for bet in BETS},
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
    doubted = 0
    for _ in range(500):  # log W is normal with E[W] = 1
        logs = torch.randn(100, generator=generator) - 0.5
        honest.add(of_samples(logs))
        doubted += honest.paid >= DOUBTED
        liar.add(of_samples(logs + 10 * 0.2))
    assert doubted == 0
    assert liar.paid >= DISPROVED and "whole samples" in liar.evidence
    assert liar.mean_weight > 1.1 and honest.mean_weight < 1
    assert honest.mean_likelihood == pytest.approx(-1)


def test_honest_tokens_do_not_hide_lies_in_chunks():
    claims = Claims()
    claims.add(of_samples(torch.full((64,), 1.0)))
    fine = {"samples": 1000.0, "tokens": 10_000.0, "excess": -800.0, "excess_squares": 900.0}
    claims.add(fine | {"surprising": 0.0, "likelihood": -1.0} | {f"bet_{bet}": -50.0 for bet in BETS})
    assert claims.paid >= DISPROVED
