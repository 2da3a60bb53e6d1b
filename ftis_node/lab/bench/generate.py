"""The cost of generation: our engine and transformers' `generate`, on one model."""

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ftis_node.fit.memory import NF4_BYTES
from ftis_node.lab.bench import model
from ftis_node.lab.bench.measure import Tell, measured_on, timed
from ftis_node.lab.bench.model import TEMPERATURE, Size, own_work, random_prompts
from ftis_node.policy.nf4 import elements, quantise
from ftis_node.policy.policy import Policy


def small_policy() -> Policy:
    """The model of `bench train`."""
    return model.random_policy(model.small_config(), model.SETTINGS)


def bench_generate(policy: Policy, size: Size, *, batch: int, repeats: int, tell: Tell) -> dict[str, Any]:
    """Completion tokens per CPU-second of the process, and per second until the device is done.

    Args:
        batch: how many sequences are decoded side by side at most, by each.
        tell: is told of progress.

    Returns:
        Medians over `repeats` runs of each in turns after one to warm up; `*_spread` are minimum and maximum. `native`
        is this project's engine. `nf4` is native on weights of four bits, of a full model, where
        bitsandbytes is. `plain` is transformers' `generate` by itself: sampling at the same temperature, no log-probs.
        `mixed` and `mixed_plain` are native and plain with room for half of the completions, and of lengths that are
        geometric where the model is as good as random: an id in 0.6 of the cap ends one.
        `ratio_*` is native over the other, per CPU-second on a CPU and per second on a GPU. On a GPU
        `floor_tokens_per_s` is what reading weights and keys and values once a step allows, at the bandwidth of a copy,
        and `over_floor` the time of native over that; None on a CPU.

    Raises:
        RuntimeError: one did not generate all tokens.
    """
    prompts = random_prompts(policy, size)
    half = max(1, size.groups // 2) * size.group
    ends = tuple(range(-(-policy.vocabulary * 10 // (6 * size.completion_tokens))))
    runs: dict[str, Callable[[], int]] = {
        "native": lambda: _engine(policy, size, batch),
        "plain": lambda: _plain(policy, prompts, size, batch),
        "mixed": lambda: _engine(policy, size, half, ends),
        "mixed_plain": lambda: _plain(policy, prompts, size, half, ends),
    }
    if find_spec("bitsandbytes") is not None and not elements(policy.model) and policy.kind == "full":
        four_bits = _in_four_bits(policy)
        runs["nf4"] = lambda: _engine(four_bits, size, batch)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        if repeat:
            tell(f"run {repeat} of {repeats}")
        else:
            tell("a run to warm up")
        for name, run in runs.items():
            expected: int | None = size.tokens
            if name.startswith("mixed"):
                expected = None  # as many as there are before an end
            rate = _measured(run, expected, policy.device)
            if repeat:
                rates[name].append(rate)
    figures: dict[str, Any] = {}
    for name, measured in rates.items():
        columns = {"cpu_s": [cpu for cpu, _ in measured], "s": [wall for _, wall in measured]}
        for unit, column in columns.items():
            figures[f"{name}_tokens_per_{unit}"] = statistics.median(column)
            figures[f"{name}_tokens_per_{unit}_spread"] = [min(column), max(column)]
    unit = "cpu_s"
    floor = over_floor = None
    if policy.device.type == "cuda":
        unit = "s"
        floor = _floor(policy, size, batch)
        over_floor = floor / figures["native_tokens_per_s"]
    ours = figures[f"native_tokens_per_{unit}"]
    over_nf4 = None
    if "nf4" in runs:
        over_nf4 = ours / figures[f"nf4_tokens_per_{unit}"]
    return {
        "ratio_plain": ours / figures[f"plain_tokens_per_{unit}"],
        "ratio_mixed": figures[f"mixed_tokens_per_{unit}"] / figures[f"mixed_plain_tokens_per_{unit}"],
        "ratio_nf4": over_nf4,
        **figures,
        "floor_tokens_per_s": floor,
        "over_floor": over_floor,
        "lean": policy.lean,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "generation_batch": batch,
        **measured_on(policy, size, repeats),
    }


def _in_four_bits(policy: Policy) -> Policy:
    """A copy of the policy with frozen weights in NF4."""
    model = copy.deepcopy(policy.model).requires_grad_(False)
    four_bits = replace(policy, model=model)
    quantise(model, four_bits.causal_lm.get_output_embeddings(), policy.device, policy.name)
    return four_bits


def _measured(run: Callable[[], int], expected: int | None, device: torch.device) -> tuple[float, float]:
    """Tokens a CPU-second and a second."""
    gc.collect()
    began = time.process_time()
    tokens, wall = timed(run, device)
    cpu = time.process_time() - began
    if expected not in (None, tokens):
        raise RuntimeError(f"{tokens} tokens were generated in place of {expected}")
    return tokens / cpu, tokens / wall


def _engine(policy: Policy, size: Size, batch: int, ends: tuple[int, ...] = ()) -> int:
    return sum(len(completion) for group in own_work(policy, size, batch, ends).completions for completion in group)


@torch.no_grad()
def _plain(policy: Policy, prompts: list[list[int]], size: Size, batch: int, ends: tuple[int, ...] = ()) -> int:
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
            eos_token_id=list(ends) or policy.causal_lm.config.vocab_size,
            pad_token_id=0,
        )
        drawn = whole[:, size.prompt_tokens :].cpu().numpy()
        over = np.isin(drawn, ends).cumsum(1) - np.isin(drawn, ends) > 0  # an end came before
        tokens += int((~over).sum())
    return tokens


def _floor(policy: Policy, size: Size, batch: int) -> float:
    """Tokens a second if each step read every weight, each prompt's keys and values and each row's own once."""
    config = policy.causal_lm.config
    width = policy.dtype.itemsize
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token: int = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * width
    embedding = policy.causal_lm.get_input_embeddings().weight
    quantised = elements(policy.model)
    read = policy.parameters() - quantised
    if policy.causal_lm.get_output_embeddings().weight is not embedding:
        read -= int(embedding.numel())  # of which a step reads some rows
    weights = width * read + round(NF4_BYTES * quantised)
    calls = -(-size.groups // max(1, batch // size.group))
    kept = token * (size.groups * size.prompt_tokens + size.completions * size.completion_tokens // 2)
    return size.tokens / (size.completion_tokens * (calls * weights + kept) / bandwidth(policy.device))


def bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second, read and written, of copying a tensor of `size` bytes, which should be larger than any cache."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / min(timed(lambda: target.copy_(source), device)[1] for _ in range(5))
