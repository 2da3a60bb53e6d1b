"""Copied as `sitecustomize.py` into a folder of one run of the tests, which is in PYTHONPATH: every Python process that
the tests start notes there where it makes an error for people."""

import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

ERRORS = "ftis_node.errors"


def watch(errors: Any, folder: str):
    """Append each place that makes a `UserError` to a file of this process in `folder`."""
    source = os.path.dirname(errors.__file__) + os.sep
    noted = set()
    before = errors.UserError.__init__

    def made(self: Any, what: str, fix: str):
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in noted and place[0].startswith(source):
            noted.add(place)
            with suppress(OSError), open(os.path.join(folder, f"{os.getpid()}.txt"), "a") as file:
                file.write(f"{place[0].removeprefix(source)}:{place[1]}\n")
        before(self, what, fix)

    errors.UserError.__init__ = made


class Waiting:
    """Watches from the moment at which the process imports the product's errors: nothing is imported for it."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == ERRORS else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType):
                run(module)
                watch(module, os.path.dirname(os.path.abspath(__file__)))

            spec.loader.exec_module = exec_module
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Waiting)
