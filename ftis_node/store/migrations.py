"""From what an older version wrote to what this one reads, one version at a time.

Homes, databases and checkpoints carry a number each, their schema. Who changes what is written adds the step from the
number before; what is newer than all steps is refused, and left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ftis_node.errors import UserError

_Thing = TypeVar("_Thing")


@dataclass(frozen=True)
class Schema(Generic[_Thing]):
    """steps: from each number, what makes the next one of a thing. Whoever runs them sees to it that all or none of
    them happen, or that they can be run again."""

    steps: Mapping[int, Callable[[_Thing], None]]

    @property
    def newest(self) -> int:
        """What this version writes."""
        return max(self.steps) + 1

    def pending(self, what: str, found: object) -> Sequence[Callable[[_Thing], None]]:
        """The steps from the schema that was found to the newest, in their order.

        Args:
            what: begins the sentence of the error: ``The home /x``.

        Raises:
            UserError: a newer version wrote it, or nobody can tell which.
        """
        if not isinstance(found, int) or isinstance(found, bool) or found < min(self.steps):
            raise UserError(
                f"{what} does not say its schema ({found!r}): it is damaged.",
                "Put back a copy of it from before, or start anew elsewhere.",
            )
        if found > self.newest:
            raise UserError(
                f"{what} has schema {found!r}, and this version of ftis-node knows {min(self.steps)} to {self.newest}.",
                "A newer version wrote it: upgrade ftis-node, or use the version that wrote it.",
            )
        return [self.steps[number] for number in range(found, self.newest)]
