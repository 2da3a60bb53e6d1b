"""Gradients of a whole model against an implementation that is not ours: TRL's GRPO trainer."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from ftis_node.objective import PRESETS
from ftis_node.policy.policy import Policy
from tests.support.objective_batches import termed
from tests.support.small_models import plain_logprobs, tiny_config, tiny_tokenizer

pytestmark = pytest.mark.slow  # TRL takes long to import; the formulas are tested sample by sample

GROUPS = 5
SIZE = 4
LONGEST = 12
EOS = 1  # also the pad token, as so often
MINE = (torch.arange(SIZE) < SIZE // 2).repeat(GROUPS)
K1 = {"divergence": "k1", "threshold": 0.5}
CORRECTION = {"correction": True, "mode": "token_truncate", "clip_max": 2.0}


@dataclass
class Batch:
    """Padded as TRL wants it: prompts on the left, completions on the right; per-token tensors are `[B, LONGEST]`."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    advantages: Tensor
    start: Tensor
    generator: Tensor

    @property
    def lengths(self):
        return self.completion_mask.sum(1)

    def packed(self, padded):
        return padded[self.completion_mask.bool()]


def one_by_one(policy, batch):
    """Log-probs of all completions' tokens, packed: a plain forward pass of each sequence, without padding."""
    prompts = [ids[seen].tolist() for ids, seen in zip(batch.prompt_ids, batch.prompt_mask.bool(), strict=True)]
    completions = [ids[real] for ids, real in zip(batch.completion_ids, batch.completion_mask.bool(), strict=True)]
    return plain_logprobs(policy, prompts, completions, 1.0)


def random_batch(policy):
    """Groups of random lengths: the first half of each is one's own, and the rest of peers from near to very far."""
    generator = torch.Generator().manual_seed(1)
    samples = GROUPS * SIZE

    def whole(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    prompts = whole(2, 7, samples)
    lengths = whole(2, LONGEST + 1, samples)
    rewards = whole(0, 3, GROUPS, SIZE).double()
    completion_ids = whole(2, 26, samples, LONGEST)
    completion_ids[torch.arange(samples), lengths - 1] = EOS
    mask = torch.arange(LONGEST) < lengths[:, None]
    prompt_mask = torch.arange(6) >= 6 - prompts[:, None]
    batch = Batch(
        prompt_ids=whole(2, 26, samples, 6).masked_fill(~prompt_mask, EOS),
        prompt_mask=prompt_mask.long(),
        completion_ids=completion_ids.masked_fill(~mask, EOS),
        completion_mask=mask.long(),
        advantages=torch.cat([PRESETS["ftis"].advantages(group) for group in rewards]).float(),
        start=torch.zeros(samples, LONGEST),
        generator=torch.zeros(samples, LONGEST),
    )
    batch.start[mask] = one_by_one(policy, batch).detach()
    distance = torch.tensor([0.0, 0.0, 0.5, 4.0]).repeat(GROUPS)[:, None]
    noise = torch.randn(samples, LONGEST, generator=generator)
    batch.generator = torch.where(mask, batch.start + distance * noise, 0.0)
    return batch


class Oracle:
    """TRL's loss with another objective for each call."""

    def __init__(self, model, folder):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        arguments = GRPOConfig(
            output_dir=str(folder),
            loss_type="grpo",
            beta=0.0,
            epsilon=0.2,
            report_to="none",
            **{f"vllm_importance_sampling_{name}": value for name, value in CORRECTION.items()},
            max_completion_length=LONGEST,
            per_device_train_batch_size=SIZE,
            num_generations=SIZE,
            steps_per_generation=1,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
        )
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * SIZE}),
            processing_class=tiny_tokenizer(),
        )
        self.trainer.current_gradient_accumulation_steps = 1
        self.k1_mask = self.trainer.get_off_policy_mask

    def loss(self, objective, batch):
        """Importance weights come in as TRL makes them; VIS is its loss without vLLM, on the generator's log-probs."""
        trainer = self.trainer
        vanilla = objective.importance == "vanilla"
        trainer.loss_type = {"sample": "grpo", "token": "dapo", "fixed": "dr_grpo"}[objective.aggregation]
        if objective.ratio == "detached":
            trainer.loss_type = "cispo"
        trainer.importance_sampling_level = "sequence" if objective.ratio == "sequence" else "token"
        low = objective.epsilon or 0.2
        high = objective.epsilon_high or objective.epsilon or 0.2
        trainer.epsilon_low = low
        trainer.epsilon_high = high + (objective.ratio == "detached")  # of cispo the cap
        trainer.use_vllm = not vanilla
        trainer.off_policy_mask_threshold = objective.threshold
        trainer.get_off_policy_mask = k3_reverse_mask if objective.divergence == "k3_reverse" else self.k1_mask
        old = batch.generator if vanilla else batch.start
        if objective.ratio == "sequence":
            old = torch.where(MINE[:, None], batch.start, old)
        log_ratio = batch.start - batch.generator
        ratios = {
            "none": torch.ones(()),
            "vanilla": torch.ones(()),
            "truncated": log_ratio.exp().clamp(max=2.0),
        }
        inputs = {
            "prompt_ids": batch.prompt_ids,
            "prompt_mask": batch.prompt_mask,
            "completion_ids": batch.completion_ids,
            "completion_mask": batch.completion_mask,
            "advantages": batch.advantages,
            "old_per_token_logps": old,
            "sampling_per_token_logps": batch.generator,
            "importance_sampling_ratio": ratios[objective.importance],
            "num_items_in_batch": batch.completion_mask.sum(),
        }
        loss = trainer._compute_loss(trainer.model, inputs)
        return loss


