"""A file or folder that appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ftis_node.errors import UserError
from ftis_node.host.files import sync


@contextmanager
def appearing(to: Path, fix: str) -> Iterator[Path]:
    """Yield a path beside `to` for the block to make; it gets that name at the end, or is removed after an error.

    The old file or folder at `to` is replaced at the end; after an error it is still there.

    Args:
        fix: what a person can do where it cannot be written.

    Raises:
        UserError: it cannot be written.
    """
    to = to.resolve()
    partial = to.with_name(f".{to.name}.{os.getpid()}.partial")
    replaced = to.with_name(f".{to.name}.{os.getpid()}.replaced")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.is_file():
            sync(partial)
        elif to.exists():  # no folder takes the place of one with files in it
            to.rename(replaced)
        partial.replace(to)
    except (OSError, SafetensorError) as error:
        if replaced.exists() and not to.exists():
            replaced.rename(to)
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{to} cannot be written: {why}.", fix) from error
    finally:
        _remove(partial)
        if to.exists():
            _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
