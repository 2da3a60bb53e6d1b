"""What the learner can beyond one plain step: parts of groups, inner steps, few digits, little memory, bad numbers."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from ftis_node.errors import FtisError
from ftis_node.fit.memory import SPREAD
from ftis_node.host.interruption import Interrupted, interrupt
from ftis_node.learner import TrainingGroup, optimiser
from ftis_node.learner.batch import Batch, micro_batches
from ftis_node.learner.learner import BAD_STEPS
from ftis_node.learner.loss_scale import LossScale
from ftis_node.objective import PRESETS
from ftis_node.packet import Completion
from ftis_node.policy import room
from ftis_node.policy.load import checkpoint_activations
from tests.support.daemons import program
from tests.support.learners import (
    BATCH,
    FOREIGN,
    LORA,
    OWN,
    POLICY,
    TEMPERATURE,
    assert_close,
    assert_same,
    changed,
    coarse,
    decoder_sizes,
    gradient_of,
    learner,
    vertical,
    weights_of,
)
from tests.support.small_models import held_for_backward, plain_logprobs, twin

# --- groups of several nodes ----------------------------------------------------------------------------------------


def halves(group):
    """The same completions, the second half a peer's."""
    part = group.parts[0]
    mine = replace(part, completions=part.completions[:2], rewards=part.rewards[:2])
    theirs = replace(part, source="peer", completions=part.completions[2:], rewards=part.rewards[2:])
    return TrainingGroup(group.prompt_ids, [mine, theirs])


def test_advantages_are_over_all_parts_of_a_group():
    """Rewards 1 0 | 0 1: every half alone would have a signal of its own, [0, 0 | 1, 0] only one of the two."""
    whole = learner(objective="nois")
    merged = learner(objective="nois")
    whole.step(OWN)
    report = merged.step([halves(group) for group in OWN])
    assert_same(weights_of(merged), weights_of(whole))
    own, peer = (report.diagnostics.sources[name] for name in ("own", "peer"))
    assert own["samples"] == 4
    assert peer["samples"] == 4
    assert peer["idle"] == 4


def test_with_own_samples_only_the_parts_of_others_are_as_if_they_had_not_come():
    merged = learner(objective="grpo")
    alone = learner(objective="grpo")
    shared = [halves(group) for group in OWN]
    merged.step(shared)
    alone.step([TrainingGroup(group.prompt_ids, group.parts[:1]) for group in shared])
    assert_same(weights_of(merged), weights_of(alone))


def test_rewards_that_do_not_match_their_completions_are_refused():
    with pytest.raises(FtisError, match="as many rewards"):
        learner().step([changed(OWN[0], rewards=[1, 0, 1])])


# --- inner steps ----------------------------------------------------------------------------------------------------


def test_a_second_inner_step_is_clipped_at_the_policy_of_the_first():
    plain = {"threshold": None, "importance": "none"}
    subject = learner(parts=plain | {"inner_steps": 2}, learning_rate=0.05)
    once = learner(parts=plain, learning_rate=0.05)
    once.step(OWN)  # the policy between the two
    report = subject.step(OWN)
    assert subject.steps == 1
    assert report.diagnostics.overall["clipped"] > 0
    old = twin(POLICY)
    new = once.policy
    loss = torch.zeros(())
    for group in OWN[:2]:
        rewards = torch.tensor(group.parts[0].rewards, dtype=torch.float64)
        advantages = ((rewards - rewards.mean()) / rewards.std(correction=0)).tolist()
        for completion, advantage in zip(group.parts[0].completions, advantages, strict=True):
            sample = ([group.prompt_ids], [completion.token_ids], TEMPERATURE)
            before = plain_logprobs(old, *sample).detach()
            ratio = (plain_logprobs(new, *sample) - before).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = loss - surrogate.mean() / 4 / len(OWN)
    new.model.zero_grad()
    loss.backward()
    expected = {name: p.grad for name, p in new.model.named_parameters() if p.grad is not None}
    assert_close(gradient_of(subject), expected, atol=1e-5)


# --- the gate -------------------------------------------------------------------------------------------------------


