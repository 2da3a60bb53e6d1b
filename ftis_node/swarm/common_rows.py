"""Common rows of a horizontal run: in every epoch all authors answer the same rows, and nobody waits for anybody.

Rows are drawn from (run, epoch, slot), without the author. The epoch is `issued_at` // `epoch`, in seconds; `issued_at`
is the author's time when it drew the round's rows, and signed.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from ftis_node.config.run import Run
from ftis_node.draw import draw
from ftis_node.host.clocks import unix_seconds
from ftis_node.swarm.announcement import Announcement
from ftis_node.swarm.limits import Bounded

TOLERANCE = 1  # epochs between `issued_at` and the age, each way: clocks differ, and groups take time to generate
AUTHORS_MAX = 4096  # authors of whom is remembered what they answered
EPOCHS_MAX = 2 * TOLERANCE + 1  # of an author
NO_ROUND = 2**64 - 1  # which nobody takes up (`swarm.rounds`)


@dataclass
class OwnSlots:
    """Which slots of the epoch a node has not answered yet: it answers each once. They begin anew with each epoch; a
    restarted node repeats its earlier rounds here (`node.horizontal`)."""

    run: Run
    author: bytes

    def __post_init__(self) -> None:
        self._epoch = -1
        self._left = set[int]()  # slots of the epoch that are not answered

    def take(self, count: int, unix: float, admitted: Mapping[int, int]) -> list[int]:
        """The slots of a round of up to `count` parts, ascending; none if all are answered. They count as answered from
        now on.

        Slots where others' parts wait for this node's come first, those with most parts before others; then slots that
        nobody has answered, in an order of this node's own; then those that have all their parts.

        Args:
            unix: the time at which the round's rows are drawn, seconds since 1970. It names the epoch.
            admitted: how many others' parts of each slot of this epoch this node has; a slot without any may be left
                out.
        """
        epoch = self.run.epoch_at(unix)
        slots = self.run.slots
        if epoch != self._epoch:
            self._epoch = epoch
            self._left = set(range(slots))
        start = draw(self.run.id, self.author, epoch, 0, slots)  # of the order in which this node answers new slots

        def later(slot: int) -> tuple[int, int]:
            """The sort key: smallest for the slot to answer first."""
            parts = admitted.get(slot, 0)
            rank = -parts
            if parts >= self.run.parts:
                rank = 1  # it has all its parts
            return rank, (slot - start) % slots

        chosen = sorted(self._left, key=later)[:count]
        self._left.difference_update(chosen)
        return sorted(chosen)


@dataclass
class Answered:
    """The slots that each author has answered. An (author, epoch, slot) counts once. 4096 authors are remembered, with
    three epochs of each; in a run without common rows, none."""

    run: Run

    def __post_init__(self) -> None:
        # author → epoch → by slot, the round that answered it
        self._rounds: Bounded[bytes, Bounded[int, array[int]]] = Bounded(AUTHORS_MAX)

    def in_time(self, announcement: Announcement, age: float) -> bool:
        """Whether an announcement's epoch agrees with this age. One without common rows agrees with any.

        Args:
            age: seconds since the signature, as the sender reports; nobody has signed it.
        """
        signed = self.run.epoch_at(announcement.issued_at)
        reported = self.run.epoch_at(unix_seconds() - age)
        if abs(signed - reported) <= TOLERANCE:
            return True
        return all(ref.slot >= self.run.common for ref in announcement.packets)

    def refused(self, announcement: Announcement) -> int:
        """Note an announcement. Return a bit mask of its packets in common slots that another round of its author has
        answered; 0: none, so each of its packets counts. Its signature was checked, and it is `in_time`."""
        common = {i: ref.slot for i, ref in enumerate(announcement.packets) if ref.slot < self.run.common}
        if not common:
            return 0
        epochs = self._rounds.setdefault(announcement.author, Bounded(EPOCHS_MAX))
        fresh = array("Q", [NO_ROUND]) * self.run.common
        rounds = epochs.setdefault(self.run.epoch_at(announcement.issued_at), fresh)
        refused = 0
        for index, slot in common.items():
            if rounds[slot] == NO_ROUND:
                rounds[slot] = announcement.round
            if rounds[slot] != announcement.round:
                refused |= 1 << index
        return refused
