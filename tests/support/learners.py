"""Learners on tiny models, with groups that those have sampled."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis_node.config.settings import Settings
from ftis_node.learner import Learner, Part, TrainingGroup
from ftis_node.objective import PRESETS
from ftis_node.packet import Completion
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.policy import Policy
from tests.support.objective_by_hand import Completion as HandCompletion
from tests.support.objective_by_hand import Group
from tests.support.small_models import plain_logprobs, seeded, tiny_policy, twin

TEMPERATURE = 1.3
POLICY = tiny_policy(vocab_size=32)
LORA = tiny_policy(vocab_size=32, lora=True)
PEER = tiny_policy(seed=1, vocab_size=32)
PROMPTS = [
    [5, 9, 14],
    [20],
    [7, 7, 8, 3, 2, 25],
    [12, 13],
]
# Some uneven, one all right, one all wrong.
REWARDS = [
    [1, 0, 0, 1],
    [0, 0, 1, 0],
    [1, 1, 1, 1],
    [0, 0, 0, 0],
]


def vertical(
    source: str,
    prompt: Sequence[int],
    completions: Sequence[Completion],
    rewards: Sequence[float],
    weight: float = 1.0,
) -> TrainingGroup:
    """A group that one node made."""
    return TrainingGroup(prompt, [Part(source, completions, rewards, weight)])


def in_turns(group: TrainingGroup) -> TrainingGroup:
    """The same sampled tokens and claims, with given ones after the first of each completion that has more."""
    completions = []
    for place, completion in enumerate(group.parts[0].completions):
        assert completion is not None
        if len(completion) > 1:
            ids = completion.token_ids
            more = np.arange(6, 9 + place, dtype=np.uint32)
            given = np.repeat([False, True, False], [1, len(more), len(ids) - 1])
            all_ids = np.concatenate([ids[:1], more, ids[1:]])
            completion = replace(completion, token_ids=all_ids, given=given)
        completions.append(completion)
    return changed(group, completions=completions)


def changed(group: TrainingGroup, **changes: Any) -> TrainingGroup:
    """The same group with another source, weight, … of its one part."""
    return replace(group, parts=[replace(group.parts[0], **changes)])


def sampled(policy: Policy, source: str, seed: int, weight: float = 1.0) -> list[TrainingGroup]:
    """A group for each prompt, with the rewards above."""
    groups = generate(
        policy,
        PROMPTS,
        group=4,
        sampling=Sampling(10, TEMPERATURE, tuple(range(1, 5))),
        generator=seeded(seed),
    )
    made = zip(PROMPTS, groups, REWARDS, strict=True)
    return [vertical(source, *one, weight) for one in made]


OWN = sampled(POLICY, "own", seed=1)
FOREIGN = sampled(PEER, "peer", seed=2)
BATCH = [*OWN, *FOREIGN]


def learner(policy: Policy = POLICY, objective: str = "ftis", parts: dict[str, Any] | None = None, **k: Any) -> Learner:
    """A learner on its own copy of `policy`."""
    usual = {"learning_rate": 1e-3, "gradient_clip": 1e9, "warmup_steps": 0}
    subject = Learner(
        twin(policy),
        PRESETS[objective].replace(**parts or {}),
        Settings(**usual | k),
        TEMPERATURE,
    )

    def note(*_: Any):
        GRADIENTS[subject] = _gradient(subject)

    subject.optimiser._adam.register_step_pre_hook(note)
    return subject


def decoder_sizes(subject: Learner) -> list[int]:
    """Tokens of every forward pass from now on; if it is packed, each has its completions in one row."""
    sizes = []

    def see(_: Any, __: Any, kwargs: Any):
        assert kwargs["input_ids"].shape[0] == 1 or not subject.policy.packed
        sizes.append(kwargs["input_ids"].numel())

    subject.policy.causal_lm.get_decoder().register_forward_pre_hook(see, with_kwargs=True)
    return sizes


def weights_of(subject: Learner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in subject.trainable.items()}


GRADIENTS: weakref.WeakKeyDictionary[Learner, dict[str, Tensor]] = weakref.WeakKeyDictionary()


def _gradient(subject: Learner) -> dict[str, Tensor]:
    found = {}
    for name, p in subject.trainable.items():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    return found


def gradient_of(subject: Learner) -> dict[str, Tensor]:
    """What the last step gave the optimiser: after clipping."""
    return GRADIENTS[subject]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]):
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], atol: float = 1e-6):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name],
            right[name],
            atol=atol,
            rtol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def with_claims(group: TrainingGroup, logprob: float) -> TrainingGroup:
    completions = []
    for made in group.parts[0].completions:
        claims = np.full(len(made), logprob, np.float32)
        completions.append(Completion(made.token_ids, claims, made.finished))
    return changed(group, completions=completions)


def by_hand(policy: Policy, group: TrainingGroup) -> Group:
    """The group as `objective_by_hand` computes with it: log-probs of a plain forward pass, in float64."""
    part = group.parts[0]
    completions = []
    for completion in part.completions:
        new = plain_logprobs(policy, [group.prompt_ids], [completion.token_ids], TEMPERATURE).double()
        if completion.given is not None:
            new = new[torch.from_numpy(~completion.given)]
        claimed = completion.logprobs.astype(float).tolist()
        completions.append(HandCompletion(list(new), new.tolist(), claimed, completion.finished))
    rewards = [float(reward) for reward in part.rewards]
    return Group(part.source == "own", rewards, completions, part.weight)


def coarse(lora: bool = False) -> Policy:
    """A policy whose weights have few digits."""
    policy = tiny_policy(vocab_size=32, lora=lora, initializer_range=1.0)
    policy.model.to(torch.bfloat16)
    return policy
