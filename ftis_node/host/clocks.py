"""The clock that ages are told by."""

from __future__ import annotations

import time

# Linux has it. Elsewhere an age stops while the machine sleeps.
_AGES = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds since the machine started, with those that it slept.

    `time.monotonic` leaves the sleep out: after a night in suspend a packet would count as young, and a ban would last
    a night longer. Plain waits keep the event loop's clock.
    """
    return time.clock_gettime(_AGES)
