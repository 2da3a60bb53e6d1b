"""The rows of a dataset's file, in a process with limits: a Parquet file of a kilobyte may unpack to many gigabytes.

It imports nothing of this package: stdlib and pyarrow only. As a script it prints the JSON of [question, answer], a row
a line, and to stderr what is wrong with a file, and what to do.
"""

import errno
import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

MEMORY_BYTES = 2 << 30  # of this process
TEXT_BYTES = 1 << 29  # of all rows
LINE_BYTES = 4 << 20  # of a row
_CPU_SECONDS = 1800
_ABSENT = object()
_BATCH = 256  # rows that are decoded at a time
_ANOTHER = "Choose another dataset."
_SMALLER = "Choose a smaller split, or make a .jsonl file of the rows that you want."


class Unusable(Exception):
    """Why a file cannot be used, and what to do."""


def _rows(path: Path, *columns: str) -> Iterator[list[Any]]:
    """The values in the columns; None where a row has none. A dot leads into a column of objects or lists."""
    names: dict[str, None] = {}
    missing = set(columns)
    rows = _json_lines(path)
    if path.suffix == ".parquet":
        rows = _parquet(path, *columns)
    for row in rows:
        found = {column: _value(row, column) for column in columns}
        missing -= {column for column, value in found.items() if value is not _ABSENT}
        if missing:
            names |= dict.fromkeys(row)
        yield [None if found[column] is _ABSENT else found[column] for column in columns]
    if names and missing:
        _refuse(names, next(column for column in columns if column in missing))


def _value(row: Any, column: str) -> Any:
    """The value in a column, or where a name with dots leads: `a.b` is `b` of the object in `a`, `a.0` the first."""
    if isinstance(row, dict) and column in row:
        return row[column]
    name, dot, rest = column.partition(".")
    if isinstance(row, list) and name.isdecimal() and int(name) < len(row):
        inner = row[int(name)]
    elif isinstance(row, dict) and name in row and dot:
        inner = row[name]
    else:
        return _ABSENT
    if not dot:
        return inner
    return _value(inner, rest)


def _parquet(path: Path, *columns: str) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise Unusable("is in Parquet, which needs pyarrow", "[data]") from None
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # the others set aside more than they need
    with ParquetFile(path) as file:
        names = file.schema_arrow.names
        tops = [column if column in names else column.partition(".")[0] for column in columns]
        for column, top in zip(columns, tops, strict=True):
            if top not in names:
                _refuse(names, column)
        for batch in file.iter_batches(_BATCH, columns=tops, use_threads=False):
            yield from batch.to_pylist()


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
            _refuse_large(line)
            encoding = json.detect_encoding(line[:4])
            if number == 1 and encoding.startswith(("utf-16", "utf-32")):
                raise Unusable(f"is in {encoding.upper()}, and not in UTF-8", _ANOTHER)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise Unusable(f"has no JSON object in line {number} of {path.name}", _ANOTHER)
            yield row


def _refuse(there: Iterable[str], column: str) -> NoReturn:
    shown = ", ".join(map(str, there))[:1000]
    raise Unusable(
        f"has no column {column!r}",
        f"Name two with --question and --answer, of: {shown}; a dot leads into one, as in reward_model.ground_truth.",
    )


def _refuse_large(row: bytes | str) -> None:
    if len(row) > LINE_BYTES:
        raise Unusable(f"has a row of more than {LINE_BYTES >> 20} MiB", _ANOTHER)


def _plain(value: Any) -> str:
    """What JSON has no form for, as text: bytes in UTF-8, decimals, dates."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)


def _answer(value: Any) -> Any:
    """The answer: of a list of messages the first that an assistant says."""
    if isinstance(value, list):
        for one in value:
            if isinstance(one, dict) and one.get("role") == "assistant":
                return one.get("content")
    return value


def _text(value: Any) -> str:
    """A question: a text, or what system and user say in a list of messages, up to the first answer."""
    if isinstance(value, bytes):
        value = _plain(value)
    if isinstance(value, list):
        said = []
        for message in value:
            if not isinstance(message, dict) or message.get("role") not in ("system", "user"):
                break
            said.append(str(message.get("content") or "").strip())
        value = "\n\n".join(text for text in said if text)
    if isinstance(value, str) and value.strip():
        return value
    return ""


def _main(question: str, answer: str, most: str, *paths: str) -> None:
    rows = (row for path in paths for row in _rows(Path(path), question, answer))
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace") as told:
        for number, row in enumerate(rows):
            if number == int(most):
                raise Unusable(f"has more than {int(most):,} rows", _SMALLER)
            pair = [_text(row[0]), _answer(row[1])]
            if pair[0]:
                line = json.dumps(pair, ensure_ascii=False, separators=(",", ":"), default=_plain)
                _refuse_large(line)
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
