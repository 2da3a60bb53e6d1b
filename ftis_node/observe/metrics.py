"""A log of one JSON line an event: for people, plots and replays. It grows for ever, so it is in parts: the present
file, and older ones beside it, numbered and compressed.

``metrics.jsonl`` becomes ``metrics-00000001.jsonl`` by one rename, and that ``metrics-00000001.jsonl.gz`` by another,
so at every moment each line is in one part, whatever is killed.

SQLite does not replace this: replay reads these files, so a database would be a second copy beside them.
"""

import gzip
import io
import json
import logging
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from ftis_node.host.files import end_of, removed_if_it_fails, sync
from ftis_node.observe.tracking import Tracker

BLOCK = 1 << 20  # bytes read at a time
PART_BYTES = 8 << 20  # of the present file, before it becomes a part
LEVEL = 6
MOST_BYTES = 16 * PART_BYTES  # of a compressed part
MOST_RATIO = 64  # lines of figures become ten times smaller
DAMAGED = (OSError, EOFError, zlib.error)  # what reading a compressed part may raise

logger = logging.getLogger(__name__)
_told: set[Path] = set()  # damaged parts that the log knows of


@dataclass(frozen=True, order=True)
class LogPart:
    """A part of a log. The present one alone grows; an older one may be compressed or dropped at any moment.

    file: the present one, held open, because its name passes to the next.
    """

    number: int
    path: Path
    file: IO[bytes] | None = field(default=None, compare=False)

    def lines(self, start: int = 0) -> Iterator[bytes]:
        """Lines from byte `start` on, each with its newline; the very last may be cut short.

        They end early where the part is damaged or unpacks to too much, which the log says once, or has been dropped.
        """
        try:
            with self._open() as file:
                file.seek(start)
                rest = b""
                left = math.inf
                if isinstance(file, gzip.GzipFile):
                    left = MOST_BYTES
                reader = cast(io.BufferedReader, file)
                while block := reader.read1(BLOCK):  # a damaged part's lines up to the damage
                    left -= len(block)
                    if left < 0 or len(rest) > PART_BYTES:
                        raise OSError("it unpacks to too much")
                    *lines, rest = (rest + block).split(b"\n")
                    yield from (line + b"\n" for line in lines)
                if rest:
                    yield rest
        except FileNotFoundError:
            return
        except DAMAGED as error:
            if self.path not in _told:
                _told.add(self.path)
                logger.warning("%s is damaged (%s): what comes after that in it is left out.", self.path, error)

    def length(self) -> int:
        """Return the bytes it has uncompressed; 0 if it cannot be read.

        A compressed part says its own length (RFC 1952, 2.3.1). One that was cut short says anything, so `MOST_RATIO`
        bounds it.
        """
        with suppress(OSError), self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if self.path.suffix != ".gz":
                return size
            file.seek(-4, os.SEEK_END)
            return min(int.from_bytes(file.read(4), "little"), MOST_RATIO * size)
        return 0

    def _open(self) -> AbstractContextManager[IO[bytes]]:
        """Raises FileNotFoundError if it has been dropped."""
        if self.file is not None:
            return nullcontext(self.file)
        if self.path.suffix != ".gz":
            with suppress(FileNotFoundError):  # compressed meanwhile
                return self.path.open("rb")
        return cast(IO[bytes], gzip.open(_compressed(self.path), "rb"))


def older_parts(path: Path) -> list[LogPart]:
    """Return the parts beside a log, oldest first."""
    found = {part.number: part for part in _numbered(path, "")}
    found |= {part.number: part for part in _numbered(path, ".gz")}  # where both are there, this one is whole
    return sorted(found.values())


def set_aside(path: Path) -> None:
    """Make the present file the latest of the older parts; nothing happens if it is one already. Raises OSError."""
    number = _next_number(older_parts(path))
    with suppress(FileNotFoundError):
        path.rename(path.with_name(f"{path.stem}-{number:08d}{path.suffix}"))


@contextmanager
def opened(path: Path) -> Iterator[list[LogPart]]:
    """All parts as they were at one moment, oldest first; the last is the present file, if there is one."""
    with ExitStack() as files:
        older = older_parts(path)
        while True:
            present = []
            with suppress(FileNotFoundError, NotADirectoryError):
                present = [files.enter_context(path.open("rb"))]
            before = older
            older = older_parts(path)
            if older == before:  # else the present file may be among them by now
                break
        yield [*older, *(LogPart(_next_number(older), path, file) for file in present)]


