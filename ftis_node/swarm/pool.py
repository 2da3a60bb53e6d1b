"""The pool: admitted foreign groups that wait to be trained on, each at most once."""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from ftis_node.host.clocks import Clock
from ftis_node.packet import Group
from ftis_node.swarm.identity import OfPeer

NO_LIMIT = 1 << 30  # groups: more than there ever are


@dataclass(frozen=True, eq=False)
class Scored:
    """An admitted group, own or foreign, with this node's own rewards of its completions [G]; empty if it can train on
    none of them. born: when its author made it, by the pool's clock (seconds)."""

    group: Group
    rewards: tuple[float, ...]
    born: float

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ; a group where all are equal teaches nothing, nor one without any."""
        return len(set(self.rewards)) > 1


@dataclass
class Newcomers:
    """Authors without a record, and the number of groups that all of them together may still have.

    A choice of groups takes up the room, so each batch needs a new one.

    is_one: returns whether an author is a newcomer. record: returns how many of its groups count towards its record.
    """

    is_one: OfPeer = lambda author: False
    room: int = NO_LIMIT
    record: Callable[[bytes], int] = lambda author: 0

    @property
    def full(self) -> bool:
        """Whether no newcomer has room left."""
        return self.room <= 0

    def may(self, author: bytes) -> bool:
        """Whether a group of this author fits."""
        return not self.full or not self.is_one(author)

    def took(self, author: bytes) -> None:
        """Count a group that was taken from this author; only a newcomer's takes up room."""
        self.room -= self.is_one(author)


@dataclass(frozen=True)
class Want:
    """The foreign groups that a node would take now, besides those that wait; at 0 or below it takes none.

    Those whose pull is under way count as taken. of_one: the most from one author in a step. rows: only groups of these
    rows, one a row, the first ones first; None: of any.
    """

    groups: int = 0
    newcomers: Newcomers = field(default_factory=Newcomers)
    of_one: int = 0
    rows: Iterable[int] | None = None


@dataclass
class Pool:
    """Foreign groups by author. Authors take turns; the freshest group of an author goes first.

    The pool remembers a taken group until it would have expired, so that no second copy of it comes in. It lives in
    memory only, and is used in the event loop only; after a restart it is filled from the store.

    added, no_signal, expired: groups since the start that came in, had no signal, or grew too old.

    max_age: returns the seconds after which a group is too old to train on. clock: what `Scored.born` was read from
    (`boot_seconds`). keep_all: keep groups without a signal too, because a part of a group does not show the signal of
    the whole. takes: returns whether an author may teach; the waiting groups of one that may not are dropped for good.
    """

    max_age: Callable[[], float]
    clock: Clock
    rng: random.Random | None = None
    _: KW_ONLY
    keep_all: bool = False
    takes: OfPeer = lambda author: True

    def __post_init__(self) -> None:
        self._rng = self.rng or random.Random()
        self.added = 0
        self.no_signal = 0
        self.expired = 0

        self._by_author = dict[bytes, list[Scored]]()
        self._born = dict[tuple[bytes, int, int], float]()  # of every group that is or was here

    def __len__(self) -> int:
        """The number of waiting groups that may still be trained on; those that are too old go."""
        return sum(self.waiting().values())

    def add(self, scored: Scored) -> bool:
        """Add a group. False if it has no signal (counted), or the pool has or had it already."""
        if not (scored.has_signal or self.keep_all):
            self.no_signal += 1
            return False
        if self.knows(scored.group.key):
            return False
        self.added += 1
        self._born[scored.group.key] = scored.born
        self._by_author.setdefault(scored.group.author, []).append(scored)
        return True

    def knows(self, key: tuple[bytes, int, int]) -> bool:
        """Whether the pool has or had this group, and it has not expired."""
        return key in self._born and self._born[key] >= self._limit()

    def put_back(self, taken: Sequence[Scored]) -> None:
        """Return groups to the pool that `take` gave and no step used. They are as old as before."""
        for scored in taken:
            self._by_author.setdefault(scored.group.author, []).append(scored)

    def of(self, author: bytes) -> Sequence[Scored]:
        """The waiting groups of an author, only to read; among them may be some that are too old."""
        return self._by_author.get(author, ())

    def groups(self) -> list[Scored]:
        """The waiting groups by author; those that are too old, or whose author may not teach, go first."""
        self.expire()
        return [one for groups in self._by_author.values() for one in groups]

    def waiting(self) -> dict[bytes, int]:
        """The number of waiting groups by author."""
        self.expire()
        return {author: len(groups) for author, groups in self._by_author.items()}

    def take(self, count: int, newcomers: Newcomers | None = None) -> list[Scored]:
        """Remove up to `count` groups and return them, fewer if there are fewer: the freshest of each author, the
        authors in random order, in turns until there are enough.

        Args:
            newcomers: what is taken takes up their room; None: they have no limit.
        """
        newcomers = newcomers or Newcomers()
        self.expire()
        self._forget()
        taken = list[Scored]()
        while len(taken) < count:
            authors = [author for author in self._by_author if newcomers.may(author)]
            if not authors:
                break
            self._rng.shuffle(authors)
            for author in authors[: count - len(taken)]:
                if not newcomers.may(author):
                    continue
                newcomers.took(author)
                groups = self._by_author[author]
                freshest = max(groups, key=lambda scored: scored.born)
                groups.remove(freshest)
                if not groups:
                    del self._by_author[author]
                taken.append(freshest)
        return taken

    def remove(self, taken: Collection[Scored]) -> None:
        """Remove these groups; the pool remembers them, so none comes in again."""
        gone = set(taken)
        self._forget()
        self._keep(lambda one: one not in gone)

    def expire(self) -> None:
        """Drop the groups that are too old, which `expired` counts, and those whose author may not teach."""
        self._by_author = {author: groups for author, groups in self._by_author.items() if self.takes(author)}
        before = sum(map(len, self._by_author.values()))
        limit = self._limit()
        self._keep(lambda one: one.born >= limit)
        self.expired += before - sum(map(len, self._by_author.values()))

    def _forget(self) -> None:
        """Forget the groups of which no copy may come any more; once a batch, for they are many."""
        limit = self._limit()
        self._born = {key: born for key, born in self._born.items() if born >= limit}

    def _limit(self) -> float:
        """The time by the clock; a group that was made before it is too old."""
        return self.clock() - self.max_age()

    def _keep(self, stays: Callable[[Scored], bool]) -> None:
        """Drop the waiting groups for which `stays` is false, and authors that have none left."""
        kept = {}
        for author, groups in self._by_author.items():
            staying = list(filter(stays, groups))
            if staying:
                kept[author] = staying
        self._by_author = kept
