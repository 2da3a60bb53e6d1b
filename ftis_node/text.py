"""What a person or a terminal sees: words of peers and of models, and sizes."""

from __future__ import annotations

MB, GB = 1 << 20, 1 << 30  # as graphics cards are labelled; of disks too


def escaped(text: str) -> str:
    """What is not printable is written as Python writes it: line ends, control characters, changes of direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def gigabytes(size: float) -> str:
    """``12.3 GB``."""
    return f"{size / GB:.1f} GB"


def rounded(size: float) -> str:
    """``12 MB``, ``3.4 GB``."""
    return gigabytes(size) if size >= GB else f"{size / MB:.0f} MB"
