"""Questions of one's own: a JSONL file with `question` (or `prompt`) and an `answer` in every line, or CSV.

The rule decides what an answer may be: by default it is an integer.

A tenth of the rows, chosen by the hash of their question, is never trained on. It is held out where no other
evaluation file is named, and stays out of training where one is: what a node evaluates on is its own business and must
not change the rows that a run's prompts are drawn from.
"""

import ast
import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ftis_node.errors import UsageError
from ftis_node.tasks.download import sha256_of
from ftis_node.tasks.rewards import ANSWER_CHARACTERS, TEXT_CHARACTERS, check_rule, kind_of, normal, parse_integer
from ftis_node.tasks.source import Source
from ftis_node.tasks.task import Example, Task, place_of
from ftis_node.tasks.templates import PLAIN
from ftis_node.text import counted

_HELD_OUT = 0.1
_EXPRESSION_CHARACTERS = 1000
_LINES_TOLD = 10
_NEXT = ",\n"
_EXACT_FLOAT = 2**53
_POINT_ZERO = re.compile(r"(?<=[0-9])\.0*\Z")
BLANK = object()
CORRECT = "Correct or remove that line."
FIELD_CHARACTERS = 1 << 17
_FIRST = "Begin the file with a line such as question,answer."


def split(path: Path | str, rows: tuple[Example, ...]) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """(train, held out): about a tenth of the questions is held out, at least one; equal questions stay together."""
    places = {row.question: place_of(row.question) for row in rows}
    lowest = min(places.values())
    held = {question for question, place in places.items() if place < _HELD_OUT or place == lowest}
    train = tuple(row for row in rows if row.question not in held)
    if not train:
        raise UsageError(
            f"{path} has only {counted(len(places), 'different question')}, and all would be held out, for tests.",
            "Add rows: about a tenth is held out, chosen by a hash; from 20 questions on some are left for training.",
        )
    return train, tuple(row for row in rows if row.question in held)


@dataclass(frozen=True)
class Layout:
    """The contents that a row must have: one of the fields with a question, and an answer that `answer_of` can read."""

    answer_of: Callable[[Any], str | None]
    wanted: str = "an integer of at most 40 characters"
    fields: tuple[str, ...] = ("question", "prompt")

    @property
    def shape(self) -> str:
        return f'{{"{self.fields[0]}": …, "answer": …}}'


Numbered = Iterator[tuple[int, object]]


def json_lines(data: bytes) -> Numbered:
    """The number of each line, and its value, `BLANK` or `UnusableLine`."""
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n"), start=1):
        row = BLANK
        try:
            if line.strip():
                row = json.loads(line.decode())
                json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError):
            row = UnusableLine("is not JSON in UTF-8", CORRECT)
        yield number, row


def read_rows(
    path: Path, layout: Layout, rows_in: Callable[[bytes], Numbered] = json_lines
) -> tuple[str, tuple[Example, ...], str]:
    """The sha256 (hex) of the file, its rows, and the name of their question field.

    Raises:
        UsageError: the file cannot be read or is empty, or lines cannot be used: ten are told, and how many more.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "Name a CSV or JSONL file that exists.") from error
    encoding = json.detect_encoding(data[:4])
    if not encoding.startswith("utf-8"):
        raise UsageError(f"{path} is in {encoding.upper()}.", "Save the file as UTF-8.")
    rows = []
    used = ""  # the field of the first line that can be used
    wrong: list[tuple[int, str, str]] = []
    for number, row in ((number, row) for number, row in rows_in(data) if row is not BLANK):
        try:
            field, example = _row(row, layout, f"Line {number} of {path.name}")
            used = used or field
            if field != used:
                raise UnusableLine(
                    f"has {field!r} where earlier lines have {used!r}", "Use one of them in the whole file."
                )
            rows.append(example)
        except UnusableLine as error:
            wrong.append((number, *error.args))
    if wrong:
        raise _refused(path, wrong)
    if not rows:
        raise UsageError(f"{path} is empty.", f"Put one {layout.shape} in every line.")
    return hashlib.sha256(data).hexdigest(), tuple(rows), used


class UnusableLine(Exception):
    """A line: what is wrong with it, and what to do."""


def _refused(path: Path, wrong: Sequence[tuple[int, str, str]]) -> UsageError:
    """The lines that cannot be used: number, what is wrong, what to do."""
    if len(wrong) == 1:
        number, what, fix = wrong[0]
        return UsageError(f"{path}, line {number}, {what}.", fix)
    told = [f"line {number} {what}" for number, what, _ in wrong[:_LINES_TOLD]]
    if len(wrong) > _LINES_TOLD:
        told.append(f"and {len(wrong) - _LINES_TOLD:,} more")
    return UsageError(f"{path} has {len(wrong):,} unusable lines:\n{_NEXT.join(told)}.", "Correct or remove them.")


def plain_answer(value: Any) -> str | None:
    """The canonical digits of an answer that is an integer or the text of one, which may end in `.0`."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_FLOAT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    if isinstance(value, int) and abs(value) >= 10**39:
        return None
    if isinstance(value, str):
        value = _POINT_ZERO.sub("", value.strip())
    number = parse_integer(str(value))
    if number is None:
        return None
    return str(number)


