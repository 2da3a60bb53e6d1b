"""How fast a device computes."""

import time
from collections.abc import Callable

import torch

SECONDS = 1.5  # for each of the two rates
_ROWS = {"cuda": 4096, "cpu": 64}  # so many that reading the weights takes no part of the time
_SIZE = 2048
_MATRICES = {"cuda": 64, "cpu": 8}  # more weights than a cache holds


def rates(place: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """10^12 operations of matrix products, and GB that are read or written, a second each.

    Raises:
        RuntimeError: as torch does.
    """
    rows = torch.randn(_ROWS[place.type], _SIZE, dtype=dtype, device=place)
    weights = torch.randn(_MATRICES[place.type], _SIZE, _SIZE, dtype=dtype, device=place)
    products = _a_second(lambda: [rows @ one for one in weights], place)
    copies = _a_second(weights.clone, place)
    return 2 * len(rows) * weights.numel() * products / 1e12, 2 * weights.nbytes * copies / 1e9


def _a_second(work: Callable[[], object], place: torch.device) -> float:
    """How often the work is done in a second, after once."""
    work()
    done = 0
    began = time.perf_counter()
    while time.perf_counter() < began + SECONDS:
        work()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        done += 1
    return done / (time.perf_counter() - began)
