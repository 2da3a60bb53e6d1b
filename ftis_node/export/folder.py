"""A folder that appears whole or not at all, and never in place of something that is no model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ftis_node.errors import UsageError, UserError

_OURS = ("config.json", "adapter_config.json")  # one of them is in every folder of a model
# What transformers, peft and the hub put into such a folder.
_SUFFIXES = frozenset((".safetensors", ".json", ".jinja", ".md", ".txt", ".model", ".bin"))
_ANOTHER = "Name another --to."


def check_target(to: Path, *, overwrite: bool, source: Path, base: Path | None = None) -> None:
    """Refuses, before anything is loaded, a target that cannot be written or must not be replaced.

    Args:
        source: the checkpoint, which must not lie in what is replaced.
        base: its base model, which must not either, if it is a folder here.

    Raises:
        UsageError: it is not empty (and not a model, with `overwrite`), or not a directory.
    """
    target = to.resolve()
    if source.resolve().is_relative_to(target) or target.is_relative_to(source.resolve()):
        raise UsageError(f"{to} holds the checkpoint itself, or lies in it.", _ANOTHER)
    if base is not None and base.is_dir() and base.resolve().is_relative_to(target):
        raise UsageError(f"{to} holds the base model of the checkpoint.", _ANOTHER)
    try:
        held = sorted(entry.name for entry in to.iterdir()) if to.is_dir() else []
    except OSError as error:
        raise UsageError(f"{to} cannot be read: {error.strerror}.", _ANOTHER) from None
    if not to.is_dir() and (to.exists() or to.is_symlink()):
        raise UsageError(f"{to} is there and is not a directory.", _ANOTHER)
    if held and not overwrite:
        raise UsageError(f"{to} is there and not empty.", "Name another --to, or replace it with --overwrite.")
    if held and (to.is_symlink() or not any(name in held for name in _OURS)):
        raise UsageError(f"{to} does not look like a model, so it is not replaced.", _ANOTHER)
    foreign = [name for name in held if not _of_a_model(to / name)]
    if foreign:
        raise UsageError(f"{to} holds {foreign[0][:80]!a}, no part of a model.", "Move that, or name another --to.")


def _open_to_others(folder: Path) -> None:
    """Give files the mode that the umask leaves: safetensors makes its own 0600, and a model is no secret."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def _of_a_model(entry: Path) -> bool:
    return entry.is_file() and not entry.is_symlink() and entry.suffix in _SUFFIXES


@contextmanager
def appearing(to: Path) -> Iterator[Path]:
    """A fresh directory beside `to`, which is renamed to it at the end; removed if there is an error.

    The old contents of `to` are gone afterwards (see `check_target`); after an error they are still there.

    Raises:
        UserError: it cannot be written.
    """
    partial = to.with_name(f".{to.name}.{os.getpid()}.partial")
    replaced = to.with_name(f".{to.name}.{os.getpid()}.replaced")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        _open_to_others(partial)
        if to.exists():
            to.rename(replaced)
        partial.rename(to)
    except (OSError, SafetensorError) as error:
        if replaced.exists() and not to.exists():
            replaced.rename(to)
        told = (isinstance(error, OSError) and error.strerror) or error
        raise UserError(f"{to} cannot be written: {told}.", "Make room, or name another --to.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if to.exists():
            shutil.rmtree(replaced, ignore_errors=True)
