"""The rows of a dataset's file, in a process with limits: a Parquet file of a kilobyte may unpack to many gigabytes.

It imports nothing of this package: stdlib and pyarrow only. As a script it prints the JSON of [question, answer], a row
a line, and to stderr what is wrong with a file, and what to do.
"""

import errno
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MEMORY_BYTES, TEXT_BYTES, LINE_BYTES = 2 << 30, 1 << 29, 4 << 20
"""Of this process; of all rows; of a row."""
_CPU_SECONDS = 1800
_BATCH = 256  # rows that are decoded at a time
_ANOTHER = "Choose another dataset."
_SMALLER = "Choose a smaller split, or make a .jsonl file of the rows that you want."


class Unusable(Exception):
    """Why a file cannot be used, and what to do."""


def _rows(path: Path, *columns: str) -> Iterator[dict[str, Any]]:
    for row in _parquet(path, *columns) if path.suffix == ".parquet" else _json_lines(path):
        _refuse_missing(row, *columns)
        yield row


def _parquet(path: Path, *columns: str) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise Unusable("is in Parquet, which needs pyarrow", "[data]") from None
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # the others set aside more than they need
    with ParquetFile(path) as file:
        _refuse_missing(file.schema_arrow.names, *columns)
        for batch in file.iter_batches(_BATCH, columns=columns, use_threads=False):
            yield from batch.to_pylist()


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
            _refuse_large(line)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise Unusable(f"has no JSON object in line {number} of {path.name}", _ANOTHER)
            yield row


def _refuse_missing(there: Any, *columns: str) -> None:
    if missing := [column for column in columns if column not in there]:
        shown = ", ".join(map(str, there))[:1000]
        raise Unusable(f"has no column {missing[0]!r}", f"Name two with --question and --answer, of: {shown}.")


def _refuse_large(row: bytes | str) -> None:
    if len(row) > LINE_BYTES:
        raise Unusable(f"has a row of more than {LINE_BYTES >> 20} MiB", _ANOTHER)


def _text(value: Any) -> str:
    """A question: a text, or what system and user say in a list of messages, up to the first answer."""
    if isinstance(value, list):
        said = []
        for message in value:
            if not isinstance(message, dict) or message.get("role") not in ("system", "user"):
                break
            said.append(str(message.get("content") or "").strip())
        value = "\n\n".join(text for text in said if text)
    return value if isinstance(value, str) and value.strip() else ""


def _main(question: str, answer: str, most: str, *paths: str) -> None:
    rows = (row for path in paths for row in _rows(Path(path), question, answer))
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace") as told:
        for number, row in enumerate(rows):
            if number == int(most):
                raise Unusable(f"has more than {int(most):,} rows", _SMALLER)
            if asked := _text(row[question]):
                pair = [asked, row[answer]]
                _refuse_large(line := json.dumps(pair, ensure_ascii=False, separators=(",", ":"), default=str))
                told.write(f"{line}\n")


def _why(error: Exception) -> tuple[str, str]:
    """What is wrong, and what to do."""
    if isinstance(error, Unusable):
        return error.args[0], error.args[1]
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.EFBIG:
        return f"unpacks to more than {MEMORY_BYTES >> 30} GiB, or {TEXT_BYTES >> 20} MiB of rows", _SMALLER
    return f"cannot be read: {str(error)[:300]}", _ANOTHER


if __name__ == "__main__":
    for what, limit in (("AS", MEMORY_BYTES), ("FSIZE", TEXT_BYTES), ("CPU", _CPU_SECONDS)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (limit, limit))
    try:
        _main(*sys.argv[1:])
    except Exception as error:  # as many kinds as there are layers
        sys.exit(json.dumps(_why(error)))