def latex_answer(value: Any) -> str | None:
    """An answer of mathematics, as it stands."""
    if isinstance(value, str) and 0 < len(value.strip()) <= ANSWER_CHARACTERS:
        return value
    return None


def _text_answer(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        value = plain_answer(value)
    if not isinstance(value, str):
        return None
    return normal(value) or None


def _expression(value: Any) -> str | None:
    if not isinstance(value, str) or not 0 < len(value) <= _EXPRESSION_CHARACTERS:
        return None
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return None
    return value


def _asserts(value: Any) -> str | None:
    """Unit tests: Python text with an assert in it, or a list of such lines, as MBPP has them."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_CHARACTERS:
        return None
    try:
        tree = ast.parse(value)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        return value
    return None


GOLDS: Mapping[str, tuple[Callable[[Any], str | None], str]] = {
    "integer": (plain_answer, "an integer of at most 40 characters"),
    "exact": (_text_answer, f"a text of 1 to {TEXT_CHARACTERS} characters"),
    "regex": (_expression, f"a regular expression of 1 to {_EXPRESSION_CHARACTERS} characters"),
    "math": (latex_answer, f"a text of 1 to {ANSWER_CHARACTERS} characters"),
    "tests": (_asserts, f"Python text with asserts, or a list of its lines, of 1 to {TEXT_CHARACTERS} characters"),
}
"""By the kind of answer: what makes a gold answer of a row's (None: it is none), and what that may be."""


def _row(row: object, layout: Layout, place: str) -> tuple[str, Example]:
    """The question's field, and the row. Raises UnusableLine."""
    if isinstance(row, UnusableLine):
        raise row
    if not isinstance(row, dict):
        raise UnusableLine("is not a JSON object", f"Write {layout.shape}.")
    field = next((name for name in layout.fields if isinstance(row.get(name), str) and row[name].strip()), None)
    if field is None:
        names = " or ".join(f"`{name}`" for name in layout.fields)
        raise UnusableLine(f"has no text in {names}", "Add the question to that line.")
    if "answer" not in row:
        raise UnusableLine("has no `answer`", f"Add the answer, {layout.wanted}, to that line.")
    answer = layout.answer_of(row["answer"])
    if answer is None:
        raise UnusableLine(f"has an answer that is not {layout.wanted}", CORRECT)
    return field, Example(row[field], answer, place)


class JsonLines(Source):
    """The task of a local file, which tells the number of a line that cannot be used.

    A `question` is put into the reasoning template; a `prompt` is given to the model as it is. A file uses one of them.
    """

    has_files = True
    suffix: ClassVar[str] = ".jsonl"

    @classmethod
    def mine(cls, name: str) -> bool:
        return name.lower().endswith(cls.suffix)

    def rows_in(self, data: bytes) -> Numbered:
        """See `json_lines`."""
        return json_lines(data)

    @property
    def file(self) -> Path:
        return Path(self.name)

    def empty(self) -> int:
        return sum(row is BLANK for _, row in self.rows_in((self.data or self.file).read_bytes()))

    def foreseen(self) -> tuple[str | None, str | None]:
        return sha256_of(self.data or self.file), self.rule

    def refuse_stranger(self, *, ours: bool) -> None:
        if not self.code and self.data is None and not ours:
            raise UsageError(
                f"The run's task is the file {self.name!a}, and which file is opened here is not a run's to say.",
                "Get it from the others in the run, and name your copy with --data FILE.",
            )

    def _load(self) -> Task:
        return self._of(self.data or self.file, self.eval_data)

    def _test(self) -> Task:
        return replace(self._of(self.file, self.data), train=())

    def _of(self, path: Path, eval_data: Path | None) -> Task:
        check_rule(self.rule)
        layout = Layout(*GOLDS[kind_of(self.rule)])
        digest, rows, field = read_rows(path, layout, self.rows_in)
        train, held_out = split(path, rows)
        if eval_data is not None:
            held_out, eval_field = read_rows(eval_data, layout, self.rows_in)[1:]
            if eval_field != field:
                raise UsageError(
                    f"{path} has the field {field!r} but {eval_data} has {eval_field!r}.",
                    "Use the same field in both files.",
                )
        template = None
        if field != "question":
            template = PLAIN
        return Task.by_rule(path.name, train, held_out, digest, self.rule, template=template)


class CsvRows(JsonLines):
    """As `JsonLines`, of a .csv file: a header, then rows. Fields may be quoted, and then have commas and newlines."""

    suffix = ".csv"

    def rows_in(self, data: bytes) -> Numbered:
        """The number of the line on which each row begins, and its fields by their names, or `UnusableLine`, after
        which nothing is read if the quotes are wrong."""
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            yield data.count(b"\n", 0, error.start) + 1, UnusableLine("is not UTF-8", "Save the file as UTF-8.")
            return
        csv.field_size_limit(FIELD_CHARACTERS)
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        names = None
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
