"""How much of the time from the end of one step to the end of the next the compute device had work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ftis_node.step_report import DeviceSeconds

# What keeps the device busy. All else that the compute process does (scoring text, copying a checkpoint into main
# memory, waiting for what it is asked next) leaves it idle.
WORK = ("generate", "train", "evaluate")


class Usage:
    """A stopwatch for each kind of work. One thread uses it: the one that has the device."""

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
        """Counts the seconds spent in the context as those of `part`."""
        began = self._clock()
        if self._since is None:
            self._since = began
        try:
            yield
        finally:
            self._spent[part] += self._clock() - began

    def step_ended(self) -> DeviceSeconds:
        """Seconds since the end of the step before."""
        now = self._clock()
        total = now - (now if self._since is None else self._since)
        parts = {part: self._spent[part] for part in (*WORK, "score")}
        self._since, self._spent = now, defaultdict(float)
        return DeviceSeconds(total, **parts, idle=max(0.0, total - sum(parts[part] for part in WORK)))
