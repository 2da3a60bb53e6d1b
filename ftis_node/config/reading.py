"""Text and TOML that a person wrote, or was given."""

import re
import tomllib
from pathlib import Path

from ftis_node.errors import UsageError


def read_text(path: Path, what: str, most: int = -1) -> str:
    """The text of a file; `what` it is, in words. most: characters that are read; -1: all. Raises UsageError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(most)
    except OSError as error:
        raise UsageError(f"The {what} {path} cannot be read: {error.strerror}.", "Check the path.") from None
    except UnicodeDecodeError:
        raise UsageError(f"The {what} {path} is not UTF-8 text.", "Save it as UTF-8.") from None


def read_toml(path: Path, what: str) -> dict[str, object]:
    """The same as TOML."""
    return parse_toml(read_text(path, what), f"{what} {path}")


def parse_toml(text: str, what: str) -> dict[str, object]:
    """Read TOML. An error names the line and quotes nothing of the text. Raises UsageError."""
    try:
        return tomllib.loads(text)
    except RecursionError:  # tomllib descends into nested brackets
        raise UsageError(f"The {what} nests too deeply.", "Write it flatter, or ask for the right file.") from None
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        # Only the end is tomllib's own: the rest may quote the file.
        found = re.search(r" \(at line (\d{1,9}), column \d+\)$", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        reason = re.sub(r" \(at [^()]*\)$", "", str(error))
        raise UsageError(f"Line {line} of the {what} is not TOML: {reason}.", "Correct that line.") from None
