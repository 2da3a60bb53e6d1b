"""The virtual clock: a heap of what happens next."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any

LOOK_EVERY = 4096


class Scheduler:
    """Calls functions in the order of their times; of equal times, in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def clock(self) -> float:
        """Seconds since the start."""
        return self.now

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._planned += 1
        heapq.heappush(self._heap, (self.now + seconds, self._planned, call, args))

    def run(self, until: float, progress: Callable[[float], None], every: float = 2.0) -> None:
        """Runs to second `until`; tells `progress` the simulated second about `every` real seconds."""
        told, count, heap = time.monotonic(), 0, self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heapq.heappop(heap)
            call(*args)
            count += 1
            if count % LOOK_EVERY == 0 and time.monotonic() - told >= every:
                told = time.monotonic()
                progress(self.now)
        self.now = until


class Alarm:
    """`Swarm._wait` without a coroutine: a loop waits for an event, at most so long, and clears it."""

    def __init__(self, after: Callable[..., None], wake: Callable[[], None]) -> None:
        """
        Args:
            after: plans a call, as `Scheduler.after`.
            wake: the loop's body; it calls `wait` when it is through.
        """
        self._after = after
        self._wake = wake
        self._set = self._waiting = False
        self._turn = 0

    def set(self) -> None:
        self._set = True
        if self._waiting:
            self._waiting = False
            self._after(0.0, self._go)

    def wait(self, seconds: float) -> None:
        if self._set:
            self._after(0.0, self._go)
            return
        self._waiting = True
        self._turn += 1
        self._after(seconds, self._late, self._turn)

    def _late(self, turn: int) -> None:
        if self._waiting and turn == self._turn:
            self._waiting = False
            self._go()

    def _go(self) -> None:
        self._set = False
        self._wake()
