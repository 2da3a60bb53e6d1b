"""Small random Qwen2 models with real tokenizers, made on the fly, for the tests of what runs on models."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import ftis_node
from ftis_node.config.run import Run, RunFile, dump_run_file, run_for
from ftis_node.config.settings import Settings, collect
from ftis_node.packet import Completion, decode, encode, pack_group
from ftis_node.policy.adapters import LoraConfig, get_peft_model
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.policy import Policy
from ftis_node.policy.ready import ready
from ftis_node.policy.score import completion_logprobs
from ftis_node.store.checkpoints import Checkpoints, labelled
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import GroupPart, ModelFacts, ScoredPacket, StepGroup

BUILT_IN = Path(ftis_node.__file__).parent / "models"
QWEN = Path(__file__).resolve().parents[3] / "shared" / "data" / "qwen2.5-tokenizer"
GPT2 = QWEN.parent / "gpt2-tokenizer"


PROMPTS = [[5, 9, 14], [20], [7, 7, 8, 3, 2, 25, 11, 6, 4], [12, 13, 14, 15, 16, 17]]


@cache
def tiny_tokenizer() -> Any:
    """The built-in models' tokenizer: 26 ids, EOS is 1."""
    return AutoTokenizer.from_pretrained(BUILT_IN / "tiny-a")


def tiny_config(**changes: Any) -> Qwen2Config:
    """A Qwen2 of two layers whose random weights are large enough to make its distributions uneven."""
    sizes = {
        "vocab_size": 26,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return Qwen2Config(**sizes | changes)


def tiny_policy(*, seed: int = 0, lora: bool = False, tokenizer: Any = None, **changes: Any) -> Policy:
    """A random policy on the CPU, packed. Padded rows of the head (beyond the tokenizer) are what it likes best."""
    tokenizer = tokenizer or tiny_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(tiny_config(**changes)).eval()
        if model.config.vocab_size > len(tokenizer) and not model.config.tie_word_embeddings:
            with torch.no_grad():
                model.lm_head.weight[len(tokenizer) :] *= 20
        if lora:
            targets = ["q_proj", "v_proj", "down_proj"]
            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero as peft makes them: then LoRA would change nothing
                    torch.nn.init.normal_(parameter, std=0.3)
    return ready(Policy("tiny-random", model, tokenizer, torch.device("cpu")))


# One of each kind that scoring and sampling tell apart: what it has.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "padded": {"vocab_size": 40},
    "tied": {"vocab_size": 40, "tie_word_embeddings": True},
    "lora": {"vocab_size": 40, "lora": True},
}


@cache
def of_kind(kind: str) -> Policy:
    """Made when it is first asked for: each process that collects tests would make all."""
    return tiny_policy(**KINDS[kind])


def twin(policy: Policy) -> Policy:
    """The same policy with weights of its own."""
    return replace(policy, model=copy.deepcopy(policy.model))


def logprobs_of(policy: Policy, prompts: Sequence[Sequence[int]], completions: Any, temperature: float) -> Tensor:
    """[T] log-probs by `completion_logprobs`, every completion with a prompt of its own."""
    pairs = zip(prompts, completions, strict=True)
    return completion_logprobs(policy, [Prefixed(prompt, [c]) for prompt, c in pairs], temperature)[0]


def plain_logprobs(policy: Policy, prompts: Sequence[Sequence[int]], completions: Any, temperature: float) -> Tensor:
    """[T] log-probs by a whole-model forward pass and a full softmax of every sample by itself."""
    out = []
    for prompt, completion in zip(prompts, completions, strict=True):
        answer = [int(token) for token in completion]
        logits = policy.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        distribution = torch.log_softmax(logits[:, : len(policy.tokenizer)] / temperature, -1)
        out += [distribution[place, token] for place, token in enumerate(answer)]
    return torch.stack(out)


