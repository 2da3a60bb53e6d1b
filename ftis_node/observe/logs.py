"""The daemon's log: on stderr and in its home, as text or as JSON, one event a line whatever it says; and reading it.

Messages may hold words of peers. No character of them can end a line, move a cursor or turn the direction of text.
"""

import json
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ftis_node.errors import FtisError
from ftis_node.host.files import end_of
from ftis_node.text import escaped, in_json

LOG = "node.log"
LOG_BYTES = 10 << 20
ENDED = "It ended with an error: "
OLDER = 2  # files that are kept beside the present one: node.log.1 and node.log.2
OUTPUT = "output.log"  # what a daemon without a terminal, and its compute process, print
PAUSE_SECONDS = 0.2
END_BYTES = 16 << 10
# By their own names: hivemind renames one, for the whole process, when it is imported.
_LEVELS = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}
_TIME = "%Y-%m-%d %H:%M:%S"
_TEXT = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?P<level>[A-Z]+) (?P<message>.*)")


def log_to(home: Path, *, as_json: bool = False, quiet: bool = False) -> None:
    """Logs go to stderr and, if the home can be written, to its node.log; of that 30 MB are kept at most.

    Args:
        quiet: not to stderr, where a view is.
    """
    handlers: list[logging.Handler] = []
    if not quiet and not _is_output(home):  # which nobody rotates, and would have all of it a second time
        handlers.append(logging.StreamHandler(sys.stderr))
    with suppress(OSError):  # opening the home will say what is wrong with it
        home.mkdir(parents=True, exist_ok=True)
        handlers.append(RotatingFileHandler(home / LOG, maxBytes=LOG_BYTES, backupCount=OLDER, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(EventFormatter(as_json=as_json))
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    logging.raiseExceptions = False  # a full disk costs lines, and prints nothing
    for noisy in ("httpx", "transformers", "aiohttp", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextmanager
def noting(home: Path) -> Iterator[None]:
    """Write into the log of a home why a start in the block, or the node, ended; a terminal is told otherwise."""
    try:
        yield
    except Exception as error:
        said = repr(error)
        if isinstance(error, FtisError):
            said = str(error)
        with suppress(OSError), (home / LOG).open("r+", encoding="utf-8") as log:
            formatter = EventFormatter(as_json=log.read(1) == "{")
            log.seek(0, os.SEEK_END)
            record = logging.LogRecord(__name__, logging.ERROR, "", 0, f"{ENDED}%s", (said,), None)
            log.write(f"{formatter.format(record)}\n")
        raise


def set_level(level: str) -> None:
    """Log this program's messages from a level on: debug, info, warning or error."""
    logging.getLogger("ftis_node").setLevel(level.upper())


def begin_output(home: Path) -> Path:
    """The file for what the next daemon prints, in an existing home; a long one of those before becomes the older."""
    output = home / OUTPUT
    if output.exists() and output.stat().st_size > LOG_BYTES:
        output.rename(home / f"{OUTPUT}.1")
    return output


def last_words(home: Path) -> str:
    """The error that the latest daemon of a home ended with; empty if it ended well, or one runs."""
    for line in last_lines(home / LOG, 1):
        message = str(as_object(line).get("message", ""))
        if message.startswith(ENDED):
            return message.removeprefix(ENDED)
    return ""


def _is_output(home: Path) -> bool:
    """Whether stderr goes there."""
    with suppress(OSError, ValueError):
        return os.path.samestat(os.fstat(sys.stderr.fileno()), (home / OUTPUT).stat())
    return False


class EventFormatter(logging.Formatter):
    """An event a line.

    As text ``time LEVEL message``, in local time; a traceback's lines follow, indented, so that none passes for an
    event. As JSON an object: time (ISO 8601, UTC), level, logger, message, and exception if there is a traceback.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        level = _LEVELS.get(record.levelno, record.levelname)
        message = record.getMessage()
        traceback = super().format(record).removeprefix(message).strip("\n")  # or the stack
        if not self._as_json:
            when = f"{self.formatTime(record, _TIME)},{int(record.msecs):03d}"
            return _with_traceback(f"{when} {level} {message}", traceback)
        when = _iso(datetime.fromtimestamp(record.created, UTC))
        told = {"time": when, "level": level, "logger": record.name, "message": message}
        if traceback:
            told["exception"] = traceback
        return in_json(told)


def _with_traceback(event: str, traceback: str) -> str:
    """An event in a line, and the lines of its traceback, indented."""
    lines = [escaped(event)]
    for line in traceback.split("\n"):
        if line:
            lines.append(f"    {escaped(line)}")
    return "\n".join(lines)


def _iso(when: datetime) -> str:
    return when.isoformat(timespec="milliseconds")


# --- reading it -------------------------------------------------------------------------------------------------------


def as_object(line: str) -> dict[str, Any]:
    """A line of either format as an object; what is neither, as a traceback's lines, is a message alone."""
    with suppress(ValueError):
        told = json.loads(line)
        if isinstance(told, dict):
            return told
    found = _TEXT.fullmatch(line)
    if found is None:
        return {"message": line}
    when = datetime.strptime(found["time"], f"{_TIME},%f").astimezone(UTC)
    return {"time": _iso(when), "level": found["level"], "message": found["message"]}


def as_text(line: str) -> str:
    """A line of either format as text that is safe to print; a traceback's lines follow theirs."""
    told = {}
    if line.startswith("{"):
        told = as_object(line)
    if not told.keys() >= {"time", "level", "message"}:
        return escaped(line)
    return _with_traceback(f"{told['time']} {told['level']} {told['message']}", str(told.get("exception", "")))


def read_log(path: Path, count: int, may_grow: Callable[[], bool]) -> Iterator[str]:
    """The last lines of a log and of the older ones beside it, oldest first; then those that are added.

    Args:
        may_grow: whether more may come; once it says no, the last lines are read and that is all.

    Raises:
        FileNotFoundError: there is no log.
    """
    growing = Growing(path)
    recent = deque[str](maxlen=count)
    for number in range(OLDER, 0, -1):
        with suppress(FileNotFoundError):
            older = Growing(path.with_name(f"{path.name}.{number}"))
            if older.file != growing.file:  # which was rotated just now
                recent.extend(older.lines())
    recent.extend(growing.lines())
    yield from recent
    while may_grow():
        yield from growing.lines()
        time.sleep(PAUSE_SECONDS)
    yield from growing.lines()


def last_lines(path: Path, count: int) -> list[str]:
    """About the same, of the last few KB alone, cheap enough for every second; nothing if there is no log."""
    lines: list[str] = []
    for file in (path, path.with_name(f"{path.name}.1")):
        if len(lines) < count:  # it was rotated just now
            with suppress(OSError), file.open("rb") as data:
                lines = end_of(data, END_BYTES).decode(errors="replace").splitlines() + lines
    return lines[-count:]


class Growing:
    """A file that is written to and rotated meanwhile. `file`: which one is open, as device and inode.

    Args:
        added: only what is added from now on.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, *, added: bool = False) -> None:
        self._path = path
        self._begin()
        if added:
            self._data.seek(0, os.SEEK_END)

    def _begin(self) -> None:
        self._data = self._path.open("rb")
        told = os.fstat(self._data.fileno())
        self.file = (told.st_dev, told.st_ino)
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """The complete lines since the last call, of the file that was open and then of the one in its place."""
        replaced = self._replaced()  # asked first: what is replaced grows no more
        yield from self._complete()
        if replaced:
            self._data.close()
            with suppress(FileNotFoundError):
                self._begin()
                yield from self._complete()

    def _complete(self) -> Iterator[str]:
        *complete, self._rest = (self._rest + self._data.read()).split(b"\n")
        for line in complete:
            yield line.decode(errors="replace")

    def _replaced(self) -> bool:
        try:
            told = self._path.stat()
        except FileNotFoundError:
            return False  # between two names
        return (told.st_dev, told.st_ino) != self.file or told.st_size < self._data.tell()
