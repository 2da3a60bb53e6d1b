"""Models with random weights and batches made of their own samples: what the training benchmarks run on."""

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Plan
from ftis_node.learner import Learner, Part, TrainingGroup
from ftis_node.objective import PRESETS
from ftis_node.packet import Completion
from ftis_node.policy.generate.sampling import Prompts
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.load import choose_device, load_policy, make_policy
from ftis_node.policy.measure import known_config
from ftis_node.policy.names import resolve
from ftis_node.policy.policy import Policy
from ftis_node.step_report import OWN
from ftis_node.tasks.templates import PLAIN
from ftis_node.text import rounded
from ftis_node.worker.planning import settle

PEER = "peer"
TEMPERATURE = 1.0
ROWS = 512


@dataclass(frozen=True)
class Size:
    """How much one step is taken on: `groups` prompts with `group` completions each, all of one length in tokens."""

    groups: int = 8
    group: int = 12
    prompt_tokens: int = 40
    completion_tokens: int = 64

    @property
    def completions(self) -> int:
        """Of all groups."""
        return self.groups * self.group

    @property
    def tokens(self) -> int:
        """Completion tokens, those that are trained on."""
        return self.completions * self.completion_tokens

    def caps(self) -> dict[str, int]:
        """The size of a group as a run has it: `group`, `prompt_tokens`, `completion_tokens`."""
        caps = asdict(self)
        del caps["groups"]
        return caps


@dataclass(frozen=True)
class Work:
    """A batch: prompts, G completions of each by the policy itself, and rewards that leave no advantage at 0."""

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[Completion]]
    rewards: Sequence[Sequence[float]]


def small_config() -> LlamaConfig:
    """A Llama of 1,049,728 parameters."""
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def geometry(config: Any) -> dict[str, Any]:
    """The fields of a model's config that its speed depends on."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "tie_word_embeddings",
    )
    return {name: getattr(config, name, None) for name in names}


def planned(settings: Settings, size: Size, *, steps: bool) -> tuple[Settings, Plan]:
    """The settings as the plan completes them on this machine, and the plan; nothing is loaded. steps: the model is
    also to be trained, which needs more memory.

    Raises:
        UserError: the plan is not to be had, or has no room for the model.
    """
    workload = Workload(size.prompt_tokens, size.completion_tokens, size.group, size.groups)
    settings, chosen = settle(settings, workload, {})
    need = chosen.memory.generating
    if steps:
        need = chosen.memory.total
    if need > chosen.budget:
        what = f"{settings.model} does not fit: by the plan it takes {rounded(need)} of {rounded(chosen.budget)}."
        raise UserError(what, "Name a smaller --model, --lora, or fewer tokens: `ftis-node fit` says what fits.")
    return settings, chosen


def named_policy(settings: Settings, *, random_weights: bool) -> Policy:
    """The model that the settings name, or, with random weights, one of its geometry: only its config is read, and that
    of a Qwen2.5 is known. For errors see `load_policy`."""
    if not random_weights:
        return load_policy(settings)
    config = known_config(settings.model) or AutoConfig.from_pretrained(resolve(settings.model))
    return random_policy(config, settings)


def random_model(config: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A causal model of this geometry, made on its device; the same weights at every call. It seeds torch's global
    generator."""
    torch.manual_seed(0)
    with device:
        # a config of its own, since the model changes it: ours and TRL's attention are not the same
        of_its_own = copy.deepcopy(config)
        return AutoModelForCausalLM.from_config(of_its_own, dtype=dtype, attn_implementation="sdpa")


def random_policy(config: Any, settings: Settings) -> Policy:
    """`random_model` made ready as `load_policy` would, with a tokenizer of as many made-up words."""
    where = settings.device
    if settings.quantisation == "nf4":
        where = "cpu"  # on the device it may not fit before it is quantised
    dtype = getattr(torch, settings.dtype or "float32")
    model = random_model(config, choose_device(where), dtype)
    return make_policy(model, word_tokenizer(config.vocab_size), settings)


def word_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many made-up words; the first ends and pads."""
    vocabulary = {f"w{index}": index for index in range(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", pad_token="w0")


def written(folder: Path, config: Any, size: Size) -> tuple[str, dict[str, str]]:
    """Write a model of random weights in this geometry, and a file of prompts of made-up words.

    Returns:
        The model's folder, and what `Load` calls the task.
    """
    place = folder / "model"
    # as a Llama, because transformers reads Qwen2's tokenizers as byte-level ones only
    llama = LlamaConfig(**geometry(config), bos_token_id=None, eos_token_id=0, pad_token_id=0)
    random_model(llama, torch.device("cpu")).save_pretrained(place)
    word_tokenizer(config.vocab_size).save_pretrained(place)
    rows = folder / "rows.jsonl"
    drawn = np.random.default_rng(0).integers(1, config.vocab_size, (ROWS, size.prompt_tokens))
    lines = []
    for row in drawn:
        lines.append(json.dumps({"prompt": " ".join(f"w{word}" for word in row), "answer": "0"}))
    rows.write_text("\n".join(lines))
    return str(place), {"task": str(rows), "template": PLAIN}


def random_prompts(policy: Policy, size: Size) -> list[list[int]]:
    """A prompt a group, of ids but 0; the same at every call."""
    shape = (size.groups, size.prompt_tokens)
    drawn: list[list[int]] = np.random.default_rng(0).integers(1, policy.vocabulary, shape).tolist()
    return drawn


def own_work(policy: Policy, size: Size, batch: int, prompts: Prompts | None = None) -> Work:
    """Completions of exactly `size.completion_tokens` tokens, sampled by the policy; the same at every call.

    Args:
        batch: how many are decoded side by side at most.
        prompts: one a group; None: `random_prompts`.
    """
    prompts = prompts or random_prompts(policy, size)
    no_id = policy.vocabulary  # ends a completion
    completions = generate(
        policy,
        prompts,
        group=size.group,
        sampling=Sampling(size.completion_tokens, TEMPERATURE, (no_id,)),
        generator=torch.Generator().manual_seed(0),
        batch=batch,
    )
    return Work(prompts, completions, [rewards(size.group) for _ in prompts])


def rewards(count: int) -> list[float]:
    """Made-up rewards of so many completions of one prompt: every third has 1, the others 0."""
    return [float(index % 3 == 0) for index in range(count)]


def advantages(work: Work) -> torch.Tensor:
    """fp32 `[groups · G]`, as every objective here has them by default."""
    found = []
    for group in work.rewards:
        found.append(PRESETS["ftis"].advantages(torch.tensor(group, dtype=torch.float64)))
    return torch.cat(found).float()


def training_groups(work: Work) -> list[TrainingGroup]:
    """The work as the learner takes it; every second group is said to come from a peer."""
    groups = []
    authors = itertools.cycle((OWN, PEER))
    for prompt, completions, rewards in zip(work.prompts, work.completions, work.rewards, strict=True):
        part = Part(next(authors), completions, rewards)
        groups.append(TrainingGroup(prompt, (part,)))
    return groups


def make_learner(policy: Policy, objective: str, settings: Settings) -> Learner:
    """A learner that trains the policy's own weights. objective: a name of `PRESETS`."""
    return Learner(policy, PRESETS[objective], settings, TEMPERATURE)
