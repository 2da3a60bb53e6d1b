"""Types of NumPy arrays, by their dtype."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
Float32Array = NDArray[np.float32]
Int64Array = NDArray[np.int64]
Uint8Array = NDArray[np.uint8]
Uint32Array = NDArray[np.uint32]


def total(values: AnyArray) -> int:
    """The sum of integers, which in their own dtype might wrap around."""
    return int(np.sum(values, dtype=np.int64))
