"""Where the groups of a node's batches come from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.node.demand import Waiting
from ftis_node.node.step_batch import OwnGroup, StepBatch
from ftis_node.swarm.parts import EPOCHS
from ftis_node.swarm.pool import Newcomers, Pool, Scored, Want

WAIT_SECONDS = 0.25


class BatchSource(Protocol):
    """Decides what a node makes itself, what it pulls, and what a batch is made of.

    pool: the foreign groups that wait.
    """

    pool: Pool

    def want(self) -> Want:
        """The further foreign groups to pull."""

    def add(self, scored: Scored) -> bool:
        """Add a foreign group to the pool; False if it is not for training."""

    def slots(self, count: int, issued_at: int) -> list[int]:
        """The slots of a round of up to `count` own groups, at a unix time; none if there is nothing to make."""

    def made(self, groups: Sequence[OwnGroup]) -> None:
        """Note a round of own groups."""

    async def batch(self, stopping: asyncio.Event) -> StepBatch | None:
        """Make groups, wait for others, and take a batch. None if `stopping` came first, or there is nothing."""


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
