"""Parts of the table: the share of each author and of each first sender."""

from collections import Counter

from ftis_node.swarm.known import Known


class Shares:
    """The announcements of each author, or through each first sender; nobody's are more than an eighth of the table.

    The table sees to that: it removes some until a share is no longer `full`, and then puts a new one in.

    by: by owner of the share (38-byte peer id) its announcements by (author, round), in order of arrival. size: by
    owner the bytes of these together. Nothing is ever under None.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        """
        Args:
            most, most_bytes: announcements, and bytes, that one share may have.
        """
        self._most = most
        self._most_bytes = most_bytes
        self.by = dict[bytes | None, dict[tuple[bytes, int], Known]]()
        self.size = Counter[bytes | None]()

    def full(self, whose: bytes, size: int) -> bool:
        """Whether this share has no room for so many more bytes."""
        share = self.by.get(whose)
        if share is None:
            return False
        return len(share) >= self._most or self.size[whose] + size > self._most_bytes

    def put(self, whose: bytes, known: Known) -> None:
        """Add an announcement to a share, even to a full one."""
        self.by.setdefault(whose, {})[known.key] = known
        self.size[whose] += known.size

    def take(self, whose: bytes, known: Known) -> None:
        """Remove an announcement from the share that it is in. Raises KeyError if it is not there."""
        del self.by[whose][known.key]
        self.size[whose] -= known.size
        if not self.by[whose]:
            del self.by[whose], self.size[whose]

    def of(self, whose: bytes | None) -> list[Known]:
        """A share's announcements, in order of arrival."""
        return list(self.by.get(whose, {}).values())
