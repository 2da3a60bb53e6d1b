"""Packages of the registry that a test needs beside those of the project."""

import subprocess
import sys
from pathlib import Path

import pytest


def installed(requirement: str, folder: Path) -> Path:
    """Install it into the folder; where that cannot be, skip the test."""
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), requirement]
    ended = subprocess.run(line, capture_output=True, text=True)
    if ended.returncode:
        pytest.skip(f"{requirement} cannot be installed: {ended.stderr[-200:]}")
    return folder
