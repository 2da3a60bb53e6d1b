"""What to make of a lack of memory."""

from __future__ import annotations

import torch


def out_of_memory(error: RuntimeError) -> bool:
    """Whether it says that an allocation failed: CUDA has a class for it, the CPU only words."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_memory() -> None:
    """Gives cached blocks back to the device. Call it outside the handler: an exception holds what its frames held."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