def test_the_gate_opens_at_the_level_of_the_steps_before_and_outlives_a_restart():
    subject = learner(objective="gated")
    first = subject.step([*OWN, *FOREIGN])
    assert first.diagnostics.sources["peer"]["loss_weight"] == 0, "nothing of one's own to compare with yet"
    level = subject.gate
    scores = []
    for group in OWN[:2]:
        for completion, reward in zip(group.parts[0].completions, group.parts[0].rewards, strict=True):
            if reward:
                logprobs = plain_logprobs(POLICY, [group.prompt_ids], [completion.token_ids], TEMPERATURE)
                scores.append(logprobs.mean().item())
    assert level == pytest.approx(min(scores), abs=1e-4)
    resumed = learner(objective="gated")
    resumed.restore(*subject.state(), steps=1)
    assert resumed.gate == level
    near = [*OWN, *(changed(group, source="peer") for group in OWN)]  # all but one a little likelier than the level
    second = subject.step(near)
    again = resumed.step(near)
    assert second.diagnostics.sources["peer"]["loss_weight"] > 0
    assert second.loss == again.loss
    assert subject.gate == resumed.gate != level
    assert_same(weights_of(subject), weights_of(resumed))


def test_all_inner_steps_of_a_step_are_gated_alike():
    once = learner(objective="gated")
    twice = learner(objective="gated", parts={"inner_steps": 2})
    for subject in (once, twice):
        assert subject.step(BATCH).diagnostics.sources["peer"]["loss_weight"] == 0
    assert once.gate == twice.gate
    own_only = learner(objective="gated", parts={"inner_steps": 2})
    own_only.step([*OWN, *(changed(group, weight=0.0) for group in FOREIGN)])
    assert_same(weights_of(twice), weights_of(own_only))


def test_a_bad_step_moves_no_gate_and_an_empty_success_neither():
    subject = learner(objective="gated", parts={"count_end": False})
    assert subject.step([changed(OWN[0], rewards=[math.nan, 0, 0, 1])]).skipped
    assert subject.gate is None
    only_end = Completion(np.array([1], np.uint32), np.array([-1.0], np.float32), True)
    subject.step([changed(OWN[0], completions=[only_end, *OWN[0].parts[0].completions[1:]], rewards=[1, 0, 0, 1])])
    assert subject.gate < 0


# --- uneven lengths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [64, 300, 2000])
def test_uneven_lengths_take_no_more_room_in_attention_than_the_plan_has(budget):
    random = np.random.default_rng(0)

    def completion(length):
        return Completion(np.zeros(length, np.uint32), np.zeros(length, np.float32), False)

    groups = []
    for _ in range(12):
        completions = [completion(length) for length in (*random.integers(1, 4, 11), 60)]
        prompt = [1] * int(random.integers(1, 60))
        groups.append(vertical("own", prompt, completions, [0.0, 1.0] * 6))
    batch = Batch.of(groups, PRESETS["ftis"])
    seen = []
    for part in micro_batches(batch.prompted, budget, True):
        samples = [sample for prompted in part for sample in prompted.samples]
        seen += [sample.index for sample in samples]
        widest = max(len(p.prompt_ids) for p in part) + max(sample.tokens for sample in samples)
        if len(samples) > 1:
            assert len(samples) * widest <= SPREAD * budget
            assert sum(p.cost(True) for p in part) <= budget
    assert sorted(seen) == list(range(144))


# --- warm-up --------------------------------------------------------------------------------------------------------


def test_the_learning_rate_grows_with_each_update_and_no_other_step_also_after_a_restart():
    rates = []
    state = None
    for _ in range(6):
        subject = learner(warmup_steps=4, learning_rate=1e-3)
        if state is not None:
            subject.restore(*state, steps=2 * len(rates))
        assert subject.step(OWN[2:]).skipped
        assert subject.step(OWN).skipped is None
        rates.append(subject.optimiser._adam.param_groups[0]["lr"])
        state = subject.state()
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


# --- weights of few digits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_bf16_weights_move_at_the_papers_learning_rate(lora):
    """Rounded at every step they would stand still: at a weight of 1 the next bf16 is 2⁻⁷ away, a step is 1e-6."""
    subject = learner(coarse(lora), learning_rate=1e-6)
    before = subject.state()[0]
    visible = weights_of(subject)
    for _ in range(3):
        assert subject.step(OWN).skipped is None
    after = subject.state()[0]
    assert all(value.dtype == torch.float32 for value in after.values())
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in after])
    assert 1e-6 < float(moved.max()) < 1e-5
    assert float((moved > 0).float().mean()) > 0.5
    for name, weight in subject.trainable.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, after[name].to(torch.bfloat16)), "the weights are the masters, rounded"
    # Large ones look as if nothing had happened, small ones have more digits; the masters remember both.
    assert sum(int((weights_of(subject)[name] != visible[name]).sum()) for name in visible) < moved.numel() / 2


