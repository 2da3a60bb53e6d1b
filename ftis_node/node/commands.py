"""What a node's owner wants of it now: whether it goes on, and whether it may train."""

import asyncio
import contextlib
from enum import Enum, auto

from ftis_node.node.schedule import LOOK_SECONDS, Schedule


class Phase(Enum):
    """FINISHING: the node ends after the running step. STOPPING: it ends within half a minute."""

    GOING_ON = auto()
    FINISHING = auto()
    STOPPING = auto()


class Hold(Enum):
    """Why a node does not train: its owner paused it, or by `Schedule`."""

    OWNER = auto()
    SCHEDULE = auto()


class Commands:
    """The present commands.

    phase: FINISHING or STOPPING last. hold: why the node is not to train, None if it is.
    stopping: set in the phase STOPPING. flush: set if the running step is to wait for nothing.
    """

    def __init__(self, schedule: Schedule, *, paused: bool) -> None:
        self.phase = Phase.GOING_ON
        self.hold = Hold.OWNER if paused else None
        self.stopping, self.flush = asyncio.Event(), asyncio.Event()
        self._schedule = schedule
        self._came = asyncio.Event()
        self._give(self.phase, self.hold)

    @property
    def ending(self) -> bool:
        """Whether the node ends."""
        return self.phase is not Phase.GOING_ON

    @property
    def pausing(self) -> bool:
        """Whether the node is not to train."""
        return self.hold is not None

    @property
    def finishing(self) -> bool:
        """Whether the node ends after the running step."""
        return self.phase is Phase.FINISHING

    @property
    def why(self) -> str:
        """What the schedule has against training, if that holds the node."""
        return self._schedule.why or "" if self.hold is Hold.SCHEDULE else ""

    def stop(self) -> None:
        self.stopping.set()
        self._give(Phase.STOPPING, self.hold)

    def finish(self) -> None:
        self._give(Phase.FINISHING, self.hold)

    def pause(self) -> None:
        self._give(self.phase, Hold.OWNER)

    def resume(self) -> None:
        """Train, also in spite of hours, battery and GPU, until these allow it anyway."""
        self._schedule.overrule()
        self._give(self.phase, None)

    async def keep_hours(self) -> None:
        """Pause and continue by the schedule, without an end."""
        while True:
            with contextlib.suppress(OSError):  # of a battery that is being unplugged
                await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Ask the schedule."""
        before, why = self.why, await self._schedule.why_not()
        if self.hold is not Hold.OWNER and (why or "") != before:
            self._give(self.phase, Hold.SCHEDULE if why else None)

    async def next(self) -> None:
        """Wait for the next command."""
        self._came.clear()
        await self._came.wait()

    def _give(self, phase: Phase, hold: Hold | None) -> None:
        self.phase, self.hold = phase, hold
        (self.flush.set if hold is not None or self.ending else self.flush.clear)()
        self._came.set()
