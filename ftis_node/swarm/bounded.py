"""Bounded dictionaries for strangers' data. Identities and ids are free, so the oldest entry makes room."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

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


def make_room(memory: dict[Key, Any], key: Key, most: int) -> Key | None:
    """Make room for `key` among at most `most`. Return the key that was removed, or None."""
    if key in memory or len(memory) < most:
        return None
    oldest: Key = next(iter(memory))
    del memory[oldest]
    return oldest


def put(memory: dict[Key, Any], key: Key, value: Any, most: int) -> Key | None:
    """Set a key's value. Return the key that was removed, or None."""
    forgotten = make_room(memory, key, most)
    memory[key] = value
    return forgotten


def entry(memory: dict[Key, Value], key: Key, value: Value, most: int) -> Value:
    """Return a key's value; add this one if it is missing."""
    remember(memory, key, value, most)
    return memory[key]


def remember(memory: dict[Key, Any], key: Key, value: Any, most: int) -> Key | None:
    """Add a missing key; an existing one keeps its value. Return the key that was removed, or None."""
    return None if key in memory else put(memory, key, value, most)
