"""Ways to go on when memory is short: wait, and take less at a time."""

import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from ftis_node.errors import FtisError
from ftis_node.policy.generate.kept import let_go

T = TypeVar("T")

logger = logging.getLogger(__name__)


# Seconds between attempts of what did fit before: others may give back what they took. The first of them is also waited
# where nothing has fitted yet, all of them where nothing smaller is left to try.
WAITS = (1.0, 5.0, 15.0)
# So many attempts must succeed before more is tried again; twice as many each time that this fails, up to the last.
GROW_AFTER = 10
GROW_AFTER_MOST = 160

# Words of a failed allocation, in small letters. They come from CUDA, ROCm, XPU and MPS, their libraries, C++, and
# PyTorch's allocator for the CPU on Linux and elsewhere. A library's handle takes memory too: where
# there is none left, cuBLAS and cuDNN say "not initialized" when one is made (discuss.pytorch.org/t/125450).
_WORDS = re.compile(
    r"out of memory|can't allocate memory|not enough memory|bad_alloc|(cu|roc|hip)(blas|dnn)(lt)?_status_alloc_failed"
    r"|cublas_status_not_initialized when calling .?cublascreate|cudnn_status_not_initialized|out_of_memory"
)
# These errors leave a GPU unusable for this process, whatever else the message says: only another process helps.
_BROKEN = re.compile(r"illegal memory access|device-side assert|misaligned address|launch failure|illegal instruction")


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that an allocation failed, on whichever device. CUDA has a class for it, others have words.

    An error that leaves the GPU unusable is none, whatever else it says.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    words = str(error).lower()
    return bool(_WORDS.search(words)) and not _BROKEN.search(words)


class Room:
    """How much is done at a time, in a memory that others use too: `size`, at most `most`. An amount that does not fit
    is tried again later, then halved; after enough successes it is doubled.

    Its owner counts in one unit: sequences side by side, or tokens of a micro-batch. The thread that computes calls
    `fine` or `short` after each attempt, and keeps the room for the next one.
    """

    def __init__(self, most: int, size: int | None = None) -> None:
        """size: what is tried first; None or 0: `most`."""
        self.most = most
        self.size = min(most, size or most)
        self._fitted = False  # whether this size has ever fitted
        self._grown = False  # whether it came of growing
        self._waited = 0  # times since the last success
        self._successes = 0  # since the last change of size
        self._grow_after = GROW_AFTER

    def fine(self) -> None:
        """It fitted. After enough of these at one `size` below `most` this is doubled."""
        self._fitted = True
        self._waited = 0
        self._successes += 1
        if self.size < self.most and self._successes >= self._grow_after:
            self._change(min(self.most, 2 * self.size), grown=True)
            logger.info("After %d successes %d at a time are tried again.", self._grow_after, self.size)

    def short(self, there: int, least: int) -> bool:
        """It did not fit: frees memory, then sleeps up to 15 s or makes `size` smaller. Returns whether another attempt
        makes sense. Call it outside the handler, because an exception holds what its frames held.

        Args:
            there: how much there was to be done; of less than `size`, a half is taken.
            least: less than this is not tried; it would save nothing.
        """
        free_memory()
        tried = min(self.size, there)
        if tried <= least or (self._fitted and not self._grown):
            patience = len(WAITS)
        elif self._grown:
            patience = 0
        else:
            patience = 1
        if self._waited < min(patience, len(WAITS)):
            seconds = WAITS[self._waited]
            logger.warning("Out of memory: trying again in %.0f s.", seconds)
            time.sleep(seconds)
            self._waited += 1
            return True
        if tried <= least:
            return False
        if self._grown:
            self._grow_after = min(2 * self._grow_after, GROW_AFTER_MOST)
        self._change(max(least, tried // 2), grown=False)
        logger.warning("Out of memory: %d at a time now, of %d.", self.size, self.most)
        return True

    def _change(self, size: int, *, grown: bool) -> None:
        """Set another size, which has to prove itself. grown: it came of growing."""
        self.size = size
        self._grown = grown
        self._fitted = False
        self._successes = 0


def fitting(attempt: Callable[[int], T], room: Room, *, there: int, least: int) -> T:
    """Return what `attempt` gives with as many sequences side by side as the room has space for.

    The room remembers for the next call what fitted.

    Args:
        attempt: given how many sequences, it does all of the work; called again from the start where memory was short.
        there: how many there are at all.
        least: fewer are not tried.

    Raises:
        FtisError: not even `least` fit. Other errors of `attempt` pass.
    """
    while True:
        try:
            result = attempt(room.size)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        else:
            room.fine()
            return result
        if not room.short(there, least):
            raise FtisError("The completions of a single prompt do not fit into memory side by side.")


def patiently(attempt: Callable[[], T]) -> T:
    """Make an attempt that changes nothing where memory is short: again after each of `WAITS`, then for the last time.

    Others may give back what they took; nothing can be done in smaller pieces here. The last error passes, after
    waits of 21 s.
    """
    for seconds in WAITS:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        free_memory()
        logger.warning("Out of memory: trying again in %.0f s.", seconds)
        time.sleep(seconds)
    return attempt()


# Less free memory than this part of a GPU's counts as short.
SCARCE = 0.1


def make_way(device: torch.device) -> None:
    """Before another phase (generation, training, evaluation), give cached blocks back where the GPU is nearly full.

    The next phase wants blocks of other sizes, and other processes some room. Where memory is free nothing is done, for
    this waits for the device. Unlike `free_memory` it keeps what generation keeps.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < SCARCE * total:
            torch.cuda.empty_cache()


def free_memory() -> None:
    """Give cached blocks back to the device, and what generation keeps for its next call, which makes it anew.

    Call it outside the handler: an exception holds what its frames held.
    """
    let_go()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