def test_another_optimisers_state_is_refused():
    subject = learner()
    subject.step(OWN)
    weights, state = subject.state()
    foreign = {
        name.replace("exp_avg_sq", "state2").replace("exp_avg", "state1"): value for name, value in state.items()
    }
    with pytest.raises(FtisError, match="another optimiser"):
        subject.restore(weights, foreign, steps=1)


# --- gradient checkpointing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [POLICY, LORA], ids=["full", "lora"])
def test_gradient_checkpointing_changes_nothing_but_what_is_kept(policy):
    plain = learner(policy)
    saving = learner(policy)
    checkpoint_activations(saving.policy.causal_lm)
    kept = {}
    for name, subject in (("plain", plain), ("saving", saving)):
        with held_for_backward() as held:
            subject.step(BATCH)
        kept[name] = sum(held)
    assert_close(gradient_of(saving), gradient_of(plain))
    assert kept["saving"] < kept["plain"] / 2


# --- out of memory --------------------------------------------------------------------------------------------------


def with_room_for(subject, tokens):
    """A device on which a forward pass of more tokens fails as CUDA fails."""

    def refuse(module, args, kwargs):
        if kwargs["input_ids"].numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    subject.policy.causal_lm.get_decoder().register_forward_pre_hook(refuse, with_kwargs=True)


def test_a_step_that_does_not_fit_is_taken_in_smaller_pieces(monkeypatch):
    monkeypatch.setattr(room, "WAITS", ())
    cramped = learner()
    roomy = learner()
    with_room_for(cramped, 30)
    report = cramped.step(BATCH)
    expected = roomy.step(BATCH)
    assert report.memory_retries >= 1
    assert report.micro_batch_tokens <= 32
    assert expected.memory_retries == 0
    assert report.loss == pytest.approx(expected.loss, abs=1e-6)
    assert_close(gradient_of(cramped), gradient_of(roomy), atol=2e-6)
    assert report.diagnostics.overall["samples"] == expected.diagnostics.overall["samples"]
    assert cramped.step(BATCH).memory_retries == 0, "what was learned is kept"


