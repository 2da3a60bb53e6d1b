"""The refusal of a model that does not fit into memory: the need, the limit, and what would fit."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import psutil
import torch

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Plan, enough_gb
from ftis_node.policy.measure import geometry
from ftis_node.policy.names import ALIASES
from ftis_node.text import rounded
from ftis_node.worker.planning import Question, memory_limit, question

_SIZE = re.compile(r"[\d.]+b(?=-|$)")
# A person's wishes that can be dropped, the most dispensable first.
_SIZES = ("micro_batch_tokens", "generation_batch")
_WISHES = ("lora", "gradient_checkpointing", *_SIZES, "dtype", "quantisation", "optimiser")


def refuse_shortage(
    settings: Settings, workload: Workload, remembered: Mapping[str, Any], chosen: Plan, shape: Geometry | None = None
) -> None:
    """Refuse a plan that would run out of memory; takes the arguments of `planning.settle` and its plan.

    On a CPU only a set limit counts, because free memory changes there and swap may exist.

    Raises:
        UserError: the smallest plan needs more than is free; UsageError: more than the set limit.
    """
    if chosen.fits:
        return
    asked = question(settings, workload, remembered, shape)
    need = chosen.memory.total
    free, total = _memory(asked.device)
    limit = memory_limit(settings, total)
    by_limit = limit is not None and limit < need
    if asked.device.type != "cuda" and not by_limit:
        return
    given = f"it may use {rounded(limit)}" if limit is not None and by_limit else f"{rounded(chosen.budget)} are free"
    fitting = []
    if by_limit and free >= need:
        fitting = [_more(settings, need, total)]
    fitting += [*_wishes(settings, asked), *_smaller(settings.model, remembered, asked)]
    what = f"{settings.model} does not fit: to train it takes {rounded(need)} at least, and {given}."
    fix = "Use a smaller model: `ftis-node fit` says what fits."
    if fitting:
        fix = f"What would fit: {_either(fitting)}."
    if by_limit:
        raise UsageError(what, fix)
    raise UserError(what, fix)  # memory may become free later, so a supervisor tries again


def _more(settings: Settings, need: int, total: int) -> str:
    if settings.vram_share is None:
        return f"--vram {enough_gb(need):g}"
    return f"--set vram_share={math.ceil(100 * need / total) / 100:g}"


def _wishes(settings: Settings, asked: Question) -> Iterator[str]:
    """The first wish without which the model would fit."""
    for name in _WISHES:
        if getattr(settings, name) is None or (name == "lora" and settings.lora):
            continue
        without: dict[str, Any] = {name: None}
        if replace(asked, wishes=replace(asked.wishes, **without)).answer().fits:
            yield "--lora" if name == "lora" else f"{name} left out"
            return


def _smaller(model: str, remembered: Mapping[str, Any], asked: Question) -> Iterator[str]:
    """The largest model of the family that would fit; none for a home that has begun with a model."""
    family = _SIZE.sub("", model.lower())
    if model.lower() not in ALIASES or remembered.get("lora") is not None:
        return
    shapes = [geometry(name) for name in ALIASES if _SIZE.sub("", name) == family]
    for shape in sorted(shapes, key=lambda one: -one.parameters):
        if shape.parameters < asked.shape.parameters and replace(asked, shape=shape).answer().fits:
            yield f"--model {shape.name}"
            return


def _either(ways: list[str]) -> str:
    if len(ways) == 1:
        return ways[0]
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


def _memory(device: torch.device) -> tuple[int, int]:
    """The bytes that a higher limit could use, on a CPU all memory; and those there are."""
    total = psutil.virtual_memory().total
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    return total, total
