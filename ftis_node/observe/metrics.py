"""One JSON line an event: for people, plots and replays."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Any


class MetricsLog:
    """Appends events to a JSON-lines file; each has a wall-clock `time` (seconds) and an `event`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        if self._file.tell() and not _ends_in_newline(self._file):
            self._file.write(b"\n")  # a kill cut the last line short; the next must not be lost with it

    def write(self, event: str, **facts: Any) -> None:
        """Writes one line, at once."""
        self._file.write(json.dumps({"time": time.time(), "event": event, **facts}).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_events(path: Path, *events: str, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """All lines of these kinds in their order; a line that a kill cut short is left out.

    Args:
        last_bytes: only the end of the file.
    """
    found = []
    for line in _end_of(path, last_bytes).splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") in events:
            found.append(entry)
    return found


def _end_of(path: Path, size: int | None) -> str:
    with path.open("rb") as file:
        if size is not None:
            file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def _ends_in_newline(file: IO[bytes]) -> bool:
    file.seek(-1, 2)
    return file.read(1) == b"\n"
