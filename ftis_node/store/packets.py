"""Packets and rounds in SQLite: what this node generated, what it admitted, and what it has trained on."""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ftis_node.errors import UserError
from ftis_node.host.clocks import boot_seconds
from ftis_node.packet import Group
from ftis_node.store.schema import refuse_other

SCHEMA = 3  # of the database; its tables:
_TABLES = """
CREATE TABLE IF NOT EXISTS used_rounds (
    run BLOB NOT NULL, first INTEGER NOT NULL, next INTEGER NOT NULL, PRIMARY KEY (run, first)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS packets (
    digest BLOB PRIMARY KEY, run BLOB NOT NULL, author BLOB NOT NULL, round INTEGER NOT NULL, slot INTEGER NOT NULL,
    own INTEGER NOT NULL, stored REAL NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS packets_by_age ON packets (stored, size);
CREATE TABLE IF NOT EXISTS seen (
    run BLOB NOT NULL, author BLOB NOT NULL, round INTEGER NOT NULL, slot INTEGER NOT NULL,
    fate TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (run, author, round, slot)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS seen_by_age ON seen (at);
CREATE TABLE IF NOT EXISTS announced (run BLOB NOT NULL, data BLOB NOT NULL, at REAL NOT NULL)
"""
SEEN_BYTES = 160  # that a key takes on the disk, with its indices
# What a packet takes there beside its bytes: its other columns, an index, and of its last page what it does not fill.
PACKET_BYTES = 5 << 10
# A packet's announcement is refused after three hours, so a key needs no longer memory than some multiple of that.
SEEN_SECONDS = 24 * 3600.0
# SQLite's codes where something else than the file is wrong.
_SOUND = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
}
# Receivers take an author's first round only within three hours of their clocks (`swarm.rounds`). A node counts on by
# one while its clock gains 1,000 a second. So it begins anew at its clock before it falls out of that.
BEHIND_MS = 2 * 3600 * 1000
AHEAD_MS = 3 * 3600 * 1000


