"""``python -m ftis_node.preflight.rates DEVICE DTYPE``: how fast it computes; prints one JSON line."""

import json
import sys
import time
from collections.abc import Callable

import torch

SECONDS = 1.5  # for each of the two rates
_ROWS, _SIZE, _MATRICES = 64, 2048, 8  # as completions side by side; more weights than a cache holds


def rates(device: str, dtype: str) -> dict[str, float]:
    """10^12 operations of matrix products (`tflops`), and GB that are read or written (`bandwidth`), a second each."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    rows = torch.randn(_ROWS, _SIZE).to(place, getattr(torch, dtype))
    weights = torch.randn(_MATRICES, _SIZE, _SIZE).to(rows)
    products = _a_second(lambda: [rows @ one for one in weights], place)
    copies = _a_second(weights.clone, place)
    return {
        "tflops": 2 * _ROWS * weights.numel() * products / 1e12,
        "bandwidth": 2 * weights.nbytes * copies / 1e9,
    }


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


if __name__ == "__main__":
    print(json.dumps(rates(*sys.argv[1:])))
