"""What generation keeps on a GPU for its next call: places for keys and values, and the CUDA graphs that read them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_kept: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def kept(model: nn.Module) -> Any:
    """What was kept for this model; None: nothing."""
    return _kept.get(model)


def keep(model: nn.Module, what: Any) -> None:
    """Keep this for the model until `let_go`."""
    _kept[model] = what


def let_go() -> None:
    """Free what is kept for any model: its memory is wanted for something else."""
    _kept.clear()
