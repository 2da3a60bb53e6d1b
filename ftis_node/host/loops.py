"""Loops that run beside everything else and end only when they are cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

AGAIN_SECONDS = 1.0

logger = logging.getLogger(__name__)


async def forever(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop; log its unexpected errors and begin it again, at most once a second."""
    while True:
        try:
            await loop()
        except Exception:
            logger.exception("%s failed; it goes on", getattr(loop, "__qualname__", loop))
        await asyncio.sleep(AGAIN_SECONDS)
