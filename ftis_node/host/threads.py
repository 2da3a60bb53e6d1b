"""How many threads arithmetic takes: fewer while other processes use the cores.

Threads wait for one another after each matrix product, so that one without a core of its own holds up all: beside
another busy process two threads on two cores made 12 tokens in a CPU-second, one made 60.
"""

import os
import time
from collections.abc import Callable

import psutil

LOOK_SECONDS = 1.0  # between two looks, at least: the system counts in hundredths of a second


def unused_seconds() -> tuple[float, float]:
    """The present moment in seconds, and CPU-seconds of all cores so far in which no other process ran."""
    times = psutil.cpu_times()
    return time.monotonic(), times.idle + times.iowait + time.process_time()


class Threads:
    """The number of threads, which is to be asked for between pieces of work; an owner's `OMP_NUM_THREADS` stays.

    most: as many as the process may have. used: at present.
    """

    def __init__(self, most: int, unused_seconds: Callable[[], tuple[float, float]] = unused_seconds) -> None:
        self.most = self.used = most
        self._free = most  # cores, as the latest look found
        self._unused_seconds = unused_seconds
        self._looked, self._unused = unused_seconds()

    def wanted(self) -> int:
        """As many as two looks in a row found free cores, on average since the look before: fewer at once."""
        now, unused = self._unused_seconds()
        seconds = now - self._looked
        if seconds >= LOOK_SECONDS and "OMP_NUM_THREADS" not in os.environ:
            free = round((unused - self._unused) / seconds)
            self.used = max(1, min(self.most, free, self._free))
            self._free = free
            self._looked = now
            self._unused = unused
        return self.used

    def told(self) -> str:
        """What people are told of it behind a present participle; empty where nothing is to be said."""
        if self.used == self.most:
            return ""
        return f" with {self.used} of {self.most} threads, for other processes use the CPU"
