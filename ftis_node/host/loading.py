"""Imports without Python's garbage collector, which would take a quarter of their time or more.

torch, transformers and hivemind make hundreds of thousands of objects that live as long as the process.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage in this context, and never walk the objects that exist at its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
