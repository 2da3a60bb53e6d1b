"""Memories that strangers fill: identities and ids are free, so each is bounded and the oldest makes room."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)


def make_room(memory: dict[Key, Any], key: Key, most: int) -> Key | None:
    """So that `key` fits among at most `most`. Returns what was forgotten for it, None if nothing had to be."""
    if key in memory or len(memory) < most:
        return None
    oldest: Key = next(iter(memory))
    del memory[oldest]
    return oldest


def remember(memory: dict[Key, Any], key: Key, value: Any, most: int) -> Key | None:
    """Adds what is not there yet; what is there stays as it is. Returns what was forgotten for it."""
    if key in memory:
        return None
    forgotten = make_room(memory, key, most)
    memory[key] = value
    return forgotten
