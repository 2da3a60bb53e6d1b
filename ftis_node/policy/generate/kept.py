"""What generation keeps on a GPU for its next call: places for keys and values, and the CUDA graphs that read them."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

kept: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""By transformers' model, until `let_go` or until the model is gone. Only the thread that computes uses it."""


def let_go() -> None:
    """Free all that is kept for any model. The next call of `native.decode` makes it anew: that costs time only."""
    kept.clear()
