"""Weights that are multiplied by the same input, laid in one piece: the decoder makes one product of them.

Each module's parameter becomes a view of the piece. Nothing is there twice, and what training or a checkpoint writes
into a parameter is in the piece.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ftis_node.policy.adapters import LoraLinear

_TOGETHER = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}


def lay_in_one(model: Any) -> None:
    """Do so in every layer of a model that the decoder knows, LoRA layers' down matrices too.

    The model must be on its device, and its optimiser not made yet. One layer is held twice at a time.
    """
    for layer in model.model.layers:
        for block, names in _TOGETHER.items():
            modules = [getattr(getattr(layer, block), name) for name in names]
            plain = [module.base_layer if type(module) is LoraLinear else module for module in modules]
            if all(type(module) is nn.Linear for module in plain):
                for name in ("weight", "bias"):
                    _lay(plain, name)
            downs = [module.lora_A for module in modules if type(module) is LoraLinear]
            for adapter in {name for down in downs for name in down}:
                _lay([down[adapter] for down in downs if adapter in down], "weight")
        if next(layer.parameters()).is_cuda:
            torch.cuda.empty_cache()  # what the old weights leave is of no use for larger ones


def in_one(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The piece `[Σ outputs, …]` that these parameters are views of, one behind the other; None if they are not."""
    there = [part for part in parts if part is not None]
    if not there or len(there) < len(parts):
        return None
    first = there[0]
    end = first.storage_offset()
    for part in there:
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype or not part.is_contiguous():
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != end:
            return None
        end += part.numel()
    return first.as_strided((sum(len(part) for part in there), *first.shape[1:]), first.stride())


def _lay(modules: Sequence[Any], name: str) -> None:
    tensors = [getattr(module, name) for module in modules]
    if len(tensors) < 2 or any(one is None for one in tensors):
        return
    kinds = {(one.shape[1:], one.dtype, one.requires_grad) for one in tensors}
    if len(kinds) > 1:
        return
    piece = torch.cat([one.detach() for one in tensors])
    parts = piece.split_with_sizes([len(one) for one in tensors])
    for module, tensor, part in zip(modules, tensors, parts, strict=True):
        setattr(module, name, nn.Parameter(part.data, tensor.requires_grad))
