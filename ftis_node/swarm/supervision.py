"""Restarts of p2pd, a separate process that may die or hang, and of everything that depends on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count

from ftis_node.host.clocks import backoff
from ftis_node.swarm.wire.transport import Transport

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0

logger = logging.getLogger(__name__)


class Supervisor:
    """Watches over a transport."""

    def __init__(self, transport: Transport, revived: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            revived: restores what ended with the old p2pd: handlers, connections.
        """
        self.restarts = 0
        self._transport = transport
        self._revived = revived

    async def watch(self) -> None:
        """Restart p2pd whenever it fails. Meanwhile the node trains on its own groups."""
        while True:
            trouble = await self._transport.trouble()
            logger.error("The network daemon p2pd %s; it is started again.", trouble)
            await self._bring_back()
            self.restarts += 1
            logger.info("The network is back.")

    async def _bring_back(self) -> None:
        for times in count(1):
            pause = backoff(times, FIRST_PAUSE, LONGEST_PAUSE)
            try:
                await self._transport.restart()
                return await self._revived()
            except Exception as error:  # a taken port, a lack of memory or a p2pd that died again may pass
                logger.error("p2pd could not be started again: %s The next try is in %.0f s.", error, pause)
            await asyncio.sleep(pause)
