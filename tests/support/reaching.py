"""Copied as `sitecustomize.py` into a folder of one run of the tests, which is in PYTHONPATH: every Python process that
the tests start notes there where it makes an error for people."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def watch(folder: str) -> None:
    """Append each place that makes a `UserError` to a file of this process in `folder`."""
    from ftis_node import errors

    source, noted, before = os.path.dirname(errors.__file__) + os.sep, set[tuple[str, int]](), errors.UserError.__init__

    def made(self: errors.UserError, what: str, fix: str) -> None:
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in noted and place[0].startswith(source):
            noted.add(place)
            with suppress(OSError), open(os.path.join(folder, f"{os.getpid()}.txt"), "a") as file:
                file.write(f"{place[0].removeprefix(source)}:{place[1]}\n")
        before(self, what, fix)

    errors.UserError.__init__ = made  # type: ignore[method-assign]


if __name__ == "sitecustomize":
    with suppress(ImportError):  # a Python without the product
        watch(os.path.dirname(os.path.abspath(__file__)))