def every_line(path: Path) -> Iterator[bytes]:
    """Yield all lines, oldest first; the last one may be cut short."""
    with opened(path) as parts:
        for part in parts:
            yield from part.lines()


def end_of_parts(path: Path, size: int) -> bytes:
    """Return the last `size` bytes in whole lines, from older parts too where the present file is shorter."""
    data = b""
    left = size
    with opened(path) as parts:
        while parts and left > 0:
            part = parts.pop()
            whole = part.file or io.BytesIO(b"".join(part.lines()))
            data = end_of(whole, left) + data
            left -= whole.tell()  # all of it, also where no whole line fits: an older one must not come in its place
    return data


def compress(path: Path) -> None:
    """Compresses the older parts that are not yet; what a kill left half done is done again.

    Raises:
        OSError: the disk is full; then they stay as they are.
    """
    for leftover in _numbered(path, ".gz.partial"):
        leftover.path.unlink(missing_ok=True)
    for part in _numbered(path, ""):
        plain = part.path
        final = _compressed(plain)
        if not final.exists():
            partial = final.with_name(f"{final.name}.partial")
            with removed_if_it_fails(partial):
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


def _numbered(path: Path, ending: str) -> Iterator[LogPart]:
    """Yield the files beside a log that are named as its parts are, with this ending; a person may keep others."""
    name = re.compile(rf"{re.escape(path.stem)}-(\d{{8,}}){re.escape(path.suffix + ending)}")
    if not path.parent.is_dir():
        return
    for entry in list(path.parent.iterdir()):  # whose files may be renamed meanwhile
        named = name.fullmatch(entry.name)
        if named:
            yield LogPart(int(named[1]), entry)


def _next_number(older: list[LogPart]) -> int:
    if older:
        return older[-1].number + 1
    return 1


def _compressed(plain: Path) -> Path:
    if plain.suffix == ".gz":
        return plain
    return plain.with_name(f"{plain.name}.gz")


class MetricsLog:
    """Appends events to a JSON-lines file; each has a wall-clock `time` (seconds) and an `event`."""

    def __init__(
        self, path: Path, older_bytes: int | None = None, part_bytes: int = PART_BYTES, tracker: Tracker | None = None
    ) -> None:
        """
        Args:
            older_bytes: what older parts may take, compressed; the oldest go first. None: all is in one file.
            part_bytes: of the present file, before it becomes an older part.
            tracker: is told of each event, and closed with the log.
        """
        self._path = path
        self._older_bytes = older_bytes
        self._part_bytes = part_bytes
        self._tracker = tracker
        self._aside = ThreadPoolExecutor(1)  # large parts take seconds
        self._file = self._open()
        if older_bytes is not None:
            self._aside.submit(self._tidy)  # what a killed process left

    def write(self, event: str, **facts: Any) -> None:
        """Write one line, at once, and tell the tracker; a full part is set aside first. Raises OSError."""
        if self._older_bytes is not None and self._file.tell() >= self._part_bytes:
            self._begin_part()
        self._file.write(json.dumps({"time": time.time(), "event": event, **facts}).encode() + b"\n")
        self._file.flush()
        if self._tracker is not None:
            self._tracker.take(event, facts)

    def close(self) -> None:
        """Close log and tracker; wait until the older parts are compressed."""
        self._file.close()
        if self._tracker is not None:
            self._tracker.close()
        self._aside.shutdown()

    def _open(self) -> IO[bytes]:
        file = self._path.open("a+b")
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # a kill cut the last line short; the next must not be lost with it
        return file

    def _begin_part(self) -> None:
        """Raises OSError if the next file cannot be made, as on a full disk; the next line tries again."""
        set_aside(self._path)
        whole = self._file
        self._file = self._open()
        whole.close()
        self._aside.submit(self._tidy)

    def _tidy(self) -> None:
        """Compress older parts, and drop the oldest."""
        try:
            compress(self._path)
        except OSError as error:
            logger.warning("Older parts of %s could not be compressed (%s); it is tried again.", self._path, error)
        with suppress(OSError):  # the next tries again
            drop_oldest(self._path, self._older_bytes or 0)


def read_events(path: Path, *events: str, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """All lines of these kinds in their order, of older parts too; a line that a kill cut short is left out.

    Args:
        last_bytes: only the end of the log.
    """
    return list(each_event(path, *events, last_bytes=last_bytes))


def each_event(path: Path, *events: str, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The same one by one: a long log takes more memory than many a training."""
    lines: Iterable[bytes] = every_line(path)
    if last_bytes is not None:
        lines = end_of_parts(path, last_bytes).split(b"\n")
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") in events:
            yield entry
