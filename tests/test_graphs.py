"""Tokens as CUDA graphs: the same tokens, and all else survives.

There is no GPU here: graphs are recorded and replayed on the CPU, see `tests.pretend.graphs`.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ftis_node.errors import FtisError
from ftis_node.policy import room
from ftis_node.policy.generate import cache as cache_module
from ftis_node.policy.generate import graphs as graphs_module
from ftis_node.policy.generate.cache import SharedCache, bucket
from ftis_node.policy.generate.graphs import Graphs, failed
from ftis_node.policy.generate.kept import let_go
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.ready import ready
from ftis_node.policy.room import Room
from tests.pretend import graphs as pretended
from tests.support.small_models import PROMPTS, logprob_errors, seeded, twin
from tests.test_engines import DECODED, GREEDY, greedily, policy_of

ENDLESS = Sampling(15, 1.0, (26,))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def recorded(monkeypatch) -> Iterator[list[pretended.CUDAGraph]]:
    """Graphs of the CPU in place of CUDA's; all that were captured."""
    made = []

    class Noted(pretended.OnTheCPU):
        def __init__(self):
            super().__init__()
            made.append(self)

    for name in ("Stream", "stream", "current_stream", "set_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, getattr(pretended, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Noted)
    monkeypatch.setattr(graphs_module, "_failures", [])
    monkeypatch.setattr(cache_module, "LEAST_WIDTH", 8)
    yield made
    assert not pretended.capturing


def changed(policy):
    """Move the weights where they lie."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=seeded(1))


def endless(policy, prompts=PROMPTS, batch=288, seed=4):
    return generate(
        policy,
        prompts,
        group=3,
        sampling=ENDLESS,
        generator=seeded(seed),
        batch=batch,
    )


def tokens_of(groups):
    return [completion.token_ids.tolist() for completion in chain(*groups)]


def logprobs(groups):
    return np.concatenate([completion.logprobs for completion in chain(*groups)])


@pytest.mark.parametrize("kind", DECODED)
def test_replayed_tokens_are_those_without_graphs(kind, recorded):
    policy = twin(policy_of(kind))
    expected = endless(policy)
    ours = endless(replace(policy, graphs=True))
    assert tokens_of(ours) == tokens_of(expected)
    np.testing.assert_allclose(logprobs(ours), logprobs(expected), atol=1e-5)
    # a width of 8 own tokens, then of 14: the first token of each goes before its capture
    assert [graph.replayed for graph in recorded] == [7, 5]


@pytest.mark.parametrize("kind", ["qwen2", "lora", "llama biased"])
def test_rows_that_end_go_in_a_few_sizes_and_the_others_stay(kind, monkeypatch):
    sizes = []
    shrink = SharedCache.shrink

    def noted(cache, rows):
        sizes.append(rows)
        return shrink(cache, rows)

    monkeypatch.setattr(SharedCache, "shrink", noted)
    monkeypatch.setattr("ftis_node.policy.generate.native._LOOK_EVERY", {"cpu": 3})
    policy = replace(policy_of(kind), graphs=True)
    prompts = [[3 + row % 20, 4, *[5] * (row % 4)] for row in range(20)]
    sampling = Sampling(40, 1.3, (1, 2))
    groups = generate(policy, prompts, group=3, sampling=sampling, generator=seeded(2))
    lengths = [len(completion) for completion in chain(*groups)]
    assert min(lengths) < 5
    assert max(lengths) > 20
    assert logprob_errors(policy, prompts, groups, sampling.temperature).max() < 2e-5
    assert len(sizes) > 3
    assert sizes == [bucket(size) for size in sizes]
    greedy = replace(GREEDY, max_new_tokens=30)
    ours = generate(policy, prompts, group=1, sampling=greedy)
    plain = generate(replace(policy, graphs=False), prompts, group=1, sampling=greedy)
    assert tokens_of(ours) == tokens_of(plain)


@pytest.mark.parametrize(("kind", "graphs"), [("qwen2", True), ("lora", False)])
def test_weights_that_change_between_two_calls_are_used_as_they_are(kind, graphs):
    policy = replace(twin(policy_of(kind)), graphs=graphs)
    before = greedily(policy)
    changed(policy)
    after = greedily(policy)
    assert tokens_of(after) != tokens_of(before)
    assert tokens_of(after) == tokens_of(greedily(replace(policy, native=False)))


def test_graphs_are_kept_for_the_next_call_until_what_they_read_moves(recorded):
    policy = replace(twin(policy_of("lora")), graphs=True)

    def captures(prompts=PROMPTS, batch=288):
        """Made by another generation, whose tokens are right."""
        before = len(recorded)
        ours = endless(policy, prompts, batch, before)
        expected = endless(replace(policy, graphs=False), prompts, batch, before)
        assert tokens_of(ours) == tokens_of(expected)
        return len(recorded) - before

    assert captures() == 2
    changed(policy)
    assert captures() == 0, "weights changed in place"
    assert captures([[3], [9, 8], [4, 4, 4], [5]]) == 0, "other prompts, of no more tokens"
    assert captures(batch=6) == 2, "fewer rows at a time"
    assert captures() == captures(batch=6) == 0
    with policy.model.disable_adapter():
        assert captures() > 0, "the layers that were captured are switched off"
    assert captures() > 0
    weight = policy.causal_lm.model.norm.weight
    weight.data = weight.data.clone()
    assert captures() > 0, "a weight lies elsewhere"
    assert captures([[5] * 90, *PROMPTS]) > 0, "a prompt longer than any before"
    assert captures() == 0
    let_go()
    assert captures() > 0


def test_what_diverged_weights_left_behind_spoils_no_later_call():
    policy = replace(twin(policy_of("qwen2")), graphs=True)
    before = greedily(policy)
    weight = policy.causal_lm.model.layers[0].self_attn.v_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        with pytest.raises(FtisError, match="diverged"):
            greedily(policy)
        weight.copy_(good)
    assert tokens_of(greedily(policy)) == tokens_of(before)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_a_lack_of_memory_during_a_capture_is_passing(first, times, recorded, monkeypatch):
    """Once: what is cached is given back, and it is captured all the same. Twice: the caller makes room."""
    begin = torch.cuda.CUDAGraph.capture_begin
    short = [times]

    def captured(graph, **how):
        begin(graph, **how)
        if short[0] and len(recorded) == first:
            short[0] -= 1
            graph.capture_end()
            recorded.remove(graph)  # or its pool of memory would have a user
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", captured)
    monkeypatch.setattr(room, "time", SimpleNamespace(sleep=lambda _: None))
    policy = replace(twin(policy_of("qwen2")), graphs=True)
    tried = []

    def attempt(batch):
        tried.append(batch)
        return endless(policy, batch=batch)

    ours = room.fitting(attempt, Room(12), there=12, least=3)
    expected = endless(replace(policy, graphs=False))
    assert tokens_of(ours) == tokens_of(expected)
    assert len(tried) == times
    assert not failed()
    assert [graph.replayed for graph in recorded if graph.replayed][-2:] == [7, 5], "graphs are in use"


def test_a_failed_capture_is_warned_of_once(caplog, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    policy = policy_of("lora")
    expected = endless(policy)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refused)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ours = endless(replace(policy, graphs=True))
            assert tokens_of(ours) == tokens_of(expected)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "Generation goes on without CUDA graphs, for one could not be captured"
    ]


def test_graphs_that_replay_something_else_are_not_used(monkeypatch):
    policy = replace(twin(policy_of("qwen2")), graphs=True)
    assert ready(policy).graphs
    monkeypatch.setattr(pretended.CUDAGraph, "replay", lambda self: None)
    checked = ready(policy)
    assert checked.native
    assert not checked.graphs


def test_a_replay_repeats_what_was_captured_and_no_number_of_the_host():
    """Otherwise the tests above could not fail."""
    count = [0]
    total = torch.zeros(())

    def function(x):
        count[0] += 1
        return (x + total.add_(1) + 10 * count[0],)

    graphs = Graphs(CPU)
    made = [float(graphs("shape", function, torch.tensor(100.0 * step))[0]) for step in range(4)]
    assert made == [11, 122, 223, 324]  # the host counts to 2, the device to 4
    for refused in (lambda x: (x * x.item(),), lambda x: (torch.rand(2),)):
        graphs = Graphs(CPU)
        graphs("shape", refused, torch.ones(()))
        assert not failed()
        graphs("shape", refused, torch.ones(()))
        assert "capturing" in graphs_module._failures.pop()


def test_buckets_are_few_and_waste_less_than_a_third():
    sizes = [bucket(count) for count in range(1, 1025)]
    assert sorted(set(sizes)) == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(count <= size < 1.5 * count for count, size in enumerate(sizes, 1) if count > 16)
