"""The latest groups that were trained on, for people to look at: a few of the node's own and a few of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ftis_node.packet import Group

GROUPS_KEPT = 4  # groups of one's own, and as many of others
SHOWN = 12  # completions of a group


@dataclass(frozen=True)
class Shown:
    """A group's packet and its first completions' rewards, tokens and ends [SHOWN at most].

    author: a peer id, None for this node. row: of the task's data.
    """

    step: int
    author: str | None
    row: int
    rewards: tuple[float, ...]
    packet: bytes
    lengths: tuple[int, ...]
    finished: tuple[bool, ...]

    @classmethod
    def of(cls, step: int, author: str | None, group: Group, rewards: Sequence[float]) -> Shown:
        """The first completions of a group."""
        packet = group.packet
        first = (packet.lengths[:SHOWN], packet.finished[:SHOWN])
        return cls(step, author, group.row, tuple(rewards[:SHOWN]), group.data, *first)


class Recent:
    """A ring of own groups and one of others'; `step` is the latest that brought any."""

    def __init__(self) -> None:
        self.step = 0
        self._own: deque[Shown] = deque(maxlen=GROUPS_KEPT)
        self._foreign: deque[Shown] = deque(maxlen=GROUPS_KEPT)

    def add(self, groups: Iterable[Shown]) -> None:
        """The groups of one step. Where no foreign ones came, those of an earlier step stay."""
        for group in groups:
            self.step = group.step
            (self._own if group.author is None else self._foreign).append(group)

    def groups(self) -> list[Shown]:
        """Own ones first, the latest first of each."""
        return [*reversed(self._own), *reversed(self._foreign)]
