"""What a person or a terminal sees: words of peers and of models, sizes, counts and durations."""

from __future__ import annotations

MB, GB = 1 << 20, 1 << 30  # as graphics cards are labelled; of disks too


def escaped(text: str) -> str:
    """What is not printable is written as Python writes it: line ends, control characters, changes of direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def rounded(size: float) -> str:
    """The one form of sizes: ``0.3 MB``, ``12 MB``, ``1.02 GB``, ``24.0 GB``."""
    if round(size / MB) < GB // MB:
        return f"{size / MB:.0f} MB" if size >= 9.5 * MB else f"{size / MB:.1g} MB"
    return f"{size / GB:.2f} GB" if size < 9.995 * GB else f"{size / GB:,.1f} GB"


def counted(number: int, noun: str) -> str:
    """``1 peer``, ``2 peers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """For people: ``12 s``, ``3 min 5 s``, ``2 h 7 min``, ``3 d 4 h``."""
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"
