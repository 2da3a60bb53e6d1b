"""The schedule of evaluations: a limit on their share of the time, and the curve of their results."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec.structs import asdict

from ftis_node.config.run import CODE
from ftis_node.evaluate.evaluation import Evaluation
from ftis_node.node.condition import ENOUGH_GROUPS
from ftis_node.node.means import Means
from ftis_node.observe.metrics import MetricsLog, read_events
from ftis_node.tasks.rewards import FORMS, form_of
from ftis_node.worker.messages import OWN_DATA, Evaluate

CURVE = 70  # evaluations in the status
CURVE_BYTES = 1 << 20  # at the end of the log, from which they are read
SHARE = 0.1  # of all time, for evaluations
OFTEN = 300.0  # seconds between two of them; where that is too little for all questions, each asks only a part of them
FEWEST = 16  # questions of a part, unless then a part would be asked more seldom than this:
SELDOM = 1800.0  # seconds
BY_HEART = 0.2  # between their reward and the upper end of pass@1's interval
FORMLESS = (
    "None of %d answers had the rewarded form, %s. Until some do, "
    "the model learns nothing from its own samples, only from those of other nodes."
)

logger = logging.getLogger(__name__)


class EvaluationSchedule:
    """Measures the time of evaluations and delays expensive ones, so that they take a tenth of a start's time at most.

    curve: step and pass@1 of the latest 70, with those of earlier starts. warning: what the latest shows to be wrong,
    in sentences that begin with a space; empty if nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: seconds.
        """
        self._clock = clock
        self._began: float | None = None  # when the first evaluation of this start had ended
        self._spent = 0.0  # seconds, in all, without the first one's
        self._whole = 0.0  # seconds that all questions would take, by the latest
        self._besides = 0.0  # seconds for own data, of the latest
        self._questions = 0  # the most that one of them asked
        self._asked = 0  # parts so far
        self.curve: deque[tuple[int, float]] = deque(maxlen=CURVE)
        self.warning = ""
        self._before: tuple[float, float] | None = None  # pass@1 before training, and the low end of its interval

    def recall(self, metrics: Path) -> None:
        """Read the curve of earlier starts from the last MiB of their log; once, at the start."""
        for event in read_events(metrics, "evaluation", "started", last_bytes=CURVE_BYTES):
            if event["event"] == "started":
                self.went_back(event["step"])
            else:
                self._note(event["step"], event["pass_at_1"], event.get("low", 0.0))

    def went_back(self, step: int) -> None:
        """Drop the evaluations after this step from the curve, because the training continues from its checkpoint."""
        self.curve = deque((one for one in self.curve if one[0] <= step), maxlen=CURVE)

    async def evaluate(self, means: Means, metrics: MetricsLog, since_start: float, rewards: Sequence[float]) -> None:
        """Evaluate, due or not, and write the results into `metrics.jsonl` and into the progress.

        Args:
            since_start: seconds, for the log. rewards: mean ones of the latest own groups.

        Raises:
            WorkerDied, WorkerFault: the compute process failed; nothing is noted.
        """
        parts = self.parts()
        found = await means.worker.call(Evaluate(part=self._asked % parts, parts=parts))
        seconds = found.seconds
        also: dict[str, Any] = {}
        if means.own_data_groups:
            own = await means.worker.call(Evaluate(OWN_DATA))
            seconds += own.seconds
            also["own_data"] = asdict(own)
        means.progress.evaluated(found.pass_at_1)
        step = means.progress.step
        self.taken(step, found, seconds, parts, rule=means.run.reward, rewards=rewards)
        if also:
            logger.info("Step %d: pass@1 %.3f on your own data", step, also["own_data"]["pass_at_1"])
        metrics.write("evaluation", step=step, since_start=since_start, **asdict(found), **also)

    def taken(
        self,
        step: int,
        found: Evaluation,
        seconds: float,
        parts: int = 1,
        *,
        rule: str = "integer",
        rewards: Sequence[float] = (),
    ) -> None:
        """Note an evaluation, and log it. The first one, before any training, does not count towards the time.

        Args:
            seconds: its duration. parts: it was of one of so many parts of the questions.
            rule: that scored it; code may reward any form, and parts of an answer.
            rewards: mean ones of the latest own groups, whose rows are trained on.
        """
        self.warning = self._fallen(found)
        if len(rewards) >= ENOUGH_GROUPS and not rule.startswith(CODE) and fmean(rewards) - found.high >= BY_HEART:
            self.warning += (
                f" It learns its rows by heart: its samples earn {fmean(rewards):.2f} on them, and pass@1 is "
                f"{found.pass_at_1:.2f} on the questions held out. Give the run more rows."
            )
        sure = "Step %d: pass@1 %.3f, 95 %% between %.3f and %.3f (format %.3f)"
        logger.info(sure, step, found.pass_at_1, found.low, found.high, found.formatted)
        formless = found.prompts and not found.formatted and not found.correct
        if self._began is None and formless and not rule.startswith(CODE):
            logger.warning(FORMLESS, found.prompts, FORMS[form_of(rule)].format("…"))
        self._note(step, found.pass_at_1, found.low)
        if self._began is None:
            self._began = self._clock()
        else:
            self._spent += seconds
        self._asked += 1
        self._whole = found.seconds * parts
        self._besides = seconds - found.seconds
        self._questions = max(self._questions, found.prompts)

    def _note(self, step: int, pass_at_1: float, low: float) -> None:
        """Add a point to the curve; that of step 0 is what later ones are compared with. low: of its interval."""
        self.curve.append((step, pass_at_1))
        if step == 0:
            self._before = (pass_at_1, low)

    def _fallen(self, found: Evaluation) -> str:
        """A sentence where the model has become worse, beyond chance, than it was before training; else "", also where
        the log does not have the evaluation before training."""
        if self._before is None or found.high >= self._before[1]:
            return ""
        return (
            f" pass@1 fell from {self._before[0]:.2f} before training to {found.pass_at_1:.2f}: "
            "its steps are too large. Begin anew in another --home, with a third of the learning_rate."
        )

    def parts(self) -> int:
        """Return into how many parts the questions are divided, 1 or more: each evaluation asks the next one.

        They are so many that one is due every five minutes, but each has 16 questions at least. Where one would then be
        due more seldom than every half an hour, they are as many as that takes.
        """
        often = math.ceil(self._whole / (SHARE * OFTEN))
        seldom = math.ceil(self._whole / (SHARE * SELDOM))
        return max(1, min(often, self._questions // FEWEST), min(seldom, self._questions))

    def due_seconds(self, ahead: float = 0.0) -> float | None:
        """Seconds until another evaluation fits into the share, 0 if one is due; None before the first, which is due.
        `Training` asks after each step.

        Args:
            ahead: seconds until a step after which one may be taken.
        """
        if self._began is None:
            return None
        with_next = self._spent + self._whole / self.parts() + self._besides
        return max(ahead, with_next / SHARE - (self._clock() - self._began))
