"""The refusal of a model that does not fit into memory: the need, the limit, and what to do."""

import math

import psutil
import torch

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.fit.plan import Plan, enough_gb
from ftis_node.policy.load import choose_device
from ftis_node.text import rounded
from ftis_node.worker.planning import memory_limit


def refuse_shortage(settings: Settings, chosen: Plan) -> None:
    """Refuse the plan that `planning.settle` chose, if it would run out of memory.

    On a CPU only a set limit counts, because free memory changes there and swap may exist.

    Raises:
        UserError: the smallest plan needs more than is free; UsageError: more than the set limit.
    """
    if chosen.fits:
        return
    device = choose_device(settings.devices[0])
    need = chosen.memory.total
    free, total = _memory(device)
    limit = memory_limit(settings, total)
    by_limit = limit is not None and limit < need
    if device.type != "cuda" and not by_limit:
        return
    given = f"{rounded(chosen.budget)} are free"
    if limit is not None and by_limit:
        given = f"it may use {rounded(limit)}"
    what = f"{settings.model} does not fit: to train it takes {rounded(need)} at least, and {given}."
    fix = "Use a smaller model, --lora, or leave sizes out: `ftis-node fit` says what fits."
    if by_limit and free >= need:
        fix = f"Give it more with {_more(settings, need, total)}, or a smaller model: `ftis-node fit` says what fits."
    if by_limit:
        raise UsageError(what, fix)
    raise UserError(what, fix)  # memory may become free later, so a supervisor tries again


def _more(settings: Settings, need: int, total: int) -> str:
    """The flag that allows a training of so many bytes, of the kind of limit that is set."""
    if settings.vram_share is None:
        return f"--vram {enough_gb(need):g}"
    return f"--set vram_share={math.ceil(100 * need / total) / 100:g}"


def _memory(device: torch.device) -> tuple[int, int]:
    """The bytes that a higher limit could use, on a CPU all memory; and those there are."""
    total = psutil.virtual_memory().total
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    return total, total
