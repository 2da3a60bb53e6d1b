"""Loops that run beside everything else and end only when they are cancelled; and the signals that end a daemon."""

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

PARENT = "END_WITH_PROCESS"
"""An environment variable: the id of the process that started this one and that it does not outlive."""
AGAIN_SECONDS = 1.0
CANCEL_SECONDS = 0.5
_PDEATHSIG = 1  # of prctl

logger = logging.getLogger(__name__)


async def forever(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop; log its unexpected errors and begin it again, at most once a second."""
    while True:
        try:
            await loop()
        except Exception:
            logger.exception("%s failed; it goes on", getattr(loop, "__qualname__", loop))
        await asyncio.sleep(AGAIN_SECONDS)


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for them; repeatedly, for a cancellation can be lost in a wait that has just ended."""
    tasks = list(tasks)
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CANCEL_SECONDS)


def listen(stop: Callable[[int], None]) -> None:
    """Call `stop` with the exit code on SIGTERM (0), on Ctrl-C (130) and when the terminal is closed (129).

    Takes `PARENT` from the environment: the end of that process, however it ends, counts as a SIGTERM.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop, 0)
    loop.add_signal_handler(signal.SIGINT, stop, 130)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup would not have it matter
        loop.add_signal_handler(signal.SIGHUP, stop, 129)
    parent = os.environ.pop(PARENT, "")
    if parent:
        signal_with_parent(signal.SIGTERM)
        if os.getppid() != int(parent):  # it ended before this
            stop(0)


def signal_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it has ended, also if that was killed."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, number, 0, 0, 0)
