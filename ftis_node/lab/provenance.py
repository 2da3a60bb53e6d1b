"""Which code, by which libraries, made a result."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path

_PACKAGES = ("ftis-node", "torch", "transformers", "peft", "numpy")


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of what computes."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _PACKAGES}}


@functools.cache
def commit() -> str:
    """The commit of the code, where it is a git checkout; a plus sign says that it was changed since."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()
