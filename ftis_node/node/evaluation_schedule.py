"""When to evaluate: as often as the settings say, and never for more than a share of the time; and what came of it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ftis_node.evaluate.evaluation import Evaluation
from ftis_node.observe.metrics import read_events

CURVE, CURVE_BYTES = 70, 1 << 20  # evaluations that the status tells, and where they are looked for after a start
FORMLESS = (
    "None of %d answers was in the form that is rewarded, <think>…</think> <answer>…</answer>: as long as that is so, "
    "it has nothing to learn from alone, only from others' samples."
)

logger = logging.getLogger(__name__)


class EvaluationSchedule:
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
        for event in read_events(metrics, "evaluation", "started", last_bytes=CURVE_BYTES):
            if event["event"] == "started":
                self.went_back(event["step"])
            else:
                self.curve.append((event["step"], event["pass_at_1"]))

    def went_back(self, step: int) -> None:
        """The training goes on from the checkpoint of this step: evaluations of later ones were of weights now lost."""
        self.curve = deque((one for one in self.curve if one[0] <= step), maxlen=CURVE)

    def taken(self, step: int, found: Evaluation, *, code: bool = False) -> None:
        """One was taken. The time of the first, before any training, is not counted.

        Args:
            code: whether code of the task's own judged, which may reward other forms, and parts of an answer.
        """
        logger.info("Step %d: pass@1 %.3f (format %.3f)", step, found.pass_at_1, found.formatted)
        formless = found.prompts and not found.formatted and not found.correct
        if self._began is None and formless and not code:
            logger.warning(FORMLESS, found.prompts)
        self.curve.append((step, found.pass_at_1))
        if self._began is None:
            self._began = self._clock()
        else:
            self._spent += found.seconds
        self._latest = found.seconds

    def due(self) -> bool:
        """Whether another like the latest fits."""
        if self._began is None:
            return True
        return self._spent + self._latest <= self._share * (self._clock() - self._began)
