"""When to evaluate: as often as the settings say, and never for more than a share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Exams:
    """Keeps the time that evaluations took; an expensive one is put off."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            share: of all time that evaluations may take, 0 to 1. clock: seconds.
        """
        self._share = share
        self._clock = clock
        self._began: float | None = None
        self._spent = self._latest = 0.0

    def taken(self, seconds: float) -> None:
        """One took so long. The first, before any training, is not counted."""
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
