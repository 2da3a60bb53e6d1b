"""What generation keeps on a GPU for its next call: places for keys and values, and the CUDA graphs that read them."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

kept: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""By model, until `let_go`; each has `vacate`, which frees the places."""


def vacate() -> None:
    """Lend the memory of keys and values to something else, which gives it back."""
    for what in kept.values():
        what.vacate()


def let_go() -> None:
    """Free all that is kept for any model: memory is short."""
    kept.clear()
