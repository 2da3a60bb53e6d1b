"""The loss scale of float16: small gradients would be rounded to 0, so the loss is multiplied before its backward pass.

Doubling and halving are those of mixed precision training (Micikevicius et al., arXiv 1710.03740, section 3.2).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FIRST = 2.0**12
LARGEST = 2.0**16
LEAST = 1.0
GROW_AFTER = 100  # steps without an overflow
HALVINGS = 2  # of a step at most: what no scale mends costs little


class LossScale:
    """A power of two, for the mean of a batch's losses; 1 and unchanged for dtypes that need none."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.used = dtype == torch.float16
        self.value = FIRST if self.used else 1.0
        self._good = 0

    def of_sum(self, divisor: float) -> float:
        """The factor of the sum that is still to be divided by about `divisor`: a power of two as well."""
        if self.used:
            return self.value * 2.0 ** -round(math.log2(divisor))
        return 1.0

    def overflowed(self, norm: float, forward: Sequence[Tensor]) -> bool:
        """Whether a gradient of this norm is an overflow that a smaller scale may mend; the scale is then halved.

        Args:
            forward: log-probs and loss. If they are not finite themselves, no scale mends it.
        """
        if not self.used or math.isfinite(norm) or self.value <= LEAST:
            return False
        if not all(bool(part.isfinite().all()) for part in forward):
            return False
        self.value /= 2
        self._good = 0
        return True

    def fine(self) -> None:
        """Note a step that changed the weights."""
        self._good += 1
        if self.used and self._good >= GROW_AFTER:
            self.value = min(LARGEST, 2 * self.value)
            self._good = 0

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; nothing where there is no scale."""
        if self.used:
            return {"loss scale": torch.tensor([self.value, self._good], dtype=torch.float64)}
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what `state` gave."""
        kept = state.get("loss scale")
        if self.used and kept is not None:
            self.value = float(kept[0])
            self._good = int(kept[1])
