"""Loops that run beside everything else and end only when they are cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

AGAIN_SECONDS = 1.0
CANCEL_SECONDS = 0.5

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
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_SECONDS)
