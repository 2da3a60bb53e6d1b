"""What both sources of batches count alike."""

from __future__ import annotations

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.node.demand import Waiting
from ftis_node.swarm.parts import EPOCHS
from ftis_node.swarm.pool import Newcomers, Pool

WAIT_SECONDS = 0.25


def waiting_in(pool: Pool, newcomers: Newcomers) -> Waiting:
    """What waits in the pool."""
    waiting = pool.waiting()
    theirs = sum(count for author, count in waiting.items() if newcomers.is_one(author))
    return Waiting(sum(waiting.values()), theirs, newcomers.room)


def by_need(run: Run, settings: Settings, *, own_only: bool) -> bool:
    """Whether a node asks for groups of rows that it cannot do."""
    return settings.by_need and not own_only and run.parts == 1


def needed_age(run: Run, settings: Settings, *, own_only: bool) -> float | None:
    """Seconds for which a packet may answer a row that the node asks for; None: it asks for none."""
    if run.parts > 1:
        return float(EPOCHS * run.epoch)
    return settings.needed_age if by_need(run, settings, own_only=own_only) else None
