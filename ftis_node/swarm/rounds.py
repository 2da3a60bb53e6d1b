"""Which rounds of an author a node takes in: their numbers decide the prompts, so an author must not choose them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ftis_node.swarm.bounded import make_room

# Numbers are milliseconds. An author's first round, and any that begins anew, lies so near the clock.
FENCE_SECONDS = 3 * 3600.0
# How far above the highest round of an author the next may lie; further only where an author begins anew.
ROUNDS_AHEAD = 64
ROUNDS_A_SECOND = 16.0
# How far below the highest round one that comes late may lie. Where rounds take seconds, ten minutes hold fewer.
ROUNDS_LATE = 256
# The round received first of an author may be the oldest that is still of use: its successors may be so much ahead.
LATE_SECONDS = 600.0
# An author may begin anew once in this time, or wherever it leaves out this much time by its numbers.
BEGIN_SECONDS = 3600.0
AUTHORS_MAX = 16_384


class _Heard(NamedTuple):
    """highest: of an author's rounds. at: when it was received. began: when the author last began anew."""

    highest: int
    at: float
    began: float


class Rounds:
    """The highest round of each author, bounded; an author that was forgotten begins once more."""

    def __init__(self, clock: Callable[[], float], unix: Callable[[], float]) -> None:
        """
        Args:
            clock: seconds, which go on while the machine sleeps (`boot_seconds`).
            unix: the wall clock, in seconds since 1970.
        """
        self._clock = clock
        self._unix = unix
        self._heard: dict[bytes, _Heard] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def follows(self, author: bytes, round: int) -> bool:
        """Whether a round may follow on those of its author that were received; then it counts as received."""
        now, fence = self._clock(), 1000.0 * FENCE_SECONDS
        number = 1000.0 * self._unix()
        if round > number + fence:
            return False
        heard = self._heard.get(author)
        if heard is None or heard.highest > number + fence:  # in the latter case this node's clock was set back
            return round >= number - fence and self._begin(author, round, -math.inf if heard is None else now)
        if round <= heard.highest:
            return round >= heard.highest - ROUNDS_LATE
        if round <= heard.highest + ROUNDS_AHEAD + ROUNDS_A_SECOND * (now - heard.at):
            self._heard[author] = _Heard(round, now, heard.began)
            return True
        may = now - heard.began >= BEGIN_SECONDS or round >= heard.highest + 1000.0 * BEGIN_SECONDS
        return may and round >= number - fence and self._begin(author, round, now)

    def _begin(self, author: bytes, round: int, began: float) -> bool:
        make_room(self._heard, author, AUTHORS_MAX)
        self._heard[author] = _Heard(round, self._clock() - LATE_SECONDS, began)
        return True
