"""Rows in CSV: a header with `question` (or `prompt`) and `answer`, as the objects of a JSONL file have them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from ftis_node.tasks.jsonl import BLANK, CORRECT, JsonLines, UnusableLine

FIELD_CHARACTERS = 1 << 17
_FIRST = "Begin the file with a line such as question,answer."


class CsvRows(JsonLines):
    """As `JsonLines`, of a file whose name ends in .csv. Fields may be quoted, and then have commas and newlines."""

    suffix = ".csv"

    def rows_in(self, data: bytes) -> Iterator[tuple[int, object]]:
        """The number of the line on which each row begins, and its fields by their names, or `UnusableLine`, after
        which nothing is read if the quotes are wrong."""
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            yield data.count(b"\n", 0, error.start) + 1, UnusableLine("is not UTF-8", "Save the file as UTF-8.")
            return
        csv.field_size_limit(FIELD_CHARACTERS)
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        names: list[str] | None = None
        ended = 0
        while True:
            number = ended + 1
            try:
                row = next(rows, None)
            except csv.Error as error:  # quotes that do not close, or a field that is too long
                yield number, UnusableLine(f"begins a row that is not CSV ({error})", CORRECT)
                return
            ended = rows.line_num
            if row is None:
                return
            if not any(field.strip() for field in row):
                yield number, BLANK
            elif names is None:
                names = [name.strip() for name in row]
                if "answer" not in names or len(set(names)) < len(names):
                    yield number, UnusableLine("is no header with `answer`, and each column once", _FIRST)
                    return
            elif len(row) != len(names):
                yield number, UnusableLine(f"has {len(row)} fields, and the header has {len(names)}", CORRECT)
            else:
                yield number, dict(zip(names, row, strict=True))
