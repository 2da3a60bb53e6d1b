"""Text for a person or a terminal: words of peers and of models, sizes, counts and durations."""

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping

_LIKE_AN_ID = re.compile(r"12D3|\bQm\w{8}|\S{40}")
MB = 1 << 20
GB = 1 << 30  # as graphics cards are labelled; of disks too


def escaped(text: str) -> str:
    """Characters that are not printable are escaped as Python does it: line ends, control characters, changes of
    direction.
    """
    return _printable(text, lambda character: character.encode("unicode_escape").decode())


def _printable(text: str, escape: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    written = []
    for character in text:
        if not character.isprintable():
            character = escape(character)
        written.append(character)
    return "".join(written)


_ENDS = re.compile(r"(?<=[,:])\n(?=line |and )")  # of refused lines of a file; a name may hold any other


def in_lines(what: str) -> list[str]:
    """An error of several lines, each but the first so far in that it is neither another error nor what to do."""
    first, *rest = further_lines(what)
    return [f"error: {first}", *rest]


def further_lines(what: str) -> list[str]:
    """The lines of such an error, each but the first so far in."""
    first, *rest = _ENDS.split(what)
    return [first, *(f"         {line}" for line in rest)]


def in_toml(value: object, *, lines: bool = False) -> str:
    """A bool, number, text or list of these as TOML, with an escape for all that is not printable.

    Args:
        lines: a text of several lines is written as such.
    """
    if isinstance(value, list):
        items = [in_toml(item, lines=lines) for item in value]
        return f"[{', '.join(items)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if lines and "\n" in value:
        written = [_escaped_toml(line) for line in value.split("\n")]
        return "\n".join(['"""', *written]) + '"""'
    return f'"{_escaped_toml(value)}"'


def _escaped_toml(text: str) -> str:
    """JSON's escapes are all TOML's too."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _printable(quoted[1:-1], lambda character: f"\\U{ord(character):08x}")


def in_json(value: object) -> str:
    """JSON of printable ASCII letters alone, in one line."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def say(*lines: object, error: bool = False, flush: bool = False) -> None:
    """Print lines as they are, each in one line: what a name or a peer put into them moves no terminal.

    Args:
        error: on stderr, not on stdout.
    """
    stream = sys.stdout
    if error:
        stream = sys.stderr
    print(*(escaped(str(line)) for line in lines), sep="\n", file=stream, flush=flush)


def rounded(size: float) -> str:
    """The one form of sizes: ``0.3 MB``, ``12 MB``, ``1.02 GB``, ``24.0 GB``."""
    if size < 9.5 * MB:
        return f"{size / MB:.1g} MB"
    if round(size / MB) < GB // MB:
        return f"{size / MB:.0f} MB"
    if size < 9.995 * GB:
        return f"{size / GB:.2f} GB"
    return f"{size / GB:,.1f} GB"


def counted(number: int, noun: str) -> str:
    """``1 peer``, ``2 peers``."""
    if number != 1:
        noun += "s"
    return f"{number} {noun}"


def number(value: float | None, form: str) -> str:
    """A value in a form of `format`; a dash for None."""
    if value is None:
        return "–"
    return format(value, form)


def duration(seconds: float) -> str:
    """A duration for people: ``12 s``, ``3 min 5 s``, ``2 h 7 min``, ``3 d 4 h``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {seconds} s"
    return f"{seconds} s"


def with_names(text: str, names: Mapping[str, str]) -> str:
    """A text with `NAME (ID)` for each peer id that has a name."""
    return re.sub(r"\b12D3Koo\w+", lambda found: called(found[0], names), text)


def called(who: str, names: Mapping[str, str]) -> str:
    """`NAME (ID)`, or the peer id alone, also where the name could pass for another's id."""
    name = name_of(who, names)
    if name:
        return f"{name} ({who})"
    return who


def name_of(who: str, names: Mapping[str, str]) -> str:
    """What a peer calls itself; empty where it has no name, or one that could pass for another's id."""
    name = names.get(who, "")
    if _LIKE_AN_ID.search(unicodedata.normalize("NFKC", name)):
        return ""
    return name
