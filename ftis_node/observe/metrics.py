"""One JSON line an event: for people, plots and replays."""

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ftis_node.observe.log_parts import PART_BYTES, compress, drop_oldest, end_of_parts, every_line, set_aside
from ftis_node.observe.tracking import Tracker

logger = logging.getLogger(__name__)


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
        self._tidying = threading.Thread()
        self._file = self._open()
        if older_bytes is not None:
            self._tidy()  # what a killed process left

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
        if self._tidying.ident is not None:
            self._tidying.join()
            self._tidy_now()

    def _open(self) -> IO[bytes]:
        file = self._path.open("a+b")
        if file.tell() and not _ends_in_newline(file):
            file.write(b"\n")  # a kill cut the last line short; the next must not be lost with it
        return file

    def _begin_part(self) -> None:
        """Raises OSError if the next file cannot be made, as on a full disk; the next line tries again."""
        set_aside(self._path)
        whole, self._file = self._file, self._open()
        whole.close()
        self._tidy()

    def _tidy(self) -> None:
        """In a thread, as large parts take seconds; where one is at work still, the next has it to do."""
        if not self._tidying.is_alive():
            self._tidying = threading.Thread(target=self._tidy_now, daemon=True)
            self._tidying.start()

    def _tidy_now(self) -> None:
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
    lines: Iterable[bytes]
    lines = every_line(path) if last_bytes is None else end_of_parts(path, last_bytes).split(b"\n")
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") in events:
            yield entry


def _ends_in_newline(file: IO[bytes]) -> bool:
    file.seek(-1, 2)
    return file.read(1) == b"\n"
