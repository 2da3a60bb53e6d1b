"""What generation keeps on a GPU for its next call: places for keys and values, and the CUDA graphs that read them."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

from torch import nn


class Kept(Protocol):
    """Kept for one model."""

    def vacate(self) -> None:
        """Free the places for keys and values."""


_kept: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()


def kept(model: nn.Module) -> Kept | None:
    """What was kept for this model, if anything."""
    return _kept.get(model)


def keep(model: nn.Module, what: Kept) -> None:
    """Keep this for the model until `let_go`."""
    _kept[model] = what


def vacate() -> None:
    """Lend the memory of keys and values to something else, which gives it back."""
    for what in _kept.values():
        what.vacate()


def let_go() -> None:
    """Free all that is kept for any model: memory is short."""
    _kept.clear()
