"""When to evaluate: as often as the settings say, and never for more than a share of the time; and what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ftis_node.observe.metrics import read_events

CURVE, CURVE_BYTES = 70, 1 << 20  # evaluations that the status tells, and where they are looked for after a start


class Exams:
    """Keeps the time that evaluations took; an expensive one is put off. curve: step and pass@1 of the latest."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            share: of all time that evaluations may take, 0 to 1. clock: seconds.
        """
        self._share = share
        self._clock = clock
        self._began: float | None = None
        self._spent = self._latest = 0.0
        self.curve: deque[tuple[int, float]] = deque(maxlen=CURVE)

    def recall(self, metrics: Path) -> None:
        """The curve of earlier starts, from their log."""
        earlier = read_events(metrics, "evaluation", last_bytes=CURVE_BYTES)
        self.curve.extend((event["step"], event["pass_at_1"]) for event in earlier)

    def taken(self, step: int, pass_at_1: float, seconds: float) -> None:
        """One took so long. The time of the first, before any training, is not counted."""
        self.curve.append((step, pass_at_1))
        if self._began is None:
            self._began = self._clock()
        else:
            self._spent += seconds
        self._latest = seconds

    def due(self) -> bool:
        """Whether another like the latest fits."""
        if self._began is None:
            return True
        return self._spent + self._latest <= self._share * (self._clock() - self._began)
