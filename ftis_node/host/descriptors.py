"""Open files: how many this process may have, and what to make of it when they run out."""

from __future__ import annotations

import errno
import logging
import os
import resource
from contextlib import suppress
from typing import TYPE_CHECKING

from ftis_node.errors import FtisError

if TYPE_CHECKING:
    import asyncio

WANTED = 65_536  # a limit of a thousand million, as containers have, makes programs slow that go through it
ROOM = 16  # that must be free before the node goes on: a new compute process takes about ten
PAUSE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class OutOfFiles(FtisError):
    """Too many files were open; there is room again."""


def limit() -> int:
    """Files that this process may have open at a time."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return WANTED
    return soft


def raise_limit() -> int:
    """Raise the soft limit to the hard one, or to 65,536 if that is less; return it. Child processes inherit it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = WANTED
    if hard != resource.RLIM_INFINITY:
        wanted = min(WANTED, hard)
    if wanted > limit():
        with suppress(OSError, ValueError):  # a sandbox may forbid it; then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def ran_out(error: BaseException) -> bool:
    """Whether an error comes from too many open files. SQLite tells that as any file that it cannot open."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CANTOPEN", "SQLITE_IOERR")) and not _room(1)


async def wait_for_room(error: Exception, stopping: asyncio.Event) -> OutOfFiles:
    """Wait until files can be opened again, or the node was asked to stop.

    Raises:
        Exception: `error` itself, if it is another one.
    """
    import asyncio

    if not ran_out(error):
        raise error
    logger.error("Too many files are open (the limit is %d); the node goes on when some are closed.", limit())
    while not (_room(ROOM) or stopping.is_set()):
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), PAUSE_SECONDS)
    return OutOfFiles(f"Too many files were open (the limit is {limit()}).")


def _room(count: int) -> bool:
    """Whether so many more files can be opened now."""
    opened = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return True
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
