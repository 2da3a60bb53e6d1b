"""Which code, by which libraries, made a result."""

import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import ftis_node

_LIBRARIES = ("torch", "transformers", "peft", "numpy")


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of what computes a step."""
    libraries = {name: metadata.version(name) for name in _LIBRARIES}
    return {"ftis-node": ftis_node.__version__, "python": platform.python_version(), **libraries}


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
