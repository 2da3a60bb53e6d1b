"""The numbers of this node's own rounds: near the clock's milliseconds, and never the same number twice."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable

TABLE = """
CREATE TABLE IF NOT EXISTS used_rounds (
    run BLOB NOT NULL, first INTEGER NOT NULL, next INTEGER NOT NULL, PRIMARY KEY (run, first)
) WITHOUT ROWID
"""
# Receivers take an author's first round only within three hours of their clocks (`swarm.rounds`). A node counts on by
# one while its clock gains 1,000 a second. So it begins anew at its clock before it falls out of that.
BEHIND_MS, AHEAD_MS = 2 * 3600 * 1000, 3 * 3600 * 1000


def milliseconds() -> int:
    """The wall clock, since 1970."""
    return time.time_ns() // 1_000_000


class RoundNumbers:
    """The numbers that one run of one store has used, as intervals [first, next).

    The next number counts on from the latest interval that ends near the clock; without one it is the clock itself. A
    number inside an interval is passed over to the interval's end, so none is given twice, however the clock is set.
    """

    def __init__(self, db: sqlite3.Connection, run_id: bytes, first: int | None, clock: Callable[[], int]) -> None:
        """
        Args:
            first: count from here, whatever the time; None: near the clock.
            clock: milliseconds since 1970.
        """
        self._db = db
        self._run = run_id
        self._first = first
        self._clock = clock

    def upcoming(self) -> int:
        """The smallest number that may be used next."""
        number = self._near()
        query = "SELECT next FROM used_rounds WHERE run = ? AND first <= ? AND next > ?"
        while (row := self._db.execute(query, (self._run, number, number)).fetchone()) is not None:
            number = int(row[0])
        return number

    def use(self, number: int) -> None:
        """Write down that `number` was used; the caller makes it durable. It must be `upcoming`."""
        grown = self._db.execute(
            "UPDATE used_rounds SET next = ? WHERE run = ? AND next = ?", (number + 1, self._run, number)
        )
        if not grown.rowcount:
            self._db.execute("INSERT OR IGNORE INTO used_rounds VALUES (?, ?, ?)", (self._run, number, number + 1))

    @property
    def any(self) -> bool:
        """Whether this run ever used one."""
        return self._db.execute("SELECT 1 FROM used_rounds WHERE run = ?", (self._run,)).fetchone() is not None

    def _near(self) -> int:
        """Where counting goes on, or begins anew."""
        begin = self._clock() if self._first is None else self._first
        low, high = (begin - BEHIND_MS, begin + AHEAD_MS) if self._first is None else (0, (1 << 63) - 1)
        query = "SELECT max(next) FROM used_rounds WHERE run = ? AND next BETWEEN ? AND ?"
        (found,) = self._db.execute(query, (self._run, low, high)).fetchone()
        return begin if found is None else int(found)


def keep_intervals(db: sqlite3.Connection) -> None:
    """From the next number alone, as schema 2 had it: all below it count as used."""
    db.execute(TABLE)
    db.execute("INSERT OR IGNORE INTO used_rounds SELECT run, 0, next FROM rounds")
    db.execute("DROP TABLE rounds")
