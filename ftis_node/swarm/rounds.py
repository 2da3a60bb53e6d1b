"""The check of an author's round numbers: they decide the prompts, so an author must not choose them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from ftis_node.host.clocks import Clock
from ftis_node.swarm.limits import Bounded

# Round numbers are milliseconds. An author's first round, and the first of a new series, lies this near the clock.
FENCE_SECONDS = 3 * 3600.0
# The most that a round may lie above its author's highest one, unless the author starts a new series.
ROUNDS_AHEAD = 64
ROUNDS_A_SECOND = 16.0
# The most that a late round may lie below the highest one. Where rounds take seconds, ten minutes hold fewer.
ROUNDS_LATE = 256
# The first round received from an author may be the oldest one still in use; later ones may be this much ahead.
LATE_SECONDS = 600.0
# An author may start a new series once in this time, or where its numbers skip this much time.
BEGIN_SECONDS = 3600.0
AUTHORS_MAX = 16_384


class _Series(NamedTuple):
    """highest: the author's highest round. at: when it was received; of a series' first round ten minutes earlier.
    began: when the author last started a series; −∞ for its first one, so another may follow at once.

    at, began: by `Rounds.clock`.
    """

    highest: int
    at: float
    began: float


@dataclass
class Rounds:
    """The highest round of each author, bounded; a forgotten author starts a new series.

    clock: seconds, including those in which the machine sleeps (`boot_seconds`). unix: the wall clock, in seconds since
    1970.
    """

    clock: Clock
    unix: Clock

    def __post_init__(self) -> None:
        self._series = Bounded[bytes, _Series](AUTHORS_MAX)

    def __len__(self) -> int:
        """The number of authors that are remembered."""
        return len(self._series)

    def follows(self, author: bytes, round: int) -> bool:
        """Whether a round may follow its author's received ones; if so, note it as received.

        Ask it of an announcement whose signature holds only: what is noted binds the author. A round that was received
        before may follow again.
        """
        now = self.clock()
        fence = 1000.0 * FENCE_SECONDS
        present = 1000.0 * self.unix()  # as a round number
        if round > present + fence:
            return False
        series = self._series.get(author)
        recent = round >= present - fence
        if series is None:
            return recent and self._begin(author, round, -math.inf)
        if series.highest > present + fence:  # this node's clock was set back
            return recent and self._begin(author, round, now)
        highest = series.highest
        if round <= highest:
            return round >= highest - ROUNDS_LATE
        if round <= highest + ROUNDS_AHEAD + ROUNDS_A_SECOND * (now - series.at):
            self._series[author] = _Series(round, now, series.began)
            return True
        may_begin = now - series.began >= BEGIN_SECONDS or round >= highest + 1000.0 * BEGIN_SECONDS
        return may_begin and recent and self._begin(author, round, now)

    def _begin(self, author: bytes, round: int, began: float) -> bool:
        """Start a series of an author with this round; True, so that a caller can return it."""
        self._series[author] = _Series(round, self.clock() - LATE_SECONDS, began)
        return True
