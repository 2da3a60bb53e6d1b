"""The loss scale of float16: small gradients would be rounded to 0, so the loss is multiplied before its backward pass.

Doubling and halving are those of mixed precision training (Micikevicius et al., arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST, LEAST = 2.0**16, 1.0
GROW_AFTER = 100  # steps without an overflow


class LossScale:
    """A power of two; 1 and unchanged for dtypes that need none."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._used = dtype == torch.float16
        self.value = LARGEST if self._used else 1.0
        self._good = 0

    def overflowed(self, norm: float) -> bool:
        """Whether a gradient of this norm is an overflow that a smaller scale may mend; the scale is then halved."""
        if not self._used or math.isfinite(norm) or self.value <= LEAST:
            return False
        self.value, self._good = self.value / 2, 0
        return True

    def fine(self) -> None:
        """Note a step that changed the weights."""
        self._good += 1
        if self._used and self._good >= GROW_AFTER:
            self.value, self._good = min(LARGEST, 2 * self.value), 0

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; nothing where there is no scale."""
        return {"loss scale": torch.tensor([self.value, self._good], dtype=torch.float64)} if self._used else {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what `state` gave out of `state`."""
        kept = state.pop("loss scale", None)
        if self._used and kept is not None:
            self.value, self._good = float(kept[0]), int(kept[1])
