"""A packet database of schema 2, which is refused, and checkpoints, as 98648f7 wrote them."""

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

DATABASE = """
CREATE TABLE rounds (run BLOB PRIMARY KEY, next INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE packets (
    digest BLOB PRIMARY KEY, run BLOB NOT NULL, author BLOB NOT NULL, round INTEGER NOT NULL, slot INTEGER NOT NULL,
    own INTEGER NOT NULL, stored REAL NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX packets_by_age ON packets (stored, size);
CREATE TABLE seen (
    run BLOB NOT NULL, author BLOB NOT NULL, round INTEGER NOT NULL, slot INTEGER NOT NULL,
    fate TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (run, author, round, slot)
) WITHOUT ROWID;
CREATE INDEX seen_by_age ON seen (at);
PRAGMA user_version = 2;
"""


def write_database(path: Path, run: bytes, rows: int = 3):
    """With round 7 as the next one, and some packets of 10 bytes, the oldest first."""
    db = sqlite3.connect(path)
    db.executescript("PRAGMA journal_mode = WAL;" + DATABASE)
    db.execute("INSERT INTO rounds VALUES (?, 7)", (run,))
    for number in range(rows):
        row = (bytes([number]) * 32, run, b"author", number, float(number), bytes(10))
        db.execute("INSERT INTO packets VALUES (?, ?, ?, ?, 0, 1, ?, 10, ?)", row)
    db.commit()
    db.close()


def write_checkpoint(directory: Path, facts: dict[str, Any], schema: object = 2):
    directory.mkdir(parents=True)
    (directory / "weights").write_bytes(b"weights")
    files = {"weights": hashlib.sha256(b"weights").hexdigest()}
    (directory / "checkpoint.json").write_text(json.dumps({"schema": schema, "files": files, "facts": facts}))
