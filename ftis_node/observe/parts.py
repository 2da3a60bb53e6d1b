"""A log that grows for ever, in parts: the present file, and older ones beside it, numbered and compressed.

``metrics.jsonl`` becomes ``metrics-00000001.jsonl`` by one rename, and that ``metrics-00000001.jsonl.gz`` by another,
so at every moment each line is in one part, whatever is killed.

SQLite does not replace this: replay reads these files, so a database would be a second copy beside them.
"""

from __future__ import annotations

import gzip
import io
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ftis_node.host.files import end_of, sync

BLOCK = 1 << 16
PART_BYTES = 8 << 20  # of the present file, before it becomes a part
LEVEL = 6
MOST_RATIO = 64  # lines of figures become ten times smaller
DAMAGED = (OSError, EOFError, zlib.error)  # what reading a compressed part may raise

logger = logging.getLogger(__name__)
_told: set[Path] = set()  # damaged parts that the log knows of


@dataclass(frozen=True, order=True)
class Part:
    """An older part; it never changes, but for being compressed or dropped."""

    number: int
    path: Path

    def open(self) -> IO[bytes]:
        """Raises FileNotFoundError if it has been dropped."""
        if self.path.suffix != ".gz":
            with suppress(FileNotFoundError):  # compressed meanwhile
                return self.path.open("rb")
        return cast(IO[bytes], gzip.open(_compressed(self.path), "rb"))

    def length(self) -> int:
        """In bytes, uncompressed, as a compressed one says (RFC 1952, 2.3.1); 0 if it cannot be read. One that was cut
        short says anything, so `MOST_RATIO` bounds it."""
        with suppress(OSError), self.path.open("rb") as file:
            if self.path.suffix != ".gz":
                return file.seek(0, os.SEEK_END)
            size = file.seek(-4, os.SEEK_END) + 4
            return min(int.from_bytes(file.read(4), "little"), MOST_RATIO * size)
        return 0


def older_parts(path: Path) -> list[Part]:
    """The parts beside a log, oldest first."""
    found: dict[int, Part] = {}
    for part in (*_numbered(path, ""), *_numbered(path, ".gz")):  # where both are there, the latter is whole
        found[part.number] = part
    return sorted(found.values())


def opened(path: Path) -> tuple[list[Part], IO[bytes] | None]:
    """The older parts and the present file, as they were at one moment; None if there is no present file."""
    while True:
        try:
            present = path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            older = older_parts(path)
            if not path.exists():
                return older, None
            continue
        older = older_parts(path)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(present.fileno()), path.stat()):
                return older, present
        present.close()  # it has become a part meanwhile


def every_line(path: Path) -> Iterator[bytes]:
    """All lines, oldest first; the last one may be cut short. A part that is damaged ends where it is."""
    older, present = opened(path)
    for part in older:
        try:
            with part.open() as file:
                yield from file
        except FileNotFoundError:
            continue
        except DAMAGED as error:
            tell_damage(part, error)
    if present is not None:
        with present:
            yield from present


def end_of_parts(path: Path, size: int) -> bytes:
    """The last `size` bytes in whole lines, of older parts too where the present file is shorter."""
    older, present = opened(path)
    data, left = b"", size
    if present is not None:
        with present:
            data = end_of(present, left)
            left -= present.tell()
    while older and left > 0:
        with suppress(FileNotFoundError):
            whole = _readable(older.pop())
            data = end_of(whole, left) + data
            left -= whole.tell()  # all of it, also where no whole line fits: an older one must not come in its place
    return data


def _readable(part: Part) -> IO[bytes]:
    """A part, of a damaged one what comes before the damage. Raises FileNotFoundError if it has been dropped."""
    found = io.BytesIO()
    try:
        with part.open() as file:
            while block := cast(io.BufferedReader, file).read1(BLOCK):
                found.write(block)
    except FileNotFoundError:
        raise
    except DAMAGED as error:
        tell_damage(part, error)
    return found


def tell_damage(part: Part, error: Exception) -> None:
    """Says in the log that a part cannot be read to its end, once of each."""
    if part.path not in _told:
        _told.add(part.path)
        logger.warning("%s is damaged (%s): what comes after that in it is left out.", part.path, error)


def compress(path: Path) -> None:
    """Compresses the older parts that are not yet; what a kill left half done is done again.

    Raises:
        OSError: the disk is full; then they stay as they are.
    """
    for leftover in _numbered(path, ".gz.partial"):
        leftover.path.unlink(missing_ok=True)
    for plain in (part.path for part in _numbered(path, "")):
        final = _compressed(plain)
        if not final.exists():
            partial = final.with_name(f"{final.name}.partial")
            with plain.open("rb") as source, gzip.open(partial, "wb", LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            sync(partial)
            partial.rename(final)
            sync(final.parent)
        plain.unlink()


def drop_oldest(path: Path, most: int) -> None:
    """Drops the oldest parts until all take at most so many bytes; the latest stays: it tells how many there were."""
    parts = older_parts(path)
    sizes = [part.path.stat().st_size for part in parts]
    for place, part in enumerate(parts[:-1]):
        if sum(sizes[place:]) <= most:
            return
        part.path.unlink(missing_ok=True)


def _numbered(path: Path, ending: str) -> list[Part]:
    """The files beside a log that are named as its parts are, with this ending; a person may keep others there."""
    name = re.compile(rf"{re.escape(path.stem)}-(\d{{8,}}){re.escape(path.suffix + ending)}")
    entries = list(path.parent.iterdir()) if path.parent.is_dir() else []
    return [Part(int(told[1]), entry) for entry in entries if (told := name.fullmatch(entry.name))]


def _compressed(plain: Path) -> Path:
    return plain if plain.suffix == ".gz" else plain.with_name(f"{plain.name}.gz")
