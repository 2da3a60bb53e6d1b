"""Quiet phases and attacks in turn, and what was seen of them."""

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ftis_node.swarm.identity import Identity, peer_id
from tests.hostile.arena import Arena, Phase, Sample, grown
from tests.hostile.attack import Attack, striking
from tests.hostile.peer import hostile
from tests.hostile.world import World

SAMPLE_SECONDS = 1.0
LONGEST_PHASE = 15.0

Statuses: TypeAlias = dict[str, dict[str, Any]]
"""What each node says of itself, by its name."""


class Stage:
    """Attacks and quiet phases on an arena."""

    def __init__(self, ring: Arena, scratch: Path, seed: int):
        self.ring = ring
        self.scratch = scratch
        self.seed = seed
        self.world: World | None = None
        self._opened = 0

    async def watch(self, seconds: float) -> Phase:
        """Watches the nodes for so many seconds."""
        began = time.time()
        samples = [await asyncio.to_thread(self.ring.sample)]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await asyncio.sleep(min(seconds, SAMPLE_SECONDS))
            samples.append(await asyncio.to_thread(self.ring.sample))
        return Phase(began, time.time(), samples)

    @contextlib.asynccontextmanager
    async def under(self, kinds: Sequence[type[Attack]]) -> AsyncIterator[list[Attack]]:
        """All of these attacks at once until the block ends, each by a peer of its own with a new identity."""
        async with contextlib.AsyncExitStack() as stack:
            attacks = [await self._open(kind, stack) for kind in kinds]
            async with striking(attacks):
                yield attacks

    async def _open(self, kind: type[Attack], stack: contextlib.AsyncExitStack) -> Attack:
        self._opened += 1
        number = self._opened.to_bytes(16, "big")
        identity = Identity(number + self.seed.to_bytes(16, "big"))
        path = self.scratch / f"hostile-{self._opened}"
        ticket = self.ring.ticket()
        opening = hostile(path, self.ring.addresses, identity, self.world, invitation=ticket)
        peer = await stack.enter_async_context(opening)
        self.world = peer.world
        return kind(peer, self._opened)

    async def act(self, kinds: Sequence[type[Attack]], seconds: float) -> dict[str, Any]:
        """Quiet, attack, quiet, …, for so many seconds; what was seen."""
        ring = self.ring
        turns = max(1, round(seconds / (2 * LONGEST_PHASE)))
        length = seconds / (2 * turns + 1)
        before = await asyncio.to_thread(ring.statuses)
        calm = [await self.watch(length)]
        fights = []
        played = []
        for _ in range(turns):
            async with self.under(kinds) as attacks:
                fights.append(await self.watch(length))
            played += attacks
            calm.append(await self.watch(length))
        after = await asyncio.to_thread(ring.statuses)
        authors = {peer_id(author.author) for attack in played for author in attack.authors}
        errors = {error for attack in played for error in attack.errors}
        # What the first attack of its kind takes is among the peaks; what every further one adds is in `memory_grown`.
        warm = calm[min(1, turns - 1)]
        return {
            "rows": [kind.row for kind in kinds],
            "strikes": sum(attack.strikes for attack in played),
            "errors": sorted(errors)[:5],
            "pace": _beside(ring.pace, calm, fights),
            "cpu_seconds_a_step": _beside(ring.cost, calm, fights),
            "memory_grown": grown(warm.samples, calm[-1].samples),
            "memory_peaks": grown(calm[0].samples, [_highest(fights)]),
            "files_before_and_after": [calm[0].files, calm[-1].files],
            "refused": _more(before, after, "refused_packets"),
            "announcements": _more(before, after, "announcements"),
            "attackers_groups_used": _used(after, authors) - _used(before, authors),
            "groups_used": _used(after) - _used(before),
            "innocents_blamed": await asyncio.to_thread(ring.innocents_blamed),
            "dead": await asyncio.to_thread(ring.dead),
            "tracebacks": ring.new_tracebacks(),
        }


def _used(statuses: Statuses, authors: set[str] | None = None) -> int:
    """Foreign groups that all nodes have trained on: of these authors, or of any."""
    used = Counter()
    for status in statuses.values():
        used.update(status.get("foreign_groups_used", {}))
    if authors is None:
        return used.total()
    return sum(used[author] for author in authors)


def _beside(measure: Callable[[Phase], float], calm: Sequence[Phase], fights: Sequence[Phase]) -> dict[str, float]:
    """The median of a measure in quiet phases, in those under attack, and what part of the first the second is."""
    quiet = statistics.median(map(measure, calm))
    attacked = statistics.median(map(measure, fights))
    ratio = attacked / quiet if quiet else 0.0
    return {"quiet": quiet, "attacked": attacked, "ratio": ratio}


def _highest(phases: Sequence[Phase]) -> Sample:
    """The most memory that each process had in some phases."""
    highest = Sample()
    for phase in phases:
        for sample in phase.samples:
            for key, megabytes in sample.memory_mb.items():
                highest.memory_mb[key] = max(megabytes, highest.memory_mb.get(key, 0.0))
    return highest


def _more(before: Statuses, after: Statuses, what: str) -> dict[str, int]:
    """By how much counters rose, all nodes together."""
    rose = Counter()
    for name, status in after.items():
        rose.update(status.get(what, {}))
        rose.subtract(before[name].get(what, {}))
    return {key: count for key, count in rose.items() if count}
