"""A request to give up what a process is computing, so that what it has can be saved."""

import threading

from ftis_node.errors import FtisError

_asked = threading.Event()


class Interrupted(FtisError):
    """The computation was given up; nothing has changed but random states."""


def interrupt() -> None:
    """End the computation that runs, or the next one, at its next `check`; from any thread."""
    _asked.set()


def forget() -> None:
    """Take back a request: the computation that it was for has ended."""
    _asked.clear()


def check() -> None:
    """To be called between pieces of what takes long, where it leaves nothing half done.

    Raises:
        Interrupted: it was asked for; once for each time.
    """
    if _asked.is_set():
        _asked.clear()
        raise Interrupted("It was given up.")
