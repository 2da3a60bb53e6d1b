"""Bounded dictionaries for strangers' data. Identities and ids are free, so the oldest entry makes room."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


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
