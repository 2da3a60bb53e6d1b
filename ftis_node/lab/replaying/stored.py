"""The packets that a node has kept, read without changing anything in its home."""

import shutil
import sqlite3
import tempfile
from pathlib import Path

from ftis_node.errors import UserError
from ftis_node.store.packets import check_schema


class StoredPackets:
    """The packets in a database that no daemon uses, which this leaves as it is, down to its directory. Close it, for a
    copy takes as much disk as the database.

    SQLite itself would make files beside a database that was not closed, even to read it; so such a one is copied.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            UserError: the database cannot be opened, or its schema is not known.
        """
        self._copies = tempfile.TemporaryDirectory(prefix="ftis-")
        unfinished = path.with_name(path.name + "-wal")
        try:
            if unfinished.exists() and unfinished.stat().st_size:
                copy = Path(self._copies.name) / path.name
                shutil.copyfile(path, copy)
                shutil.copyfile(unfinished, copy.with_name(unfinished.name))
                self._db = sqlite3.connect(copy)
            else:
                self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            check_schema(self._db, path)
            self._db.execute("SELECT digest, author, body FROM packets LIMIT 1").fetchone()
        except UserError:
            self.close()
            raise
        except (OSError, sqlite3.DatabaseError) as error:
            self._copies.cleanup()
            raise UserError(f"The database {path} cannot be read: {error}.", "Check the file and its disk.") from error

    def close(self) -> None:
        """Closes the database, and removes the copy if there is one."""
        self._db.close()
        self._copies.cleanup()

    def holds(self, digest: bytes) -> bool:
        """Whether a packet is there, by its sha256."""
        return self.read(digest) is not None

    def read(self, digest: bytes) -> tuple[bytes, bytes] | None:
        """Author (a 38-byte peer id) and bytes of a packet, or None. Raises sqlite3.DatabaseError if it is damaged."""
        row = self._db.execute("SELECT author, body FROM packets WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return None
        author, body = row
        return bytes(author), bytes(body)
