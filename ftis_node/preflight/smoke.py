"""``python -m ftis_node.preflight.smoke DEVICE``: compares a small computation with the CPU's; prints one JSON line."""

import json
import sys

import torch

from ftis_node.policy.load import fastest_dtype

_SIZE = 256
_TOLERANCE = 0.05  # of the largest value; bf16 has 8 bits, and sums over 256 products


def smoke(device: str) -> dict[str, object]:
    """Name, memory, dtype of two bytes of a device; and which of a product and its gradient are not the CPU's."""
    place = torch.device(device)
    half = fastest_dtype(place) if place.type == "cuda" else "bfloat16"
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE, _SIZE, generator=random) for _ in range(2))
    right /= _SIZE**0.5
    here = left.to(place, getattr(torch, half)).requires_grad_()
    product = here @ right.to(place, getattr(torch, half))
    (gradient,) = torch.autograd.grad(product.float().square().sum(), here)
    expected = left @ right
    wanted = {"a product": expected, "a gradient": 2 * expected @ right.T}
    seen = {"a product": product.detach(), "a gradient": gradient}
    wrong = [name for name, value in seen.items() if not _alike(value.float().cpu(), wanted[name])]
    if place.type != "cuda":
        return {"name": device, "half": half, "wrong": wrong}
    free, total = torch.cuda.mem_get_info(place)
    return {"name": torch.cuda.get_device_name(place), "free": free, "total": total, "half": half, "wrong": wrong}


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())


if __name__ == "__main__":
    print(json.dumps(smoke(sys.argv[1])))
