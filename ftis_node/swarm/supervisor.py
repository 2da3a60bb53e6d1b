"""Supervision of p2pd, a separate process, which may die or hang."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count

from ftis_node.host.clocks import backoff
from ftis_node.swarm.wire.transport import Transport

FIRST_PAUSE = 1.0  # before p2pd is started again
LONGEST_PAUSE = 30.0

logger = logging.getLogger(__name__)


@dataclass
class Supervisor:
    """Watches over a transport: p2pd is a separate process, which may die or hang.

    revived: restores what ended with the old p2pd: handlers, connections. restarts: successful ones, since the start.
    """

    transport: Transport
    revived: Callable[[], Awaitable[None]]
    restarts: int = 0

    async def watch(self) -> None:
        """Restart p2pd whenever it fails, until this task is cancelled. Meanwhile the node trains on its own groups."""
        while True:
            trouble = await self.transport.trouble()
            logger.warning("The network daemon p2pd %s; it is started again.", trouble)
            await self._bring_back()
            self.restarts += 1
            logger.info("The network is back.")

    async def _bring_back(self) -> None:
        """Start p2pd again and restore the rest; try until both succeed, with pauses of 1, 2, 4 … s, 30 s at most."""
        for times in count(1):
            pause = backoff(times, FIRST_PAUSE, LONGEST_PAUSE)
            try:
                await self.transport.restart()
                return await self.revived()
            except Exception as error:  # a taken port, a lack of memory or a p2pd that died again may pass
                logger.error("p2pd could not be started again: %s The next try is in %.0f s.", error, pause)
            await asyncio.sleep(pause)
