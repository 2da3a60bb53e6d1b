"""One exception tree. An error that a person can cause says in one sentence what is wrong and in one what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# Exit code of a compute process that had not enough memory for what several devices do together.
NO_ROOM = 77


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The sentence that names the nearest of the `known` words, with a space after it; empty if none is near."""
    for close in difflib.get_close_matches(word, list(known), n=1):
        return f"Did you mean {close!r}? "
    return ""


def brief(error: BaseException) -> str:
    """An error's repr, cut: what a peer raised comes with its own words, of any length."""
    text = repr(error)
    if len(text) <= 200:
        return text
    return f"{text[:200]}…"


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of what an error says, cut; its class if it says nothing."""
    for line in str(error).strip().splitlines():
        return line[:most]
    return type(error).__name__


class FtisError(Exception):
    """The root of every error that this package raises on purpose."""

    exit_code = 1


class UserError(FtisError):
    """A mistake that a person can mend.

    `what` is one sentence about what is wrong, `fix` one sentence about what to do.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what} {fix}")
        self.what = what
        self.fix = fix

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str]]:
        """From one process to another."""
        return type(self), (self.what, self.fix)


class UsageError(UserError):
    """Wrong flags, files or values: nothing was started (exit code 2)."""

    exit_code = 2


class Several(UsageError):
    """Mistakes that were found at once, in the order in which they were found."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__("\n".join(error.what for error in errors), "\n".join(error.fix for error in errors))
        self.errors = tuple(errors)
        self.exit_code = max(error.exit_code for error in errors)


def one_by_one(error: UserError) -> tuple[UserError, ...]:
    """The mistakes in an error."""
    if isinstance(error, Several):
        return error.errors
    return (error,)


def each_once(errors: Iterable[UserError]) -> tuple[UserError, ...]:
    """The mistakes in all errors, each once, in their order."""
    found: dict[tuple[str, str], UserError] = {}
    for error in errors:
        for one in one_by_one(error):
            found.setdefault((one.what, one.fix), one)
    return tuple(found.values())


def raise_all(errors: Iterable[UserError]) -> None:
    """Raise what was found, if anything was: the one, or all together, each once."""
    found = each_once(errors)
    if len(found) > 1:
        raise Several(found)
    for alone in found:
        raise alone
