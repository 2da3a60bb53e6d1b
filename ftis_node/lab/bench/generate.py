"""The cost of generation: our engine and transformers' `generate`, with log-probs and without, on one model."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from ftis_node.config.settings import Settings
from ftis_node.fit.memory import NF4_BYTES
from ftis_node.lab.bench import model
from ftis_node.lab.bench.measure import Tell, measured_on, timed
from ftis_node.lab.bench.model import TEMPERATURE, Size, named_policy, planned, random_prompts
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.nf4 import elements, quantise
from ftis_node.policy.policy import Policy

# The size of one tensor that is copied to measure the memory's bandwidth; larger than any cache.
COPIED_BYTES = 1 << 30


def small_policy() -> Policy:
    """The model of `bench train`."""
    return model.random_policy(model.small_config(), model.SETTINGS)


def sized_policy(settings: Settings, size: Size, *, random_weights: bool) -> tuple[Policy, int]:
    """A model as the plan for this work has it on this machine, and how many sequences it generates side by side.

    Raises:
        UserError: model or plan are not to be had here.
    """
    settings, chosen = planned(settings, size, steps=False)
    return named_policy(settings, random_weights=random_weights), chosen.generation_batch


def bench_generate(policy: Policy, size: Size, *, batch: int, repeats: int, tell: Tell) -> dict[str, Any]:
    """Completion tokens per CPU-second of the process, and per second until the device is done.

    Args:
        batch: how many sequences are decoded side by side at most, by each.
        tell: is told of progress.

    Returns:
        Medians over `repeats` runs of each in turns after one to warm up; `*_spread` are minimum and maximum. `native`
        and `hf` are this project's engines. `nf4` is native on weights of four bits, of a full model, where
        bitsandbytes is. `plain` is transformers' `generate` by itself: sampling at the same temperature, no log-probs.
        `ratio_*` is native over the other, per CPU-second on a CPU and per second on a GPU. On a GPU
        `floor_tokens_per_s` is what reading weights and keys and values once a step allows, at the bandwidth of a copy,
        and `over_floor` the time of native over that; None on a CPU.

    Raises:
        RuntimeError: one did not generate all tokens.
    """
    prompts = random_prompts(policy, size)
    runs: dict[str, Callable[[], int]] = {
        "native": lambda: _engine(replace(policy, engine="native"), prompts, size, batch),
        "hf": lambda: _engine(replace(policy, engine="hf"), prompts, size, batch),
        "plain": lambda: _plain(policy, prompts, size, batch),
    }
    if find_spec("bitsandbytes") is not None and not elements(policy.model) and policy.kind == "full":
        four_bits = _in_four_bits(policy)
        runs["nf4"] = lambda: _engine(four_bits, prompts, size, batch)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        tell(f"run {repeat} of {repeats}" if repeat else "a run to warm up")
        for name, run in runs.items():
            took = _measured(run, size, policy.device)
            if repeat:
                seconds[name].append(took)
    figures: dict[str, Any] = {}
    for name, taken in seconds.items():
        for unit, column in (("cpu_s", [cpu for cpu, _ in taken]), ("s", [wall for _, wall in taken])):
            figures[f"{name}_tokens_per_{unit}"] = size.tokens / statistics.median(column)
            figures[f"{name}_tokens_per_{unit}_spread"] = [size.tokens / max(column), size.tokens / min(column)]
    unit = "s" if policy.device.type == "cuda" else "cpu_s"
    ours = figures[f"native_tokens_per_{unit}"]
    floor = _floor(policy, size, batch) if policy.device.type == "cuda" else None
    return {
        "ratio_hf": ours / figures[f"hf_tokens_per_{unit}"],
        "ratio_plain": ours / figures[f"plain_tokens_per_{unit}"],
        "ratio_nf4": ours / figures[f"nf4_tokens_per_{unit}"] if "nf4" in runs else None,
        **figures,
        "floor_tokens_per_s": floor,
        "over_floor": floor / ours if floor else None,
        "lean": policy.lean,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "generation_batch": batch,
        **measured_on(policy, size, repeats),
    }


def _in_four_bits(policy: Policy) -> Policy:
    """A copy of the policy with frozen weights in NF4."""
    model = copy.deepcopy(policy.model).requires_grad_(False)
    four_bits = replace(policy, model=model, engine="native")
    quantise(model, four_bits.causal_lm.get_output_embeddings(), policy.device, policy.name)
    return four_bits


def _measured(run: Callable[[], int], size: Size, device: torch.device) -> tuple[float, float]:
    """CPU-seconds and seconds."""
    gc.collect()
    began = time.process_time()
    tokens, wall = timed(run, device)
    cpu = time.process_time() - began
    if tokens != size.tokens:
        raise RuntimeError(f"{tokens} tokens were generated in place of {size.tokens}")
    return cpu, wall


def _engine(policy: Policy, prompts: list[list[int]], size: Size, batch: int) -> int:
    """No id that ends a completion can be drawn."""
    sampling = Sampling(size.completion_tokens, TEMPERATURE, (policy.vocabulary,))
    generator = torch.Generator().manual_seed(0)
    groups = generate(policy, prompts, group=size.group, sampling=sampling, generator=generator, batch=batch)
    return sum(len(completion) for group in groups for completion in group)


@torch.no_grad()
def _plain(policy: Policy, prompts: list[list[int]], size: Size, batch: int) -> int:
    ids = torch.tensor(prompts, device=policy.device).repeat_interleave(size.group, 0)
    tokens = 0
    for part in torch.split(ids, max(1, batch // size.group) * size.group):
        whole = policy.causal_lm.generate(
            input_ids=part,
            attention_mask=torch.ones_like(part),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            max_new_tokens=size.completion_tokens,
            eos_token_id=policy.causal_lm.config.vocab_size,
            pad_token_id=0,
        )
        tokens += whole[:, size.prompt_tokens :].numel()
    return tokens


def _floor(policy: Policy, size: Size, batch: int) -> float:
    """Tokens a second if each step read every weight, each prompt's keys and values and each row's own once."""
    config = policy.causal_lm.config
    width = policy.dtype.itemsize
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token: int = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * width
    embedding, head = policy.causal_lm.get_input_embeddings().weight, policy.causal_lm.get_output_embeddings().weight
    quantised = elements(policy.model)
    weights = width * (policy.parameters() - quantised - (0 if head is embedding else int(embedding.numel())))
    weights += round(NF4_BYTES * quantised)
    groups = max(1, batch // size.group)
    calls = -(-size.groups // groups)
    kept = token * (size.groups * size.prompt_tokens + size.completions * size.completion_tokens // 2)
    return size.tokens / (size.completion_tokens * (calls * weights + kept) / bandwidth(policy.device))


def bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of copying a tensor."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / min(timed(lambda: target.copy_(source), device)[1] for _ in range(5))
