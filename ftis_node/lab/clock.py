"""Simulated time: an event loop whose clock jumps to the next thing that happens.

A node's own code runs on it unchanged: what it sleeps or waits for costs nothing, and the same trial takes the same
course on a fast machine and on a slow one.
"""

import asyncio
import selectors
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Never waits for a timer: moves the clock instead. While real work is under way the clock stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.working = 0

    def select(self, timeout: float | None = None) -> Any:
        """Called by the loop. timeout: seconds until its next timer; None: it has none."""
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self.working:
            ready = super().select(None)
        else:
            ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps: when nothing is ready, its clock jumps to the next timer. Where nothing but
    outside events is awaited, it waits as any loop does."""

    def __init__(self, start: float = 0.0) -> None:
        """
        Args:
            start: the second to begin with; above 0 where a trial goes on.
        """
        self._simulated = _Selector()
        self._simulated.now = start
        super().__init__(self._simulated)

    def time(self) -> float:
        """Simulated seconds; real ones never move them."""
        return self._simulated.now

    @contextmanager
    def working(self) -> Iterator[None]:
        """While another process works for us, simulated time stands still: timers do not fire. Contexts may overlap."""
        self._simulated.working += 1
        try:
            yield
        finally:
            self._simulated.working -= 1
