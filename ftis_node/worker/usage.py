"""Measures the compute device's work and idle time between the ends of two steps."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ftis_node.step_report import DeviceSeconds

# The work that keeps the device busy. Everything else (scoring text, copying a checkpoint into main memory, waiting for
# a request) leaves it idle.
WORK = ("generate", "train", "evaluate")


class Usage:
    """A stopwatch for each kind of work. Only the thread that uses the device may call it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            clock: seconds.
        """
        self._clock = clock
        self._since: float | None = None  # the end of the latest step; before the first, the beginning of work
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count the seconds spent in the context for `part`."""
        began = self._clock()
        if self._since is None:
            self._since = began
        try:
            yield
        finally:
            self._spent[part] += self._clock() - began

    def step_ended(self) -> DeviceSeconds:
        """Return the seconds since the end of the previous step, by kind of work, and restart."""
        now = self._clock()
        total = 0.0
        if self._since is not None:
            total = now - self._since
        parts = {part: self._spent[part] for part in (*WORK, "score")}

        self._since = now
        self._spent = defaultdict(float)
        return DeviceSeconds(total, **parts, idle=max(0.0, total - sum(parts[part] for part in WORK)))
