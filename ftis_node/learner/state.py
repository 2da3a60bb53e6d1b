"""An optimiser's state of one parameter, as named tensors: a checkpoint's files can hold nothing else."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ftis_node.errors import FtisError

# Dictionaries within dictionaries are told by a dot; a name that ends like this is of a plain value, written as JSON.
_WITHIN = "."
_PLAIN = "=json"
_VALUES = (bool, int, float, str, type(None))


def flattened(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """By name: its tensors themselves, and numbers, text and None as tensors; from dictionaries within, too.

    Raises:
        FtisError: it holds something else, which is named.
    """
    return dict(_leaves(entry, ""))


def unflattened(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Undo `flattened`, with new tensors: an optimiser writes into those that it is given."""
    entry: dict[str, Any] = {}
    for name, tensor in tensors.items():
        plain = name.endswith(_PLAIN)
        *path, last = name.removesuffix(_PLAIN).split(_WITHIN)
        place = entry
        for key in path:
            place = place.setdefault(key, {})
        place[last] = json.loads(bytes(tensor.tolist())) if plain else tensor.clone()
    return entry


def _leaves(entry: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in entry.items():
        name = f"{above}{key}"
        if not isinstance(key, str) or _WITHIN in key or "/" in key or key.endswith(_PLAIN):
            raise FtisError(f"The optimiser's state {name} has a name that a checkpoint cannot hold.")
        if isinstance(value, Tensor):
            yield name, value.detach()
        elif isinstance(value, dict) and value:
            yield from _leaves(value, name + _WITHIN)
        elif type(value) in _VALUES or value == {}:
            yield name + _PLAIN, torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        else:
            raise FtisError(f"The optimiser's state {name} is a {type(value).__name__}, which no checkpoint can hold.")
