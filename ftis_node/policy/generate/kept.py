"""What generation keeps on a GPU for its next call: places for keys and values, and the CUDA graphs that read them."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

kept: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""By model, until `let_go`."""


def let_go() -> None:
    """Free all that is kept for any model."""
    kept.clear()
