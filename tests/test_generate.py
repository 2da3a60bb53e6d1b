"""What is sampled is what the policy says, its log-probs are the policy's own, and it ends where it must."""

import math
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.draw import draw
from ftis_node.packet import Group, encode, prompt_digests
from ftis_node.policy.generate.cache import SharedCache
from ftis_node.policy.generate.prefill import beginning_of
from ftis_node.policy.generate.sampler import noise_of
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.swarm.admission import AdmissionContext, admit
from tests.support.small_models import KINDS, PROMPTS, logprob_errors, of_kind, seeded, tiny_policy
from tests.support.swarm import content, identity, make_run


def ids_of(groups):
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


@contextmanager
def watched_forwards(policy):
    """Collects [rows, tokens] of every forward pass."""
    shapes = []

    def see(module, args, kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))

    handle = policy.causal_lm.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()


@pytest.mark.parametrize("greedy", [False, True])
def test_ids_beyond_the_tokenizer_are_never_sampled(greedy):
    policy = of_kind("padded")
    logits = policy.model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert int(logits.argmax()) >= policy.vocabulary, "the padded rows are what this model likes best"
    sampling = Sampling(12, 1.0, (1,), greedy=greedy)
    groups = generate(policy, PROMPTS, group=8, sampling=sampling, generator=seeded(2))
    for completion in chain(*groups):
        assert completion.token_ids.max() < policy.vocabulary


def assert_well_ended(groups, eos, cap):
    for completion in chain(*groups):
        ends = np.isin(completion.token_ids, eos)
        assert 1 <= len(completion) <= cap
        assert len(completion.logprobs) == len(completion)
        assert not ends[:-1].any(), "an EOS before the end"
        assert bool(ends[-1]) is completion.finished
        assert completion.finished or len(completion) == cap
        assert np.isfinite(completion.logprobs).all()
        assert completion.logprobs.max() <= 1e-3
        assert completion.token_ids.dtype == np.uint32
        assert completion.logprobs.dtype == np.float32


IDS = st.integers(0, 25)


@given(
    seed=st.integers(0, 2**32),
    eos=st.sets(IDS, min_size=1, max_size=12),
    cap=st.integers(1, 12),
    group=st.integers(1, 6),
    prompts=st.lists(st.lists(IDS, min_size=1, max_size=7), min_size=1, max_size=6),
    batch=st.integers(1, 20),
    temperature=st.floats(0.3, 3),
)
def test_a_completion_ends_at_its_first_eos_or_at_the_cap(seed, eos, cap, group, prompts, batch, temperature):
    sampling = Sampling(cap, temperature, tuple(sorted(eos)))
    groups = generate(
        of_kind("padded"),
        prompts,
        group=group,
        sampling=sampling,
        generator=seeded(seed),
        batch=batch,
    )
    assert len(groups) == len(prompts)
    for completions in groups:
        assert len(completions) == group
    assert_well_ended(groups, sorted(eos), cap)


