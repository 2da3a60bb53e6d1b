"""Matrices that read the same input, one behind the other in memory: then one product does the work of several.

The parameters stay what they are, views of one storage; whatever changes them in place changes the joint matrix too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join(model: nn.Module) -> None:
    """Move q, k and v, and gate and up, of every layer together, where each is a plain linear module or LoRA's base."""
    for module in model.modules():
        for names in _TOGETHER:
            parts = [plain(getattr(module, name, None)) for name in names]
            found = [part for part in parts if part is not None]
            if len(found) == len(names):
                _move([part.weight for part in found])
                if all(part.bias is not None for part in found):
                    _move([part.bias for part in found])


def plain(module: Any) -> nn.Linear | None:
    """The linear module itself, or the one that LoRA layers stand beside; None where there is none."""
    module = getattr(module, "base_layer", module)
    return module if type(module) is nn.Linear else None


def joint(parts: Sequence[Tensor]) -> Tensor | None:
    """One view of all, behind one another along the first dimension; None if they do not lie so."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        alike = part.dtype == first.dtype and part.shape[1:] == first.shape[1:] and part.is_contiguous()
        if not alike or part.data_ptr() != end or part.untyped_storage().data_ptr() != _storage(first):
            return None
        end += part.numel() * part.element_size()
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _move(parts: Sequence[Tensor]) -> None:
    if len({part.dtype for part in parts}) > 1:
        return
    together = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, torch.split(together, [len(part) for part in parts]), strict=True):
        part.data = place
