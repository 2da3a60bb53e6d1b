"""p2pd is a process of its own and may die or hang; then another takes its place, and all that hung on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ftis_node.swarm.wire.transport import Transport

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0

logger = logging.getLogger(__name__)


class Supervisor:
    """Watches over a transport."""

    def __init__(self, transport: Transport, revived: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            revived: makes good what ended with the old p2pd: handlers, connections.
        """
        self.restarts = 0
        self._transport = transport
        self._revived = revived

    async def watch(self) -> None:
        """Waits for trouble and mends it, for ever. Meanwhile the node trains on what it has."""
        while True:
            trouble = await self._transport.trouble()
            logger.error("The network daemon p2pd %s; it is started again.", trouble)
            await self._bring_back()
            self.restarts += 1
            logger.info("The network is back.")

    async def _bring_back(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                await self._transport.restart()
                return await self._revived()
            except Exception as error:  # a taken port, a lack of memory, a p2pd that died again: all may pass
                logger.error("p2pd could not be started again: %s The next try is in %.0f s.", error, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