@pytest.mark.parametrize(
    ("batch", "together"),
    [
        (1, 1),
        (4, 1),
        (8, 2),
        (11, 2),
        (12, 3),
        (288, 4),
    ],
)
def test_a_batch_is_split_between_groups_and_never_inside_one(batch, together):
    policy = replace(of_kind("full"), native=False)  # decoded by modules, whose rows can be watched
    sampling = Sampling(6, 1.0, (1,), greedy=True)
    whole = generate(policy, PROMPTS, group=4, sampling=sampling)
    with watched_forwards(policy) as shapes:
        split = generate(policy, PROMPTS, group=4, sampling=sampling, batch=batch)
    assert ids_of(split) == ids_of(whole)
    prompts = [rows for rows, tokens in shapes if tokens > 1]
    answers = [rows for rows, tokens in shapes if tokens == 1]
    assert max(prompts) == together
    assert max(answers) <= max(4, batch)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (1, "lora"),
        *((11, kind) for kind in KINDS),
        (13, "padded"),
    ],
)
def test_waiting_rows_take_places_and_keep_their_seeds(batch, kind, monkeypatch):
    policy = of_kind(kind)
    prompts = [[3 + row % 20, 4, *[5] * (row % 4)] for row in range(9)]
    sampling = Sampling(14, 1.5, (1, 2, 3))
    noise = noise_of(range(9), 4, 14)

    def made(noise, batch=288):
        return generate(policy, prompts, group=4, sampling=sampling, noise=noise, batch=batch)

    whole = ids_of(made(noise))
    more = torch.cat([noise, noise], 1)  # than are drawn with
    assert ids_of(made(more)) == whole
    tokens = []
    grow = SharedCache.grow

    def noted(cache):
        tokens.append(cache.rows)
        return grow(cache)

    monkeypatch.setattr(SharedCache, "grow", noted)
    few = made(noise, batch)
    assert ids_of(few) == whole
    assert logprob_errors(policy, prompts, few, sampling.temperature).max() < 1e-4
    at_once = max(1, batch // 4)
    assert max(tokens) == 4 * at_once
    longest = [max(map(len, group)) for group in few]
    one_after_another = sum(max(longest[first : first + at_once]) - 1 for first in range(0, 9, at_once))
    assert len(tokens) < 0.9 * one_after_another


@pytest.mark.parametrize("native", [False, True])
def test_a_prompt_is_read_once_for_its_whole_group(native):
    policy = replace(of_kind("full"), native=native)
    prompts = [[4, 5], [6, 7, 8]]
    with watched_forwards(policy) as shapes:
        generate(policy, prompts, group=16, sampling=Sampling(4, 1.0, (1,)), generator=seeded(6))
    assert shapes[0] == (2, 3)
    for _, tokens in shapes[1:]:
        assert tokens == 1


@pytest.mark.parametrize(
    ("window", "read"),
    [
        (None, (1, 70)),
        (79, (1, 70)),
        (78, (6, 79)),  # transformers would count the padding between the beginning and the rest
    ],
)
def test_what_prompts_begin_with_is_read_once_for_all(window, read):
    policy = tiny_policy(use_sliding_window=window is not None, sliding_window=window, max_window_layers=0)
    prompts = [[*range(2, 25)] * 3 + [2, row, *[5] * (row - 3)] for row in range(3, 12, 2)]
    prompts.append([*prompts[0][:-1], 20])
    sampling = Sampling(12, 1.2, (1,))
    with watched_forwards(policy) as shapes:
        groups = generate(policy, prompts, group=2, sampling=sampling, generator=seeded(5), batch=4)
    assert shapes[0] == read
    if window == 79:  # static shapes have columns in eights
        assert beginning_of(replace(policy, graphs=True), prompts, window) is None
    assert sum(rows * tokens for rows, tokens in shapes) < 500
    assert logprob_errors(policy, prompts, groups, sampling.temperature).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eos", [(1,), (0, 1, 2, 3, 4, 5, 6, 7, 8)])
def test_what_is_generated_is_admitted_by_others(kind, eos):
    policy = of_kind(kind)
    author = identity(0).author
    run = make_run(
        group=6,
        slots=8,
        completion_tokens=12,
        temperature=1.2,
        eos=eos,
        vocabulary=policy.vocabulary,
    )
    context = AdmissionContext(run, prompt_digests(PROMPTS))
    rows = [draw(run.id, author, 3, slot, len(PROMPTS)) for slot in range(run.slots)]
    prompts = [PROMPTS[row] for row in rows]
    sampling = Sampling(12, 1.2, eos)
    groups = generate(policy, prompts, group=6, sampling=sampling, generator=seeded(9))
    for slot, completions in enumerate(groups):
        packet = content(run, author, 3, slot, completions, prompt_ids=prompts[slot])
        verdict = admit(context, author, encode(packet), announced=(3, slot))
        assert isinstance(verdict, Group), verdict
        assert verdict.row == rows[slot]


def test_no_logprob_is_below_what_admission_allows_of_an_honest_sampler():
    sampling = Sampling(20, 3.0, (1,))
    least = -(math.log(26) + 18)
    groups = generate(
        of_kind("full"),
        [PROMPTS[0]],
        group=400,
        sampling=sampling,
        generator=seeded(1),
        batch=400,
    )
    for completion in groups[0]:
        assert completion.logprobs.min() > least
