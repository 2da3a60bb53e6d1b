"""Quiet phases and attacks in turn, and what was seen of them."""

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from ftis_node.swarm.identity import Identity, peer_id
from tests.hostile.arena import Arena, Phase, Sample, grown
from tests.hostile.attack import Attack, striking
from tests.hostile.peer import hostile
from tests.hostile.world import World

SAMPLE_SECONDS = 1.0
LONGEST_PHASE = 15.0


class Stage:
    """Attacks and quiet phases on an arena."""

    def __init__(self, ring: Arena, scratch: Path, seed: int):
        self.ring = ring
        self.scratch = scratch
        self.seed = seed
        self.world: World | None = None
        self.said: dict[str, set[str]] = {}  # of the attackers of this act, by node
        self._opened = 0

    async def watch(self, seconds: float) -> Phase:
        """Watches the nodes for so many seconds."""
        began = time.time()
        samples = [await asyncio.to_thread(self.ring.sample)]
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(left, SAMPLE_SECONDS))
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
        identity = Identity(self._opened.to_bytes(16, "big") + self.seed.to_bytes(16, "big"))
        path = self.scratch / f"hostile-{self._opened}"
        ticket = self.ring.ticket()
        opening = hostile(path, self.ring.addresses, identity, self.world, invitation=ticket)
        peer = await stack.enter_async_context(opening)
        self.world = peer.world
        return kind(peer, self._opened)

    async def attacked(self, kinds: Sequence[type[Attack]], seconds: float) -> tuple[Phase, list[Attack]]:
        async with self.under(kinds) as attacks:
            phase = await self.watch(seconds)
            for name, said in (await asyncio.to_thread(self._said_of, attacks)).items():
                self.said.setdefault(name, set()).update(said)
        return phase, attacks

    async def act(self, kinds: Sequence[type[Attack]], seconds: float) -> dict[str, Any]:
        """Quiet, attack, quiet, …, for so many seconds; what was seen."""
        turns = max(1, round(seconds / (2 * LONGEST_PHASE)))
        length = seconds / (2 * turns + 1)
        self.said = {}
        before = await asyncio.to_thread(self.ring.statuses)
        calm = [await self.watch(length)]
        fights = []
        played = []
        for _ in range(turns):
            fight, attacks = await self.attacked(kinds, length)
            fights.append(fight)
            played += attacks
            calm.append(await self.watch(length))
        after = await asyncio.to_thread(self.ring.statuses)
        authors = {peer_id(author.author) for attack in played for author in attack.authors}
        return {
            "rows": [kind.row for kind in kinds],
            "strikes": sum(attack.strikes for attack in played),
            "errors": sorted({error for attack in played for error in attack.errors})[:5],
            "pace": self._ratio([self.ring.pace(phase) for phase in calm], [self.ring.pace(p) for p in fights]),
            "cpu_seconds_a_step": self._ratio(
                [phase.cpu() / max(1, self.ring.steps(phase)) for phase in calm],
                [phase.cpu() / max(1, self.ring.steps(phase)) for phase in fights],
            ),
            "cores_beside_the_model": self._ratio(
                [phase.cores("network", "p2pd") for phase in calm], [phase.cores("network", "p2pd") for phase in fights]
            ),
            # What the first attack of its kind takes is among the peaks; here is what every further one adds.
            "memory_grown": grown(calm[min(1, turns - 1)].samples, calm[-1].samples),
            "memory_peaks": grown(calm[0].samples, [_highest(fights)]),
            "files_before_and_after": [
                sum(calm[0].samples[-1].files.values()),
                sum(calm[-1].samples[-1].files.values()),
            ],
            "refused": _more(before, after, "refused_packets"),
            "announcements": _more(before, after, "announcements"),
            "attackers_groups_used": self._used(after, authors) - self._used(before, authors),
            "groups_used": self._used(after) - self._used(before),
            "said_of_the_attackers": {name: sorted(said) for name, said in self.said.items()},
            "innocents_blamed": await asyncio.to_thread(self.ring.innocents_blamed),
            "dead": await asyncio.to_thread(self.ring.dead),
            "tracebacks": self.ring.new_tracebacks(),
        }

    def _said_of(self, attacks: Sequence[Attack]) -> dict[str, set[str]]:
        """Why each node ignores the attackers that it has met or leaves them out."""
        guilty = {peer_id(author.author) for attack in attacks for author in attack.authors}
        found = {}
        for name, report in self.ring.peers().items():
            said = [peer["standing"] for peer in report.get("peers", []) if peer["id"] in guilty]
            said += [peer["reason"] for peer in report.get("left_out", []) if peer["id"] in guilty]
            found[name] = {text for text in said if text}
        return found

    @staticmethod
    def _used(statuses: dict[str, dict[str, Any]], authors: set[str] | None = None) -> int:
        counts = [status.get("foreign_groups_used", {}) for status in statuses.values()]
        return sum(n for used in counts for author, n in used.items() if authors is None or author in authors)

    @staticmethod
    def _ratio(calm: Sequence[float], fights: Sequence[float]) -> dict[str, float]:
        quiet = statistics.median(calm)
        attacked = statistics.median(fights)
        return {"quiet": quiet, "attacked": attacked, "ratio": attacked / quiet if quiet else 0.0}


def _highest(phases: Sequence[Phase]) -> Sample:
    samples = [sample for phase in phases for sample in phase.samples]
    keys = {key for sample in samples for key in sample.memory_mb}
    return Sample({key: max(sample.memory_mb.get(key, 0.0) for sample in samples) for key in keys})


def _more(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], what: str) -> dict[str, int]:
    """By how much counters rose, all nodes together."""
    rose = Counter()
    for name, status in after.items():
        rose.update(status.get(what, {}))
        rose.subtract(before[name].get(what, {}))
    return {key: count for key, count in rose.items() if count}
