"""Parts of the table: the share of each author and of each introducer, and piles to draw from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.swarm.table import Known


class Pile:
    """A set of announcements; a draw, an insertion and a removal take constant time."""

    def __init__(self) -> None:
        self.all: list[Known] = []

    def __len__(self) -> int:
        return len(self.all)

    def put(self, known: Known) -> None:
        known.place = len(self.all)
        self.all.append(known)

    def take(self, known: Known) -> None:
        last = self.all.pop()
        if last is not known:
            self.all[known.place], last.place = last, known.place


class Share:
    """The announcements of one author, or through one introducer. size: their bytes together."""

    __slots__ = ("known", "size")

    def __init__(self) -> None:
        self.known: dict[tuple[bytes, int], Known] = {}
        self.size = 0


class Shares:
    """The shares of all authors, or of all introducers; each has at most an eighth of the table."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self.by: dict[bytes, Share] = {}

    def full(self, whose: bytes, size: int) -> bool:
        """Whether this share has no room for so many more bytes."""
        share = self.by.get(whose)
        return share is not None and (len(share.known) >= self._most or share.size + size > self._most_bytes)

    def put(self, whose: bytes, known: Known) -> None:
        share = self.by.setdefault(whose, Share())
        share.known[known.key] = known
        share.size += known.size

    def take(self, whose: bytes, known: Known) -> None:
        share = self.by[whose]
        del share.known[known.key]
        share.size -= known.size
        if not share.known:
            del self.by[whose]

    def count(self, whose: bytes | None) -> int:
        share = self.by.get(whose) if whose is not None else None
        return len(share.known) if share is not None else 0

    def of(self, whose: bytes) -> list[Known]:
        share = self.by.get(whose)
        return list(share.known.values()) if share is not None else []
