"""Allocators of memory: PyTorch's of a GPU's, which reads its configuration from the environment when it starts, and
C's of main memory."""

import ctypes
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

# Names of the variable by PyTorch's age and kind; the second is known to all that this project runs with.
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GROWING = "expandable_segments:True"
FIXED = "expandable_segments:False"
_KERNEL = Path("/proc/sys/kernel/osrelease")

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_LARGE = 4 << 20  # bytes
_LARGEST = 32 << 20  # bytes; glibc's own threshold grows to this


def expand_segments(environment: MutableMapping[str, str] = os.environ, kernel: Path = _KERNEL) -> None:
    """Let segments grow, in this process and those that it starts, unless the owner configures the allocator.

    Generation and training ask for blocks of other sizes in turns. In segments of fixed size the gaps that one leaves
    fit nothing of the other; a growing segment gives back single pages. Not under WSL2, where Windows' driver may
    refuse the first of them ("CUDA driver error: unknown error", pytorch issue 192330).
    """
    windows = kernel.is_file() and "microsoft" in kernel.read_text(encoding="utf-8").lower()
    if not windows and not any(name in environment for name in NAMES):
        environment[NAMES[1]] = GROWING


def trim() -> None:
    """Give back to the system what glibc's allocator holds free. By itself it keeps all that lies below something in
    use: after a step gigabytes of activations, beside which generation takes its own. Other allocators stay as
    they are."""
    _glibc("malloc_trim", 0)


@contextmanager
def in_own_pages() -> Iterator[None]:
    """Within it glibc gives each block of 4 MB or more pages of its own, which go back to the system when it is freed.

    For large blocks that live shortly among small ones that stay. Otherwise a small one takes the beginning of the
    place that a large one has left, the next large one does not fit there, and the process grows by one at each turn.
    """
    _glibc("mallopt", _MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        _glibc("mallopt", _MMAP_THRESHOLD, _LARGEST)


def _glibc(function: str, *arguments: int) -> None:
    """Call a function of glibc's allocator; nothing where there is another one: macOS, musl, Windows."""
    with suppress(AttributeError, OSError, TypeError):
        getattr(ctypes.CDLL(None), function)(*arguments)
