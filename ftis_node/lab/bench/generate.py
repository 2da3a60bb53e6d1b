"""The cost of generation: our engine and transformers' `generate`, on one model."""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from ftis_node.lab.bench import Tell, told
from ftis_node.lab.bench.measure import Figures, measured_on, nbytes, peak_mb, timed
from ftis_node.lab.bench.model import TEMPERATURE, Size, own_work, random_prompts
from ftis_node.lab.bench.whole import engine_of
from ftis_node.policy.generate.sampling import Prompts, left_padded
from ftis_node.policy.nf4 import elements, quantise
from ftis_node.policy.policy import Policy


def bench_generate(
    model: str | None,
    data: Path | None,
    given: Mapping[str, str],
    size: Size,
    *,
    repeats: int,
    tell: Tell = told,
) -> Figures:
    """What `compare` finds for the model and the questions that are `asked`, all completions side by side."""
    with engine_of(model, data, given, size) as (engine, size):
        prompts = engine.prompts[: size.groups]
        return compare(engine.policy, size, batch=size.completions, repeats=repeats, tell=tell, prompts=prompts)


def compare(
    policy: Policy, size: Size, *, batch: int, repeats: int, tell: Tell, prompts: Prompts | None = None
) -> Figures:
    """Completion tokens per CPU-second of the process, and per second until the device is done.

    Args:
        batch: how many sequences are decoded side by side at most, by each.
        tell: is told of progress.
        prompts: one a group; None: random ones.

    Returns:
        Medians over `repeats` runs of each in turns after one to warm up; `*_spread` are minimum and maximum. `native`
        is this project's engine. `nf4` is native on weights of four bits, of a full model, where bitsandbytes is.
        `plain` is transformers' `generate` by itself: sampling at the same temperature, no log-probs.
        `ratio_*` is native over the other, per CPU-second on a CPU and per second on a GPU; None where the other is
        not measured.

    Raises:
        RuntimeError: one did not generate all tokens.
    """
    prompts = prompts or random_prompts(policy, size)
    runs: dict[str, Callable[[], int]] = {
        "native": lambda: _engine(policy, prompts, size, batch),
        "plain": lambda: _plain(policy, prompts, size, batch),
    }
    quantised = bool(elements(policy.model))
    if policy.kind == "full" and not quantised and find_spec("bitsandbytes") is not None:
        four_bits = _in_four_bits(policy)
        runs["nf4"] = lambda: _engine(four_bits, prompts, size, batch)
    cpu_rates: dict[str, list[float]] = {name: [] for name in runs}
    wall_rates: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        if repeat:
            tell(f"run {repeat} of {repeats}")
        else:
            tell("a run to warm up")
        for name, run in runs.items():
            cpu, wall = _measured(run, size.tokens, policy.device)
            if repeat:
                cpu_rates[name].append(cpu)
                wall_rates[name].append(wall)
    tell("measuring memory")
    weights = nbytes(policy.model.parameters())
    figures: Figures = {}
    for name in ("native", "plain"):
        figures[f"{name}_peak_memory_mb"] = peak_mb(runs[name], weights, policy.device)
    for unit, rates in (("cpu_s", cpu_rates), ("s", wall_rates)):
        for name, measured in rates.items():
            figures[f"{name}_tokens_per_{unit}"] = statistics.median(measured)
            figures[f"{name}_tokens_per_{unit}_spread"] = [min(measured), max(measured)]
    judged_by = "tokens_per_cpu_s"
    if policy.device.type == "cuda":
        judged_by = "tokens_per_s"
    for rival in ("plain", "nf4"):
        ratio = None
        if rival in runs:
            ratio = figures[f"native_{judged_by}"] / figures[f"{rival}_{judged_by}"]
        figures[f"ratio_{rival}"] = ratio
    return {
        **figures,
        "native": policy.native,
        "generation_batch": batch,
        **measured_on(policy, size, repeats),
    }


def _in_four_bits(policy: Policy) -> Policy:
    """A copy of the policy with frozen weights in NF4; the policy itself stays in memory beside it."""
    model = copy.deepcopy(policy.model).requires_grad_(False)
    four_bits = replace(policy, model=model)
    head = four_bits.causal_lm.get_output_embeddings()
    quantise(model, head, policy.device, policy.name)
    return four_bits


def _measured(run: Callable[[], int], expected: int, device: torch.device) -> tuple[float, float]:
    """Tokens a CPU-second and a second of a run that generates so many. Raises RuntimeError if it does not."""
    gc.collect()
    began = time.process_time()
    tokens, wall = timed(run, device)
    cpu = time.process_time() - began
    if tokens != expected:
        raise RuntimeError(f"{tokens} tokens were generated in place of {expected}")
    return tokens / cpu, tokens / wall


def _engine(policy: Policy, prompts: Prompts, size: Size, batch: int) -> int:
    """Generates with our engine; returns the number of tokens."""
    tokens = 0
    for group in own_work(policy, size, batch, prompts).completions:
        tokens += sum(map(len, group))
    return tokens


@torch.no_grad()
def _plain(policy: Policy, prompts: Prompts, size: Size, batch: int) -> int:
    """Generates with transformers' `generate`, in batches of whole groups; returns the number of tokens."""
    rows = [prompt for prompt in prompts for _ in range(size.group)]
    whole_groups = max(1, batch // size.group) * size.group
    tokens = 0
    for first in range(0, len(rows), whole_groups):
        part, mask = left_padded(rows[first : first + whole_groups])
        part = part.to(policy.device)
        sequences = policy.causal_lm.generate(
            input_ids=part,
            attention_mask=mask.to(policy.device),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,  # that of an instruct model is another, and the penalty
            repetition_penalty=1.0,
            max_new_tokens=size.completion_tokens,
            eos_token_id=policy.causal_lm.config.vocab_size,  # none of its ids: nothing ends before the cap
            pad_token_id=0,
        )
        tokens += sequences[:, part.shape[1] :].numel()
    return tokens
