"""The plan that completes a person's settings so that the training fits into this machine's memory."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.fit.context import Context
from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import CONTEXT_BYTES, Device, Workload
from ftis_node.fit.plan import MIN_TOKENS, Plan, Wishes, plan
from ftis_node.learner.optimiser import eight_bit
from ftis_node.policy.availability import cached
from ftis_node.policy.load import choose_device, fastest_dtype, load_tokenizer
from ftis_node.policy.measure import geometry
from ftis_node.policy.names import resolve
from ftis_node.policy.nf4 import kernels
from ftis_node.tasks import Task
from ftis_node.tasks.templates import ASKED
from ftis_node.text import GB
from ftis_node.worker.formats import chat_in

# The share of free main memory to plan with if the settings name no limit.
CPU_SHARE = 0.8

_INSTRUCT = re.compile("instruct|chat|-it$")  # in names of models that are asked in a chat

_TRAINED = ("lora", "optimiser", "quantisation")  # the settings that checkpoints were trained with
_FOR_A_SERVER = {"lora": True, "quantisation": "none"}  # with engine=vllm, where nobody chose
_SIZES = ("micro_batch_tokens", "generation_batch")
_PLANNED = (*_TRAINED, *_SIZES, "dtype", "gradient_checkpointing", "sharded")


def settle(
    settings: Settings,
    workload: Workload,
    remembered: Mapping[str, Any],
    shape: Geometry | None = None,
) -> tuple[Settings, Plan]:
    """Fill in the settings that are left to the plan.

    Args:
        remembered: values of the checkpoints (lora, optimiser, quantisation). A person's present settings take
            precedence.
        shape: of the model, where it is known already.

    Raises:
        UsageError: a setting cannot be had on this machine, or a vLLM server could not sample from what is trained.
        UserError: the model's configuration cannot be loaded.
    """
    known = {name: remembered[name] for name in _TRAINED if name in remembered and getattr(settings, name) is None}
    wanted = wishes(settings.model_copy(update=known))
    if wanted.optimiser == "adamw8bit":
        eight_bit()  # raises before anything is loaded
    chosen = _plan(settings, workload, wanted, shape or geometry(settings.model))
    if settings.engine == "vllm" and (not chosen.lora or chosen.quantisation == "nf4"):
        trains = "all weights"
        if chosen.lora:
            trains = "LoRA layers on weights of four bits"
        raise UsageError(
            f"With engine=vllm a server gets LoRA layers for the model's own weights; this node trains {trains}.",
            "Leave out engine=vllm, or use --lora and quantisation=none (with a fresh --home if it began otherwise).",
        )
    if chosen.quantisation == "nf4":
        kernels()  # raises before anything is loaded
    settled = {name: getattr(chosen, name) for name in _PLANNED}
    return settings.model_copy(update=settled), chosen


def chat_expected(settings: Settings) -> bool:
    """Whether a new run would ask this model in a chat: as its tokenizer says, or its name where that is not here."""
    source = resolve(settings.model)
    if Path(source).is_dir() or cached(source, "tokenizer.json") is not None:
        with suppress(UserError):  # a folder may have none
            return chat_in(None, load_tokenizer(settings.model), ASKED, settings) is not None
    return settings.chat != "never" and _INSTRUCT.search(source.lower()) is not None


def asked_in_chat(
    task: Task, context: Context, settled: Callable[[int], tuple[Settings, Plan]]
) -> tuple[Task, Settings, Plan]:
    """The task as a new run asks it in a chat, with what `settle` found. Answers stay short where longer ones have no
    room in the model's context or the memory; the plan says so.

    Args:
        settled: calls `settle` for completions of so many tokens.
    """
    short = task.completion_tokens
    asked = task.in_chat()
    cap = asked.completion_tokens
    settings, plan = settled(cap)
    if cap == short or (plan.fits and task.prompt_tokens + cap <= context.tokens):
        return asked, settings, plan
    settings, plan = settled(short)
    if plan.fits:
        told = f"Answers may have {short} tokens, for there is no room for {cap}: many may be cut off."
        plan = replace(plan, reasons=(*plan.reasons, told))
    asked = replace(
        asked,
        completion_tokens=short,
        chosen=asked.chosen | {"completion_tokens"},
    )
    return asked, settings, plan


def starting_sizes(remembered: Mapping[str, Any], workload: Workload) -> dict[str, int]:
    """Sizes learned from failures, by their names; at least one sequence, or one group: smaller ones save no memory."""
    least = {
        "micro_batch_tokens": max(MIN_TOKENS, workload.longest),
        "generation_batch": workload.group,
    }
    sizes = {}
    for name, smallest in least.items():
        if name in remembered:
            sizes[name] = max(remembered[name], smallest)
    return sizes


def _plan(settings: Settings, workload: Workload, wanted: Wishes, shape: Geometry) -> Plan:
    """The plan for this machine. By itself it chooses 8 bits, or four, on a GPU only."""
    device = choose_device(settings.devices[0])
    kind: Device = "cpu"
    if device.type == "cuda":
        kind = "cuda"
    few_bits = find_spec("bitsandbytes") is not None
    fused = find_spec("liger_kernel") is not None
    budget = smallest_budget(settings)
    dtype = fastest_dtype(device)
    return plan(
        shape,
        budget,
        workload,
        wanted,
        kind,
        few_bits,
        four_bit=few_bits,
        fused=fused,
        dtype=dtype,
    )


def wishes(settings: Settings) -> Wishes:
    """The choices that the settings leave to the plan, and those that they make."""
    chosen = {name: getattr(settings, name) for name in (*_PLANNED, "lora_rank", "lora_targets")}
    if settings.engine == "vllm":
        chosen |= {name: value for name, value in _FOR_A_SERVER.items() if chosen[name] is None}
    return Wishes(**chosen, devices=len(settings.devices))


def smallest_budget(settings: Settings) -> int:
    """Bytes to plan with for each of the settings' devices: those of the smallest, or of a shared memory a part."""
    smallest = min(memory_budget(settings, choose_device(name), bare=True) for name in set(settings.devices))
    if settings.devices[0] == "cpu":
        return smallest // len(settings.devices)
    return smallest


def memory_budget(settings: Settings, device: torch.device, *, bare: bool = False) -> int:
    """Bytes to plan with on a device: the set limit, or the free memory. On a GPU a limit is also enforced.

    Args:
        bare: this process has nothing there but its context on a GPU, which plans count too.
    """
    if device.type != "cuda":
        memory = psutil.virtual_memory()
        free = round(memory.available * CPU_SHARE)
        limit = memory_limit(settings, memory.total)
        # A limit in GB may exceed the memory that is free now; a share of the total may not.
        if limit is None:
            return free
        if settings.vram_gb is not None:
            return limit
        return min(limit, free)
    free, total = torch.cuda.mem_get_info(device)
    if bare:
        free += min(total - free, CONTEXT_BYTES["cuda"])
    limit = memory_limit(settings, total)
    if limit is None:
        return free
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    return min(limit, free)


def memory_limit(settings: Settings, total: int) -> int | None:
    """Bytes that the settings allow of `total`; None: they name no limit."""
    if settings.vram_gb is not None:
        return round(settings.vram_gb * GB)
    if settings.vram_share is None:
        return None
    return round(settings.vram_share * total)
