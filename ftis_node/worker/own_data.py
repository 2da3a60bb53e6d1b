"""Rows of this node's owner alone. They and what is sampled on them stay in the compute process, which has no network.

The node is told counts and rates of them and nothing else, so nothing of them gets into a packet, a log, the page or a
report. A step's groups on them are made anew within the step, and are not kept.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ftis_node.tasks import Example, Scorer


@dataclass(frozen=True, eq=False)
class OwnData:
    """The rows to train on, their template, their prompts as token ids, and the scorer by their rule."""

    template: str
    examples: Sequence[Example]
    prompts: Sequence[Sequence[int]]
    scorer: Scorer

    def rows(self, count: int, step: int, seed: int) -> list[int]:
        """The rows of a step: as many as are asked for, none twice while there are others."""
        order = list(range(len(self.examples)))
        random.Random(f"{seed}/{step}").shuffle(order)
        return [order[place % len(order)] for place in range(count)]