@contextmanager
def held_for_backward() -> Iterator[list[int]]:
    """Collects the number of elements of every tensor that is kept for the way back."""
    sizes = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def logprob_errors(policy: Policy, prompts: Sequence[Sequence[int]], groups: Any, temperature: float) -> Any:
    """[T] how far the claimed log-probs are from those of a fresh forward pass."""
    flat = [completion for group in groups for completion in group]
    repeated = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    with torch.no_grad():
        fresh = logprobs_of(policy, repeated, [c.token_ids for c in flat], temperature).numpy()
    return np.abs(np.concatenate([c.logprobs for c in flat]) - fresh)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def arithmetic_settings(**flags: Any) -> Settings:
    """The arithmetic task's settings as the compute process gets them."""
    flags = {"device": "cpu", "eval_prompts": 40} | flags
    return collect(task="arithmetic", flags=flags, environment={})[0]


def arithmetic_run(facts: ModelFacts, **changes: Any) -> Run:
    """A run that fits what the engine told of itself when it loaded."""
    return run_for(facts.shared(), **{"group": 8} | changes)


def opened_engine(
    task: str = "arithmetic", *, load: Mapping[str, Any] = {}, run: Mapping[str, Any] = {}, **settings: Any
) -> Engine:
    """An engine with its model loaded and its run begun; load, run: what else it is to load, and changes of the run."""
    engine = Engine()
    engine.open(arithmetic_run(engine.load(arithmetic_settings(**settings), task, **load), **run))
    return engine


def completions_of(group: ScoredPacket) -> list[Completion]:
    """The completions that an engine generated."""
    return list(decode(group.packet).completions())


def packed(engine: Engine, completions: Sequence[Completion], row: int = 0) -> bytes:
    """The packet of a group that nobody sampled."""
    place = {
        "run_id": engine.run.id,
        "author": b"",
        "round": 0,
        "slot": 0,
        "policy_step": 0,
    }
    return encode(pack_group(**place, prompt_ids=engine.prompts[row], completions=completions))


def batch_of(
    rows: Sequence[int], generated: Sequence[ScoredPacket], *, uneven: bool = False, source: str = "own"
) -> list[StepGroup]:
    """Generated groups as a step takes them; `uneven`: with rewards that differ, whatever they earned."""
    groups = []
    for row, made in zip(rows, generated, strict=True):
        rewards = [float(place % 2) for place in range(len(made.rewards))] if uneven else made.rewards
        groups.append(StepGroup(row, [GroupPart(source, made.packet, rewards)]))
    return groups


def engine_in(home: Path, *, lora: bool, eval_prompts: int) -> tuple[Engine, ModelFacts]:
    """An engine on the arithmetic task, whose run file it leaves in the home; and what it said of model and task."""
    engine = Engine()
    facts = engine.load(arithmetic_settings(lora=lora, eval_prompts=eval_prompts), "arithmetic")
    engine.open(arithmetic_run(facts))
    home.mkdir(parents=True, exist_ok=True)
    (home / "run.toml").write_text(dump_run_file(RunFile(run=engine.run)))
    return engine, facts


def saved_by(engine: Engine, home: Path, step: int, model: str = "tiny-a"):
    """A checkpoint of the engine in the home."""
    checkpoints = Checkpoints(home / "checkpoints")
    directory = checkpoints.begin(step)
    engine.save(str(directory))
    checkpoints.commit(directory, {"model": labelled(model, engine.policy.kind), "progress": {"step": step}})


def home_in(home: Path, *steps: int, lora: bool = True, eval_prompts: int = 4) -> Engine:
    """Begin a home with checkpoints of changed weights; return the engine that has them."""
    engine, _ = engine_in(home, lora=lora, eval_prompts=eval_prompts)
    change_weights(engine)
    for step in steps:
        saved_by(engine, home, step)
    return engine


def change_weights(engine: Engine):
    """Some of those that are trained, so that they are not the model's own any more."""
    with torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in engine.policy.model.named_parameters():
            if parameter.requires_grad and ("lora_B" in name or "v_proj" in name):
                parameter += torch.randn_like(parameter) * 0.05
