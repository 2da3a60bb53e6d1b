"""The rows that a node cannot do: its own samples all failed there, so only a peer's group can teach it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto

from ftis_node.config.run import Run
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.announcement import Announcement
from ftis_node.swarm.limits import Bounded

ROWS_MAX = 4096


class RowState(IntEnum):
    """The history of a row on which all own samples failed.

    NEEDED: the node trained on no group of another node there since. LEARNED: it did. DONE: and then it did the row
    itself.
    """

    NEEDED = auto()
    LEARNED = auto()
    DONE = auto()


@dataclass
class Needs:
    """A bounded book of rows, with the latest failure last.

    A row enters when all samples of an own group fail there. It is needed until the node trains on another node's group
    there, or until an own sample succeeds. A further failure makes it needed again. The row of a group follows from its
    announcement (`ftis_node.draw`), so no author can make itself wanted.
    """

    _rows: Bounded[int, RowState] = field(default_factory=lambda: Bounded(ROWS_MAX))

    def __contains__(self, row: object) -> bool:
        """Whether a group of this row is needed."""
        return self._rows.get(row) is RowState.NEEDED  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[int]:
        """The needed rows, the latest failure first."""
        return (row for row, state in reversed(self._rows.items()) if state is RowState.NEEDED)

    def tried(self, row: int, rewards: Sequence[float]) -> None:
        """Note the rewards [G] of an own group."""
        if right_of(rewards):
            self.could(row)
            return
        self._rows.pop(row, None)
        self._rows[row] = RowState.NEEDED

    def could(self, row: int) -> None:
        """Note that the node can do the row; one that it never learned from others is forgotten."""
        if row in self:
            del self._rows[row]
        elif row in self._rows:
            self._rows[row] = RowState.DONE

    def trained(self, rows: Iterable[int]) -> None:
        """Note the rows of the other nodes' groups in a step."""
        self._rows.update({row: RowState.LEARNED for row in rows if row in self})

    def learned(self, most: int) -> list[int]:
        """The latest rows, up to `most`, that were learned from others and are not known to be done."""
        return [row for row, state in self._rows.items() if state is RowState.LEARNED][-most:]

    def count(self, *states: RowState) -> int:
        """The number of rows in these states."""
        return sum(state in states for state in self._rows.values())

    def facts(self) -> list[tuple[int, int]]:
        """The book as plain values, for a checkpoint."""
        return [(row, int(state)) for row, state in self._rows.items()]

    @classmethod
    def from_facts(cls, facts: Iterable[Sequence[int]]) -> Needs:
        """Restore the output of `facts`. Raises ValueError if it is malformed."""
        needs = cls()
        for row, state in facts:
            needs._rows[row] = RowState(state)
        return needs


def teaches(run: Run, right: int) -> bool:
    """Whether an announced packet has right and wrong completions; any part of a horizontal run's group may teach."""
    return run.parts > 1 or 0 < right < run.group


def teaching_rows(context: AdmissionContext, announcement: Announcement) -> Mapping[int, int]:
    """The rows of an announcement's packets that may teach, by their index. About 1 µs a packet."""
    author, round, issued_at = announcement.author, announcement.round, announcement.issued_at
    return {
        index: context.row_of(author, round, ref.slot, issued_at)
        for index, ref in enumerate(announcement.packets)
        if teaches(context.run, ref.right)
    }


def no_rows(announcement: Announcement) -> Mapping[int, int]:
    """For a table without an index of rows."""
    return {}


def right_of(rewards: Sequence[float]) -> int:
    """The completions of a group [G] with its highest reward; 0 if that is not above 0. See `PacketRef.right`."""
    best = max(rewards)
    return sum(reward == best for reward in rewards) if best > 0 else 0
