"""How many groups of a batch a node makes itself, and how many foreign ones it pulls. All values are groups."""

import math
from typing import NamedTuple

from ftis_node.config.run import Run
from ftis_node.swarm.parts import EPOCHS
from ftis_node.swarm.pool import NO_LIMIT, Newcomers, Pool

# A node generates at least this part of its batch itself; otherwise many strangers could control it.
OWN_SHARE_FLOOR = 0.25
POOLED_STEPS = 3.0  # for which a group may wait in the pool, and at most
POOLED_SECONDS = 3600.0
WAIT_SECONDS = 0.25  # for foreign groups, at a time
SUPPLY_MEMORY = 0.2  # weight of the latest step in the mean of foreign groups per step


class Waiting(NamedTuple):
    """Foreign groups that wait. newcomers: those of authors without a record; a batch takes up to `room` of these,
    and any number if no author has a record yet."""

    groups: int
    newcomers: int = 0
    room: int = NO_LIMIT

    def left(self, batches: float = 1.0) -> int:
        """The further newcomers' groups that so many batches have room for; −2: two wait that have no room."""
        return math.ceil(self.room * batches) - self.newcomers

    def usable(self, batches: float = 1.0) -> int:
        """The waiting groups without the newcomers' that so many batches have no room for."""
        return self.groups + min(0, self.left(batches))


class Demand:
    """A node's mean supply of foreign groups, and what follows from it.

    The estimate uses waiting and recently arrived groups, not announcements; otherwise a peer could make others wait
    with empty announcements. It begins anew with each start of the node.
    """

    def __init__(self) -> None:
        self._supply: float | None = None  # mean groups that come per step; None before the first
        self._came = 0  # until the latest batch
        self._left = 0  # groups that the latest batch had no room for

    def stepped(self, came: int, waiting: Waiting) -> None:
        """Note a batch, once, when its foreign groups have been taken from the pool.

        Args:
            came: foreign groups that the pool has got since the start (`Pool.added`). waiting: what the batch left.
        """
        new = came - self._came
        self._came = came
        self._supply = new if self._supply is None else self._supply + SUPPLY_MEMORY * (new - self._supply)
        self._left = waiting.usable()

    def groups_to_make(self, batch: int, part: int, waiting: Waiting) -> int:
        """The groups to make before waiting for foreign ones, at most `batch`: the node's own part, or more where
        fewer foreign ones are expected than the rest. Before the first batch was noted: the part.

        Args:
            part: see `own_part`. waiting: what is in the pool now.
        """
        if self._supply is None:
            return part
        expected = max(int(self._left + self._supply), waiting.usable())  # foreign groups, until the batch is taken
        return min(batch, max(part, batch - expected))


def own_part(batch: int, share: float | None, others: int) -> int:
    """A node's part of a batch if peers supply theirs, rounded up; 0 for a listener.

    Args:
        share: as the settings fix it, 0 to 1; None: an equal one among itself and so many others, a quarter at least.
    """
    if share is None:
        share = max(1 / (1 + others), OWN_SHARE_FLOOR)
    return math.ceil(share * batch)


def foreign(part: int, batches: float, waiting: Waiting) -> int:
    """The further foreign groups to pull for so many batches; 0 or negative: none.

    Args:
        part: the foreign groups of one batch. waiting: what is in the pool now, or on its way into it.
    """
    return math.ceil(part * batches) - waiting.usable(batches)


def waiting_in(pool: Pool, newcomers: Newcomers) -> Waiting:
    """Count the groups that wait in the pool; those that are too old are dropped (`Pool.expire`)."""
    waiting = pool.waiting()
    theirs = sum(count for author, count in waiting.items() if newcomers.is_one(author))
    return Waiting(sum(waiting.values()), theirs, newcomers.room)


def pooled_age(max_age: float, step_seconds: float) -> float:
    """Seconds for which groups wait in the pool: three of the node's own steps and at most an hour, but `max_age` at
    least. A slow node may thus train on what came while it took a step. step_seconds: 0 before the first step."""
    return max(max_age, min(POOLED_STEPS * step_seconds, POOLED_SECONDS))


def announced_age(run: Run, max_age: float) -> float:
    """Seconds for which announcements are kept: `max_age`, or as long as the parts of a horizontal run are of use."""
    if run.common:
        return max(max_age, EPOCHS * run.epoch)
    return max_age
