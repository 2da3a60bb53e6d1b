"""What to make of a lack of memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from ftis_node.errors import FtisError

T = TypeVar("T")

logger = logging.getLogger(__name__)


# How PyTorch and what it calls say that an allocation failed, in small letters: CUDA, ROCm, XPU and MPS, their libraries,
# PyTorch's allocator for the CPU on Linux and elsewhere, C++. A library's handle takes memory too: where there is none
# left, cuBLAS and cuDNN say "not initialized" when one is made (discuss.pytorch.org/t/125450).
_WORDS = re.compile(
    r"out of memory|can't allocate memory|not enough memory|bad_alloc|(cu|roc|hip)(blas|dnn)(lt)?_status_alloc_failed"
    r"|cublas_status_not_initialized when calling .?cublascreate|cudnn_status_not_initialized|out_of_memory"
)
# What leaves a GPU unusable for this process, whatever else the message says: only another process helps.
_BROKEN = re.compile(r"illegal memory access|device-side assert|misaligned address|launch failure|illegal instruction")


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that an allocation failed, on whichever device. CUDA has a class for it, others have words."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and bool(_WORDS.search(words)) and not _BROKEN.search(words)


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