def k3_reverse_mask(
    advantages,
    per_token_logps,
    sampling_per_token_logps,
    mask,
    off_policy_threshold,
):
    """Sample [B, 1] kept where Â ≥ 0 or the mean of e^(−d) − 1 + d is within g; the same as ours but at equality."""
    d = (per_token_logps.detach() - sampling_per_token_logps) * mask
    divergence = (torch.exp(-d) - 1 + d).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return ((advantages >= 0) | (divergence <= off_policy_threshold)).to(mask.dtype)


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(tiny_config()).float()
    return Policy("random", model, tiny_tokenizer(), torch.device("cpu"))


@pytest.fixture(scope="module")
def batch(policy) -> Batch:
    return random_batch(policy)


@pytest.fixture(scope="module")
def oracle(policy, tmp_path_factory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"):
            patch.setenv(name, "1")
        yield Oracle(policy.model, tmp_path_factory.mktemp("trl"))


def our_loss(objective, batch, new):
    """−Σ_i c_i · value_i / D as the learner has it, and which samples were kept."""
    terms = termed(
        objective,
        trainer_logprobs=new,
        start_logprobs=batch.packed(batch.start),
        sampler_logprobs=batch.packed(batch.generator),
        lengths=batch.lengths,
        advantages=batch.advantages,
        own=MINE,
    )
    dropped = ~terms.kept
    divisor = objective.batch_divisor(
        groups=GROUPS,
        samples=GROUPS * SIZE,
        tokens=int(batch.lengths.sum()),
        dropped_samples=int(dropped.sum()),
        dropped_tokens=int(batch.lengths[dropped].sum()),
    )
    return -objective.sample_scale(SIZE) * terms.value.sum() / divisor, terms.kept


def gradient(policy, loss):
    """The gradient of a loss for all parameters as one vector."""
    policy.model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([parameter.grad.flatten().double() for parameter in policy.model.parameters()])


def our_gradient(objective, policy, batch):
    return gradient(policy, our_loss(objective, batch, one_by_one(policy, batch))[0])


def relative_error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    "objective",
    [
        *(PRESETS[name] for name in ("nois", "vis", "tis", "ftis", "gspo", "cispo", "dapo")),
        *(PRESETS[name].replace(**K1, name=f"{name}-k1") for name in ("f-nois", "f-vis")),
        PRESETS["ftis"].replace(**K1, name="ftis-k1"),
        PRESETS["ftis"].replace(aggregation="token", name="ftis-token"),
        PRESETS["ftis"].replace(aggregation="fixed", divisor=float(LONGEST), name="ftis-fixed"),
    ],
    ids=lambda objective: objective.name,
)
def test_every_parameters_gradient_is_trls(objective, policy, batch, oracle):
    loss, kept = our_loss(objective, batch, one_by_one(policy, batch))
    negative = batch.advantages < 0
    dropped = int((~kept & negative).sum())
    assert kept[batch.advantages > 0].all()
    assert (0 < dropped < int(negative.sum())) if objective.threshold is not None else kept.all()
    ours = gradient(policy, loss)
    theirs = gradient(policy, oracle.loss(objective, batch))
    assert theirs.norm() > 1e-3
    assert relative_error(ours, theirs) <= 1e-5


def test_the_losses_differ_from_one_another(batch, policy):
    # Or the comparison above would show nothing.
    names = "nois vis tis f-nois f-vis ftis gspo cispo dapo graft hacpo"
    gradients = [our_gradient(PRESETS[name], policy, batch) for name in names.split()]
    for one, other in itertools.combinations(gradients, 2):
        assert relative_error(one, other) > 1e-2
