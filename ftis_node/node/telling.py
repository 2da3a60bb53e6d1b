"""Telling a person how the node is: the present condition, and a log line when it changes."""

import logging
from collections.abc import Callable

from ftis_node.node.condition import Condition, State

logger = logging.getLogger(__name__)


class Telling:
    """A node's condition: what `set_apart` set, until `trains` is called; from then on what the signs say.

    It begins as LOADING. The signs (`Signs`) are read anew for each question.
    """

    def __init__(self, of_training: Callable[[], Condition], stops: Callable[[], bool]) -> None:
        """
        Args:
            of_training: returns the condition of a node that trains.
            stops: returns whether the node was asked to stop; then no other condition is set.
        """
        self._of_training = of_training
        self._stops = stops
        self._apart: Condition | None = Condition(State.LOADING, "The node is starting.")
        self._logged = (State.LOADING, "")  # the latest state and advice in the log

    def condition(self) -> Condition:
        """The node's present condition."""
        if self._apart is not None:
            return self._apart
        return self._of_training()

    def trains(self) -> None:
        """From now on the condition follows from the signs, until the next `set_apart`."""
        self._apart = None

    def set_apart(self, state: State, reason: str, advice: str = "") -> None:
        """Set the condition of a node that does not train, and log it. Once it was asked to stop, only STOPPING counts:
        others are ignored, and not logged."""
        if not self._stops() or state is State.STOPPING:
            self._apart = Condition(state, reason, advice)
            self._log(self._apart)

    def note(self) -> None:
        """Log the condition if its state or advice changed since the last line; called before each step. A reason alone
        is no change, for it has figures in it."""
        now = self.condition()
        if (now.state, now.advice) != self._logged:
            self._log(now)

    def _log(self, now: Condition) -> None:
        """Log a condition, and remember it as the latest in the log."""
        logger.info("%s: %s", now.state, f"{now.reason} {now.advice}".rstrip())
        self._logged = (now.state, now.advice)
