"""The clocks that ages, dates and processor time are read from. Code on a simulated clock replaces them all here."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Linux has it. Elsewhere an age stops while the machine sleeps.
_AGES = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

Clock = Callable[[], float]
"""It returns seconds."""


@dataclass(frozen=True)
class Clocks:
    """boot, unix, thread: what `boot_seconds`, `unix_seconds` and `thread_seconds` return."""

    boot: Clock
    unix: Clock
    thread: Clock


_clocks = Clocks(lambda: time.clock_gettime(_AGES), lambda: time.time(), time.thread_time)


def boot_seconds() -> float:
    """Seconds since the machine started, with those that it slept.

    `time.monotonic` leaves the sleep out: after a night in suspend a packet would count as young, and a ban would last
    a night longer. Plain waits keep the event loop's clock.
    """
    return _clocks.boot()


def unix_seconds() -> float:
    """Seconds since 1970, by this machine's clock, which may be set at any time."""
    return _clocks.unix()


def backoff(times: int, first: float, longest: float, factor: float = 2.0) -> float:
    """The pause after so many failures in a row, one or more: `first`, then `factor` times as long each, up to
    `longest`."""
    return min(first * factor ** min(times - 1, 64), longest)


def thread_seconds() -> float:
    """Processor time of this thread, in seconds."""
    return _clocks.thread()


@contextmanager
def replaced(clocks: Clocks) -> Iterator[None]:
    """Until the end of this context the whole process reads these clocks."""
    global _clocks
    before = _clocks
    _clocks = clocks
    try:
        yield
    finally:
        _clocks = before
