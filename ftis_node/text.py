"""Words of peers and of models, before a person or a terminal sees them."""

from __future__ import annotations


def escaped(text: str) -> str:
    """What is not printable is written as Python writes it: line ends, control characters, changes of direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
