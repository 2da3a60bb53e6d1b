"""What to make of a lack of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from ftis_node.errors import FtisError

T = TypeVar("T")

logger = logging.getLogger(__name__)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether it says that an allocation failed: CUDA has a class for it, the CPU only words."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def fitting(attempt: Callable[[int], T], *, batch: int, most: int, least: int) -> tuple[T, int]:
    """What `attempt` gives with so many sequences side by side, and how many they were: where they do not fit into
    memory, half as many are tried.

    Args:
        batch: how many are tried first.
        most: how many there are at all.
        least: fewer are not tried.

    Raises:
        FtisError: not even `least` fit.
    """
    while True:
        try:
            return attempt(batch), batch
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        free_memory()
        if min(batch, most) <= least:
            raise FtisError("The completions of a single prompt do not fit into memory side by side.")
        batch = max(least, min(batch, most) // 2)
        logger.warning("Out of memory: %d sequences are generated side by side now.", batch)


def free_memory() -> None:
    """Gives cached blocks back to the device. Call it outside the handler: an exception holds what its frames held."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
