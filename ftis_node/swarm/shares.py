"""Parts of the table: the share of each author and of each first sender, and piles to draw from."""

from collections import Counter

from ftis_node.swarm.known import Known


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
            self.all[known.place] = last
            last.place = known.place


class Shares:
    """The announcements of each author, or through each first sender; nobody's are more than an eighth of the table.

    by: in order of arrival. size: bytes together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.by: dict[bytes | None, dict[tuple[bytes, int], Known]] = {}
        self.size = Counter[bytes | None]()

    def full(self, whose: bytes, size: int) -> bool:
        """Whether this share has no room for so many more bytes."""
        share = self.by.get(whose)
        return share is not None and (len(share) >= self._most or self.size[whose] + size > self._most_bytes)

    def put(self, whose: bytes, known: Known) -> None:
        self.by.setdefault(whose, {})[known.key] = known
        self.size[whose] += known.size

    def take(self, whose: bytes, known: Known) -> None:
        del self.by[whose][known.key]
        self.size[whose] -= known.size
        if not self.by[whose]:
            del self.by[whose], self.size[whose]

    def of(self, whose: bytes | None) -> list[Known]:
        return list(self.by.get(whose, {}).values())
