"""What a node's owner wants of it now: whether it goes on, and whether it may train, by commands or by a schedule of
hours and the battery."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import datetime
from enum import Enum, auto
from pathlib import Path

import psutil

from ftis_node.config.hours import is_open, next_opening, read_hours
from ftis_node.config.settings import Settings
from ftis_node.host.clocks import unix_seconds

LOOK_SECONDS = 5.0  # between looks at clock and battery
SUPPLIES = Path("/sys/class/power_supply")  # of Linux


def _has_battery() -> bool:
    """Whether this machine may have one: of a machine without, psutil takes a wireless mouse's."""
    return not SUPPLIES.exists() or any(SUPPLIES.glob("BAT*"))


class Schedule:
    """Looks at clock and battery again and again."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        """
        Args:
            settings: returns the node's present settings.
        """
        self._settings = settings
        self.why: str | None = None  # at the latest look, overruled or not
        self._overruled = False

    def why_not(self) -> str | None:
        """Return why the node should not train now, as a sentence, or None."""
        self.why = self._look()
        self._overruled = self._overruled and self.why is not None
        if self._overruled:
            return None
        return self.why

    def overrule(self) -> None:
        """Let the node train until there was nothing against it once."""
        self._overruled = self.why is not None

    def _look(self) -> str | None:
        settings = self._settings()
        now = datetime.fromtimestamp(unix_seconds())
        spans = read_hours(settings.hours)
        if not is_open(spans, now):
            return f"It is outside of its hours ({settings.hours}); it goes on at {next_opening(spans, now):%a %H:%M}."
        if not settings.idle_only:
            return None
        battery = psutil.sensors_battery() if _has_battery() else None
        if battery is not None and battery.power_plugged is False:
            return f"The machine runs on its battery ({battery.percent:.0f} %)."
        return None


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
    stopping: set in the phase STOPPING. deadline: by when, then, the node must have ended (`time.monotonic`).
    flush: set if the running step is to wait for nothing.
    """

    def __init__(self, schedule: Schedule, *, paused: bool) -> None:
        self.phase = Phase.GOING_ON
        self.hold = Hold.OWNER if paused else None
        self.stopping = asyncio.Event()
        self.flush = asyncio.Event()
        self.deadline = 0.0
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
        """Why the schedule holds the node, if it does."""
        if self.hold is Hold.SCHEDULE:
            return self._schedule.why or ""
        return ""

    def stop(self, seconds: float) -> None:
        """End the node within so many seconds."""
        self.deadline = time.monotonic() + seconds
        self.stopping.set()
        self._give(Phase.STOPPING, self.hold)

    def finish(self) -> None:
        self._give(Phase.FINISHING, self.hold)

    def pause(self) -> None:
        self._give(self.phase, Hold.OWNER)

    def resume(self) -> None:
        """Train, also in spite of hours and battery, until these allow it anyway."""
        self._schedule.overrule()
        self._give(self.phase, None)

    async def keep_hours(self) -> None:
        """Pause and continue by the schedule, without an end."""
        while True:
            with contextlib.suppress(OSError):  # of a battery that is being unplugged
                self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Ask the schedule."""
        before = self.why
        why = self._schedule.why_not()
        if self.hold is not Hold.OWNER and (why or "") != before:
            self._give(self.phase, Hold.SCHEDULE if why else None)

    async def next(self) -> None:
        """Wait for the next command."""
        self._came.clear()
        await self._came.wait()

    def _give(self, phase: Phase, hold: Hold | None) -> None:
        self.phase = phase
        self.hold = hold
        if hold is not None or self.ending:
            self.flush.set()
        else:
            self.flush.clear()
        self._came.set()
