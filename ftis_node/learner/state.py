"""An optimiser's state of one parameter, as named tensors: a checkpoint's files can hold nothing else."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ftis_node.errors import FtisError

_PLAIN = "=json"  # ends the name of a plain value, written as JSON
_VALUES = (bool, int, float, str, type(None))


def flattened(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """By name: its tensors themselves, and numbers, text and None as tensors.

    Raises:
        FtisError: it holds something else, which is named.
    """
    tensors = {}
    for name, value in entry.items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
        elif type(value) in _VALUES:
            tensors[name + _PLAIN] = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        else:
            raise FtisError(f"The optimiser's state {name} is a {type(value).__name__}, which no checkpoint can hold.")
    return tensors


def unflattened(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Undo `flattened`, with new tensors: an optimiser writes into those that it is given."""
    entry: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.endswith(_PLAIN):
            entry[name.removesuffix(_PLAIN)] = json.loads(bytes(tensor.tolist()))
        else:
            entry[name] = tensor.clone()
    return entry
