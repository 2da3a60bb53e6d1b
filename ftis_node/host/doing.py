"""What this process is doing, and how far it is: noted by the thread that works, read by any other."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ftis_node.step_report import Doing


@dataclass(eq=False)
class Work:
    """A piece of work under way. begun: how many more would be done, were what is half done counted in parts."""

    what: str
    of: int | None
    unit: str
    done: int = 0
    begun: float = 0.0
    read: int = 0
    tokens: int = 0
    since: float = field(default_factory=time.monotonic)


_works: list[Work] = []  # the outermost first, which is the one that people are shown


@contextmanager
def doing(what: str, of: int | None = None, unit: str = "") -> Iterator[Work]:
    """Note within the context that this process does `what`, as a present participle: "generating".

    Where other work is under way already, this is a part of it: its progress counts for the whole. The work that it
    gives may be called otherwise while it is under way.

    Args:
        of: how many there are to be done, of `unit`, a plural; None: nobody knows.
    """
    work = Work(what, of, unit)
    _works.append(work)
    try:
        yield work
    finally:
        _works.remove(work)


def advance(done: int = 0, *, read: int = 0, tokens: int = 0, begun: float = 0.0) -> None:
    """Note progress: so many more are done, so many more prompts were read, and so many more tokens were made.

    Args:
        begun: how many are half done, counted in parts; it replaces what was said before.
    """
    if _works:
        work = _works[0]
        work.done += done
        work.read += read
        work.tokens += tokens
        work.begun = begun


def now() -> Doing | None:
    """What is being done; None: nothing. Call it from any thread."""
    works = _works[:1]
    if not works:
        return None
    work = works[0]
    seconds = time.monotonic() - work.since
    left = None
    if work.of is not None:
        share = min(1.0, (work.done + work.begun) / max(1, work.of))
        if share > 0:
            left = seconds * (1 - share) / share
    done = work.done
    if work.of is not None:
        done = min(done, work.of)
    what = work.what
    if work.read and not work.tokens:
        what += f" ({work.read} prompts read)"
    return Doing(what, done, work.of, work.unit, work.tokens, seconds, left)
