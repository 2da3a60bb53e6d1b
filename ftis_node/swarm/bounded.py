"""Bounded dictionaries for strangers' data. Identities and ids are free, so the oldest entry makes room."""

from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Bounded(dict[Key, Value]):
    """A dictionary that holds at most `most` entries: a new key removes the oldest. A key's age is that of its entry,
    not of its latest value."""

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if key not in self and len(self) >= self.most:
            del self[next(iter(self))]
        super().__setitem__(key, value)

    def setdefault(self, key: Key, default: Value) -> Value:
        """A key's value; a missing key gets `default`, and may remove the oldest."""
        if key not in self:
            self[key] = default
        return self[key]
