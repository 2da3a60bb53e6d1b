"""The groups of a step: own ones and foreign ones; a few to show."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ftis_node.packet import Group
from ftis_node.step_report import OWN, BatchReport, Digests
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.pool import Scored
from ftis_node.worker.messages import GroupPart, StepGroup

GROUPS_KEPT = 4  # groups of one's own, and as many of others


@dataclass(frozen=True, eq=False)
class Shown:
    """A group that was trained on at `step`, with its rewards [G]. author: a peer id, None for this node."""

    step: int
    author: str | None
    group: Group
    rewards: Sequence[float]


class StepBatch(NamedTuple):
    """The groups of a step, in the order in which they are trained on. wait: seconds waited for foreign groups. key:
    parts of equal keys form one group; by default each is a group of its own."""

    own: Sequence[Scored]
    foreign: Sequence[Scored]
    wait: float = 0.0
    key: Callable[[Group], Hashable] = attrgetter("key")


class Recent:
    """The latest four own groups and four of others, for the page. `step` is the latest step; 0 before the first of
    this start."""

    def __init__(self) -> None:
        self.step = 0
        self._own: deque[Shown] = deque(maxlen=GROUPS_KEPT)
        self._foreign: deque[Shown] = deque(maxlen=GROUPS_KEPT)

    def add(self, step: int, batch: StepBatch) -> None:
        """Add a few groups of a step: own ones with differing rewards before others, for only they teach; foreign ones
        of as many authors as possible. Where no foreign ones came, those of an earlier step stay. Call it each step."""
        self.step = step
        for mine in sorted(batch.own, key=lambda one: not one.has_signal)[:GROUPS_KEPT]:
            self._own.append(Shown(step, None, mine.group, mine.rewards))
        turns: Counter[bytes] = Counter()

        def turn(scored: Scored) -> int:
            """1 for the first group of an author, 2 for its second. `sorted` calls it once for each, in their order."""
            turns[scored.group.author] += 1
            return turns[scored.group.author]

        for one in sorted(batch.foreign, key=turn)[:GROUPS_KEPT]:
            self._foreign.append(Shown(step, peer_id(one.group.author), one.group, one.rewards))

    def groups(self) -> list[Shown]:
        """Own ones first, the latest first of each."""
        return [*reversed(self._own), *reversed(self._foreign)]


def describe(own: Sequence[Scored], foreign: Sequence[Scored]) -> BatchReport:
    """The groups of a step with their packet digests in order, so that a replay can repeat it. It goes into the step's
    line of `metrics.jsonl`."""
    return BatchReport(
        own_groups=len(own),
        foreign_groups=len(foreign),
        authors=dict(Counter(peer_id(scored.group.author) for scored in foreign)),
        own_reward=mean([r for group in own for r in group.rewards]),
        foreign_reward=mean([r for scored in foreign for r in scored.rewards]),
        batch=Digests(
            own=[one.group.digest.hex() for one in own],
            foreign=[one.group.digest.hex() for one in foreign],
        ),
    )


def step_groups(batch: StepBatch, weights: Mapping[bytes, float]) -> list[StepGroup]:
    """The groups of a batch in the engine's form: one for each `batch.key`, in the order of their first parts, own
    before foreign. The order of sums in the step follows from it, so a replay needs the same.

    Args:
        weights: of each foreign author's samples in the loss, 0 to 1. Raises KeyError if one is missing.
    """
    parts = [(one.group, GroupPart(OWN, one.group.data, one.rewards)) for one in batch.own]
    for scored in batch.foreign:
        group = scored.group
        part = GroupPart(peer_id(group.author), group.data, scored.rewards, weights[group.author])
        parts.append((group, part))
    groups: dict[Hashable, StepGroup] = {}
    for group, part in parts:
        found = groups.setdefault(batch.key(group), StepGroup(group.row, []))
        found.parts.append(part)
    return list(groups.values())


def mean(values: Sequence[float]) -> float | None:
    """The mean; None without values."""
    if values:
        return sum(values) / len(values)
    return None
