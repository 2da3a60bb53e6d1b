"""Benchmarks: ours beside a rival, in the same run."""

from collections.abc import Callable
from typing import TypeAlias

from ftis_node.text import say

Tell: TypeAlias = Callable[[str], None]
"""Takes a line about progress, for a person."""


def told(line: str) -> None:
    """Print progress on stderr."""
    say(line, error=True)
