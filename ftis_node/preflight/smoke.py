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
    half = "bfloat16"
    if place.type == "cuda":
        half = fastest_dtype(place)
    dtype = getattr(torch, half)
    random = torch.Generator().manual_seed(0)
    left = torch.randn(_SIZE, _SIZE, generator=random)
    right = torch.randn(_SIZE, _SIZE, generator=random) / _SIZE**0.5
    expected = left @ right
    here = left.to(place, dtype).requires_grad_()
    product = here @ right.to(place, dtype)
    loss = product.float().square().sum()
    (gradient,) = torch.autograd.grad(loss, here)
    wrong = []
    if not _alike(product, expected):
        wrong.append("a product")
    if not _alike(gradient, 2 * expected @ right.T):
        wrong.append("a gradient")
    facts: dict[str, object] = {"name": device, "half": half, "wrong": wrong}
    if place.type == "cuda":
        facts["name"] = torch.cuda.get_device_name(place)
        facts["free"], facts["total"] = torch.cuda.mem_get_info(place)
    return facts


def _alike(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
    apart = seen.detach().float().cpu() - wanted
    return bool(apart.abs().max() <= _TOLERANCE * wanted.abs().max())


if __name__ == "__main__":
    print(json.dumps(smoke(sys.argv[1])))
