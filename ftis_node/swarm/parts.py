"""The parts of a horizontal run's groups: every node makes a part of each group, and waits for nobody.

A group is the parts of one row of an epoch (see `common_rows`), one of each author. Each node closes a group for
itself, when it trains on it: as soon as all its parts are there, at the end of its epoch, or when the node has nothing
better. What comes later is dropped. Nodes need not agree on what a group was made of: each trains a model of its own.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator

from ftis_node.config.run import Run
from ftis_node.host.clocks import Clock
from ftis_node.packet import Group
from ftis_node.swarm.identity import OfPeer
from ftis_node.swarm.limits import Bounded
from ftis_node.swarm.pool import Newcomers, Pool, Scored

CLOSED_MAX = 4096
EPOCHS = 2
"""Parts are used up to so many epochs after their own began."""

Key = tuple[int, int]
"""(epoch, row) of a group."""


def key_of(group: Group) -> Key:
    """The group that a part belongs to."""
    return group.epoch, group.row


class Parts:
    """Foreign parts whose groups are open: this node has not trained on them yet. Those without a signal are kept, for
    only the group shows it."""

    def __init__(
        self,
        run: Run,
        clock: Clock,
        rng: random.Random | None,
        takes: OfPeer,
    ) -> None:
        """
        Args:
            clock, takes: see `Pool`.
        """
        self.pool = Pool(
            lambda: float(EPOCHS * run.epoch),
            clock,
            rng,
            keep_all=True,
            takes=takes,
        )
        self._run = run
        self.closed = Bounded[Key, bool](CLOSED_MAX)  # the groups that this node has trained on

    def add(self, scored: Scored) -> bool:
        """Add a part. False if its group is closed, or has one of its author already, or as `Pool.add`."""
        key = key_of(scored.group)
        if key in self.closed:
            return False
        if any(key_of(one.group) == key for one in self.pool.of(scored.group.author)):
            return False
        return self.pool.add(scored)

    def by_group(self) -> dict[Key, list[Scored]]:
        """The waiting parts of each open group; those that are too old go first."""
        found = dict[Key, list[Scored]]()
        for one in self.pool.groups():
            found.setdefault(key_of(one.group), []).append(one)
        return found

    def counts(self, newcomers: Newcomers) -> Counter[Key]:
        """How many parts of each open group wait; those of newcomers count while they have room, the oldest first.

        Args:
            newcomers: counting takes up their room, so this call needs one of its own.
        """
        waiting = (one for parts in self.by_group().values() for one in parts)
        return Counter(key_of(one.group) for one in _with_room(waiting, newcomers))

    def ready(self, own: Iterable[Key], epoch: int) -> list[Key]:
        """The groups that can be closed, the oldest epoch first: with all their parts, or of an epoch that has ended.

        Args:
            own: the open groups of which this node has made a part. epoch: the present one.
        """
        parts = Counter({key: len(waiting) for key, waiting in self.by_group().items()})
        parts.update(set(own))
        closable = (key for key, count in parts.items() if key[0] < epoch or count >= self._run.parts)
        return sorted(closable)

    def fullest(self, own: Iterable[Key]) -> list[Key]:
        """The open groups of which this node has made a part, those with most parts first."""
        waiting = self.by_group()
        return sorted(own, key=lambda key: (-len(waiting.get(key, ())), key))

    def close(self, key: Key, newcomers: Newcomers) -> list[Scored]:
        """Close a group for good, and return its parts, the oldest first; those of newcomers without room are dropped.

        Parts of it that come later are refused (`add`), also if nobody sent one until now.

        Args:
            newcomers: the parts take up their room; all groups of a batch share one.
        """
        parts = self.by_group().get(key, [])
        self.pool.remove(parts)
        self.closed[key] = True
        return list(_with_room(parts, newcomers))


def _with_room(parts: Iterable[Scored], newcomers: Newcomers) -> Iterator[Scored]:
    """These parts, the oldest first, without those of newcomers that have no room left, which each of them takes up."""
    for one in sorted(parts, key=lambda one: one.born):
        if newcomers.may(one.group.author):
            newcomers.took(one.group.author)
            yield one