def test_a_real_lack_of_memory_is_survived():
    """A process that may have little address space more than it has: torch's own allocator fails, the step succeeds."""
    text = """
        import resource, psutil, torch
        from tests.support.learners import OWN, learner
        from ftis_node.packet import Completion
        from ftis_node.policy import room
        import numpy as np
        from tests.support.learners import vertical
        torch.set_num_threads(1)
        room.WAITS = ()
        random = np.random.default_rng(0)
        def completion():
            return Completion(random.integers(0, 26, 100).astype(np.uint32), np.full(100, -3.0, np.float32), False)
        groups = [vertical("own", [3, 4], [completion() for _ in range(64)], [k % 2 for k in range(64)])
                  for _ in range(4)]
        subject = learner(micro_batch_tokens=1_000_000)
        subject.step(OWN)
        limit = psutil.Process().memory_info().vms + (100 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        report = subject.step(groups)
        print(report.memory_retries, report.skipped, report.tokens)
    """
    ran = program(text)
    retries, skipped, tokens = ran.communicate()[0].split()
    assert int(retries) >= 1
    assert skipped == "None"
    assert int(tokens) == 25_600


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["zeros_like", "float"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_gpu_that_lacks_memory_for_the_update_gets_it_a_moment_later_and_the_step_is_the_same(
    monkeypatch, dtype, where, times
):
    """AdamW's moments, and fp32 copies of gradients. Without room after all waits it is an error."""
    monkeypatch.setattr(optimiser, "_FUSED", ("cpu",))
    monkeypatch.setattr(room, "time", SimpleNamespace(sleep=lambda seconds: None))
    policy = twin(POLICY)
    policy.model.to(dtype)
    cramped = learner(policy=policy)
    roomy = learner(policy=policy)
    roomy.step(BATCH)
    owner = {"zeros_like": torch, "float": Tensor}[where]
    working = getattr(owner, where)
    lacking = (5, 10, 15)[:times]
    calls = [0]

    def short(*args, **kwargs):
        calls[0] += 1
        if in_update and calls[0] in lacking:  # not the first: some are there already
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return working(*args, **kwargs)

    in_update = False
    update = cramped.optimiser.step

    def stepped(**kwargs):
        nonlocal in_update
        in_update = True
        calls[0] = 0
        update(**kwargs)
        in_update = False

    monkeypatch.setattr(owner, where, short)
    monkeypatch.setattr(cramped.optimiser, "step", stepped)
    cramped.step(BATCH)
    assert calls[0] > 5, "it was short of memory"
    assert_same(weights_of(cramped), weights_of(roomy))
    for one, other in zip(cramped.state(), roomy.state(), strict=True):
        assert_same(one, other)


def test_where_the_update_fails_no_gradient_is_left_for_the_next(monkeypatch):
    subject = learner(policy=coarse())

    def fail(names):
        raise RuntimeError("a broken card")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
        patch.setattr(subject.optimiser, "_update", fail)
        subject.step(BATCH)
    assert all(master.grad is None for master in subject.optimiser._masters.values())


def test_an_interrupted_step_keeps_no_gradients():
    subject = learner()
    subject.room = room.Room(16)
    subject.policy.causal_lm.get_decoder().register_forward_hook(lambda *_: interrupt())  # the second micro-batch ends
    with pytest.raises(Interrupted):
        subject.step(BATCH)
    assert all(parameter.grad is None for parameter in subject.trainable.values())


# --- numbers that are none ------------------------------------------------------------------------------------------


def halved(scale, **parts):
    """A learner in float16 with this loss scale, and the tokens of its passes from now on."""
    policy = twin(POLICY)
    policy.model.half()
    subject = learner(policy, parts=parts)
    subject.room = room.Room(16)
    subject.loss_scale.value = scale
    return subject, decoder_sizes(subject)


def test_a_forward_pass_that_is_not_finite_costs_no_loss_scale():
    subject, passes = halved(2.0**10)
    norm = subject.trainable["model.norm.weight"]
    before = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(6e4)
    assert "not finite" in str(subject.step(OWN).skipped)
    assert (len(passes), subject.loss_scale.value) == (1, 2.0**10), "more of the batch would not mend it"
    with torch.no_grad():
        norm.copy_(before)
    assert subject.step([changed(OWN[0], rewards=[math.inf, 0, 0, 1])]).skipped
    assert subject.step(OWN).skipped is None
    assert subject.loss_scale.value == 2.0**10


def test_an_overflow_halves_the_loss_scale_twice_a_step_at_most_and_does_not_repeat_the_batch():
    subject, passes = halved(2.0**30)
    before = weights_of(subject)
    for scale in (28, 26, 24):
        assert "not finite" in str(subject.step(OWN).skipped)
        assert subject.loss_scale.value == 2.0**scale
    assert_same(weights_of(subject), before)
    assert passes == passes[:1] * 9, "the first of several micro-batches"


def test_the_first_loss_scale_fits_however_many_terms_a_batch_has():
    subject, passes = halved(LossScale(torch.float16).value, aggregation="token")
    report = subject.step(OWN * 40)
    scale = subject.loss_scale.value
    expected = learner(parts={"aggregation": "token"}).step(OWN * 40)
    assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-2)
    assert scale == LossScale(torch.float16).value
    assert len(passes) == 40 * 5


def test_after_five_bad_steps_in_a_row_the_report_asks_for_an_older_checkpoint():
    subject = learner(parts={"threshold": 1e9})
    strange = changed(OWN[1], source="peer")
    bad = changed(OWN[0], rewards=[math.nan, 0, 0, 1])
    assert not any(subject.step([bad, strange]).warnings for _ in range(12)), "a bad step tells nothing of a peer"
    subject.restore(*subject.state(), steps=0)
    reports = [subject.step([bad]) for _ in range(BAD_STEPS - 1)]
    assert not any(report.diverged for report in reports)
    subject.step(OWN[2:])  # nothing to learn from is neither good nor bad
    assert subject.step([bad]).diverged
    subject.restore(*subject.state(), steps=3)
    assert not any(subject.step([bad]).diverged for _ in range(BAD_STEPS - 1))
    subject.step(OWN)
    assert not subject.step([bad]).diverged, "a good one ends the row"


# --- what a person should know --------------------------------------------------------------------------------------


def test_a_filter_that_never_fires_on_a_peer_is_told_after_ten_steps():
    subject = learner(parts={"threshold": 1e9}, learning_rate=1e-9)
    told = [subject.step(BATCH).warnings for _ in range(12)]
    assert not any(told[:9] + told[10:])
    [sentence] = told[9]
    assert "peer" in sentence
    unfiltered = learner(objective="nois", learning_rate=1e-9)
    assert not any(unfiltered.step(BATCH).warnings for _ in range(12))
