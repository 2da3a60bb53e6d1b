"""Nearest-rank quantiles: each is a value that occurred; torch.quantile refuses more than 16 million."""

import math

from torch import Tensor


def nearest_rank(values: Tensor, *shares: float) -> list[float]:
    """The quantiles `shares`, each in [0, 1], of `values` `[n]`, n ≥ 1; the share 0 is the minimum, 1 the maximum."""
    ordered = values.sort().values
    found = []
    for share in shares:
        place = max(math.ceil(share * len(ordered)) - 1, 0)
        found.append(float(ordered[place]))
    return found
