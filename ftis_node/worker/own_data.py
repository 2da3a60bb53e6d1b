"""Rows of this node's owner alone. They and what is sampled on them stay in the compute process, which sends them
nowhere.

The node is told counts and rates of them and nothing else, so nothing of them gets into a packet, a log, the page or a
report. A step's groups on them are made anew within the step, and are not kept.
"""

import random
from collections.abc import Sequence
from typing import Any

from ftis_node.step_report import OWN
from ftis_node.worker.messages import GroupPart, ScoredPacket, StepGroup


def rows_of_step(there: int, count: int, step: int, seed: int) -> list[int]:
    """So many of `there` rows, none twice while there are others."""
    order = list(range(there))
    random.Random(f"{seed}/{step}").shuffle(order)
    return [order[place % there] for place in range(count)]


def groups_of(rows: Sequence[int], made: Sequence[ScoredPacket]) -> list[StepGroup]:
    """The groups that were sampled on them, for a step."""
    groups = []
    for row, one in zip(rows, made, strict=True):
        part = GroupPart(OWN, one.packet, one.rewards)
        groups.append(StepGroup(row, [part], own=True))
    return groups


def figures(groups: Sequence[StepGroup]) -> dict[str, Any]:
    """Return the number of these among a step's groups, and their mean reward, for the report."""
    own = [group for group in groups if group.own]
    rewards = [reward for group in own for part in group.parts for reward in part.rewards]
    mean = None
    if rewards:
        mean = sum(rewards) / len(rewards)
    return {"own_data_groups": len(own), "own_data_reward": mean}
