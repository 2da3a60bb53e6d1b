"""Migrations: from an older version's schema to this one's, one number at a time.

Homes, databases and checkpoints each carry a number, their schema. A change of what is written adds a step from the
number before. A number newer than all steps, or older than the first one, is refused; nothing is written then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ftis_node.errors import UserError

_Thing = TypeVar("_Thing")


@dataclass(frozen=True)
class Schema(Generic[_Thing]):
    """The oldest number that is read, and the steps from each number to the next. A caller runs all steps or none."""

    oldest: int
    steps: tuple[Callable[[_Thing], None], ...] = ()

    @property
    def newest(self) -> int:
        """The schema version that this program writes."""
        return self.oldest + len(self.steps)

    def pending(self, what: str, found: object) -> Sequence[Callable[[_Thing], None]]:
        """The steps from the schema that was found to the newest, in their order.

        Args:
            what: begins the sentence of the error: ``The home /x``.

        Raises:
            UserError: a newer version wrote it, or one that is too old, or nobody can tell which.
        """
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise UserError(
                f"{what} does not say its schema ({found!r}): it is damaged.",
                "Put back a copy of it from before, or start anew elsewhere.",
            )
        if not self.oldest <= found <= self.newest:
            raise UserError(
                f"{what} has schema {found!r}, and this version of ftis-node knows {self.oldest} to {self.newest}.",
                "A newer version wrote it: upgrade ftis-node, or use the version that wrote it."
                if found > self.newest
                else "A development version before 0.1 wrote it: use that version, or start in a new --home.",
            )
        return self.steps[found - self.oldest :]