def milliseconds() -> int:
    """The wall clock, in whole milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class PacketStore:
    """One node's packets of one run. Rounds, and what is trained on, are on disk before their call returns.

    One thread has it, that of the event loop, and each call blocks it. Calls that write raise an error of SQLite on a
    full disk, and have then changed nothing. A file may hold several runs, which share the quota.
    """

    def __init__(
        self,
        path: Path,
        run_id: bytes,
        quota_bytes: int,
        clock: Callable[[], int] = milliseconds,
    ) -> None:
        """
        Args:
            quota_bytes: most bytes of packets and keys on the disk, see `PACKET_BYTES`. With 0 no packet stays.
            clock: milliseconds since 1970. Rounds are numbered near it, so that a key whose store was lost does not
            contradict what it once announced.

        Raises:
            UserError: the database cannot be opened, is damaged, or its schema is not known.
        """
        self.run_id = run_id
        self.quota_bytes = quota_bytes
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._clock = clock
            self._bytes = 0
            check_schema(self._db, path)
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # for a new file
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # a kill loses nothing; `_durably` also outlives power loss
            self._db.execute("PRAGMA secure_delete = OFF")  # packets are public; Debian's SQLite overwrites with zeros
            with self._durably():  # all of them or none
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA}")
            size = f"coalesce(sum(size + {PACKET_BYTES}), 0) + {SEEN_BYTES} * (SELECT count(*) FROM seen)"
            self._bytes = int(self._db.execute(f"SELECT {size} FROM packets").fetchone()[0])
            stored = "(SELECT max(stored) FROM packets)"
            seen = "(SELECT max(at) FROM seen)"
            latest = self._db.execute(f"SELECT max(coalesce({stored}, 0), coalesce({seen}, 0))").fetchone()[0]
            self._zero = max(time.time(), float(latest)) - boot_seconds()  # see `_now`
            with self._transaction():
                self._make_room()  # the quota may have become smaller
        except UserError:
            self._db.close()
            raise
        except sqlite3.DatabaseError as error:
            fix = "Move the file away; the node makes a new one."
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _SOUND:  # without what SQLite adds to a code
                fix = "See that its disk has room, who holds it, and who may write it; the file itself is sound."
            raise UserError(f"The database {path} cannot be used: {error}.", fix) from error

    def close(self) -> None:
        """Close the database; no other call may follow."""
        self._db.close()

    def upcoming_round(self) -> int:
        """The next round number, which nothing may be announced under before `take_round`.

        The numbers that the run has used are kept as intervals [first, next). The next one counts on from the latest
        interval that ends near the clock; without one it is the clock itself. A number inside an interval is passed
        over to the interval's end, so none is given twice, however the clock is set.
        """
        now = self._clock()
        query = "SELECT max(next) FROM used_rounds WHERE run = ? AND next BETWEEN ? AND ?"
        (latest,) = self._db.execute(query, (self.run_id, now - BEHIND_MS, now + AHEAD_MS)).fetchone()
        number = now
        if latest is not None:
            number = int(latest)
        query = "SELECT next FROM used_rounds WHERE run = ? AND first <= ? AND next > ?"
        while True:
            row = self._db.execute(query, (self.run_id, number, number)).fetchone()
            if row is None:
                return number
            number = int(row[0])

    def take_round(self, number: int) -> None:
        """Make sure that this number, which must be `upcoming_round`, is never given again, nor after a restart. It
        waits for the disk."""
        grow = "UPDATE used_rounds SET next = ? WHERE run = ? AND next = ?"
        with self._durably():
            grown = self._db.execute(grow, (number + 1, self.run_id, number))
            if not grown.rowcount:
                begin = "INSERT OR IGNORE INTO used_rounds VALUES (?, ?, ?)"
                self._db.execute(begin, (self.run_id, number, number + 1))

    def skip_round(self) -> None:
        """Leave one round out, as each start does once: a round announced just before a crash is then never
        contradicted. A new store has none to leave out."""
        used = self._db.execute("SELECT 1 FROM used_rounds WHERE run = ?", (self.run_id,))
        if used.fetchone() is not None:
            self.take_round(self.upcoming_round())

    def add(self, groups: Sequence[Group], *, own: bool, ages: Sequence[float] = ()) -> None:
        """Keep admitted packets, the oldest making room once the quota is reached, which keys that are
        seen count against too. A packet, or a key, that is here already stays as it is.

        own: this node made them; keys of others count as `seen` from now on. ages: seconds since their authors made
        them, one for each group; without any they are new.
        """
        now = self._now()
        with self._transaction():
            for group, age in zip(groups, ages or [0.0] * len(groups), strict=True):
                key = (self.run_id, *_key(group.author, group.packet.round, group.packet.slot))
                added = self._db.execute(
                    "INSERT OR IGNORE INTO packets VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (group.digest, *key, int(own), now, len(group.data), group.data),
                ).rowcount
                self._bytes += (len(group.data) + PACKET_BYTES) * added
                if not own:
                    row = (*key, "admitted", now - age)
                    new = self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?, ?, ?, ?)", row).rowcount
                    self._bytes += SEEN_BYTES * new
            self._make_room()
        free = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        pages = self._db.execute("PRAGMA page_count").fetchone()[0]
        if 2 * free > pages:  # the quota was reduced: 4 MiB at a time go back to the disk
            with suppress(sqlite3.OperationalError):  # a full disk: at the next packet, then
                self._db.executescript("PRAGMA incremental_vacuum(1024)")  # `execute` would free one page

    def body(self, digest: bytes) -> bytes | None:
        """The bytes of a held packet, by its sha256; None if it is not held (any more)."""
        row = self._db.execute("SELECT body FROM packets WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return None
        return bytes(row[0])

    def holds(self, digest: bytes) -> bool:
        """Whether this packet is held."""
        return self._db.execute("SELECT 1 FROM packets WHERE digest = ?", (digest,)).fetchone() is not None

    def seen(self, author: bytes, round: int, slot: int) -> bool:
        """Whether a foreign group of this key was admitted, refused for its content, or trained on within a day."""
        key = (self.run_id, *_key(author, round, slot))
        query = "SELECT 1 FROM seen WHERE run = ? AND author = ? AND round = ? AND slot = ?"
        return self._db.execute(query, key).fetchone() is not None

    def settle(self, keys: Iterable[tuple[bytes, int, int]], fate: str) -> None:
        """Write down what becomes of groups: `trained`, `no-signal`, `refused` or `unscored`. They count as `seen`, and
        `waiting` gives them no more.

        Args:
            keys: (author, round, slot) of each.

        Only `trained` waits for the disk. A power loss may take the latest of the others, which are then scored or
        refused once more: whoever sends such groups must not cost a node a sync each.
        """
        now = self._now()
        rows = [(self.run_id, *_key(*key), fate, now) for key in keys]
        writing = self._transaction
        if fate == "trained":
            writing = self._durably
        with writing():
            new = self._db.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?, ?, ?, ?, ?)", rows).rowcount
            self._db.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?, ?, ?)", rows)
            gone = self._db.execute("DELETE FROM seen WHERE at < ?", (now - SEEN_SECONDS,)).rowcount
            self._bytes += SEEN_BYTES * (max(0, new) - gone)
            self._make_room()

    def announced(self, data: bytes) -> None:
        """Keep an announcement of this node's, as it was signed, for its next starts, for a day."""
        now = self._now()
        with self._transaction():
            self._db.execute("DELETE FROM announced WHERE at < ?", (now - SEEN_SECONDS,))
            self._db.execute("INSERT INTO announced VALUES (?, ?, ?)", (self.run_id, data, now))

    def latest_announced(self, max_age: float) -> list[tuple[bytes, float]]:
        """This node's announcements of the last `max_age` seconds, and their ages in seconds, the oldest first."""
        now = self._now()
        query = "SELECT data, at FROM announced WHERE run = ? AND at >= ? ORDER BY at"
        rows = self._db.execute(query, (self.run_id, now - max_age))
        return [(bytes(data), max(0.0, now - at)) for data, at in rows]

    def waiting(self, max_age: float) -> list[tuple[bytes, bytes, float]]:
        """Foreign packets that were admitted and never settled, for a resumed pool: (author, body, seconds since it was
        made), of the last `max_age` seconds, in no order."""
        now = self._now()
        query = (
            "SELECT p.author, p.body, s.at FROM packets p JOIN seen s "
            "ON s.run = p.run AND s.author = p.author AND s.round = p.round AND s.slot = p.slot "
            "WHERE p.run = ? AND p.own = 0 AND s.fate = 'admitted' AND s.at >= ?"
        )
        rows = self._db.execute(query, (self.run_id, now - max_age)).fetchall()
        return [(bytes(author), bytes(body), max(0.0, now - made)) for author, body, made in rows]

    def _now(self) -> float:
        """Seconds since 1970 that only grow, also if somebody sets the machine's clock, now or between two starts.

        So what was stored last is always the newest, and keys are not forgotten because a clock jumped ahead. Time that
        a sleeping machine misses is counted. A time that a wrong clock once put too late stays so.
        """
        return self._zero + boot_seconds()

    @contextmanager
    def _durably(self) -> Iterator[None]:
        """A transaction that is synced to the disk before it ends."""
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            with self._transaction():
                yield
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, also when the disk is full: the store can be used again as soon as there is room."""
        held = self._bytes
        self._db.execute("BEGIN")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._bytes = held
            if self._db.in_transaction:  # some errors, a full disk among them, have rolled back already
                self._db.execute("ROLLBACK")
            raise

    def _make_room(self) -> None:
        """Remove the packets that came first until the quota holds, or none is left; within a transaction."""
        while self._bytes > self.quota_bytes:
            row = self._db.execute("SELECT digest, size FROM packets ORDER BY stored LIMIT 1").fetchone()
            if row is None:
                return
            self._db.execute("DELETE FROM packets WHERE digest = ?", (row[0],))
            self._bytes -= int(row[1]) + PACKET_BYTES


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Raise UserError for a database of another schema; one that is empty will have this one."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version:
        refuse_other(f"The database {path}", version, SCHEMA)


def _key(author: bytes, round: int, slot: int) -> tuple[bytes, int, int]:
    """A key as the columns have it. A round is any u64 that a stranger cares to sign; SQLite's integers are signed, so
    one from 2^63 on is kept less 2^64."""
    if round >> 63:
        round -= 1 << 64
    return author, round, slot
